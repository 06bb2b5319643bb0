"""Cross-entropy over a vocabulary that may be dealt out to the tensor-parallel ranks; full logits exist nowhere.

Each rank makes the logits of its own words, a chunk of rows at a time. A row's maximum, sum of exponentials and target
logit are three numbers to reduce (Shoeybi et al., 2019, arXiv:1909.08053, section 3); the gradients are made in the
same pass, so that no chunk's logits are kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["chunked_cross_entropy"]


def chunked_cross_entropy(
    x_RD: Tensor,
    weight_VD: Tensor,
    targets_R: Tensor,
    *,
    bias_V: Tensor | None,
    softcap: float | None,
    first: int,
    group: dist.ProcessGroup | None,
    ignored: int,
    chunk_rows: int,
) -> Tensor:
    """Returns the fp32 sum of -log p(target) over targets that are not `ignored`, the same on every rank.

    x_RD       the same on every rank; its gradient here is this rank's part of a sum over ranks
    weight_VD  the head's rows of this rank's words, from word `first` on
    group      the tensor ranks; None: this rank has all words
    """
    if torch.is_autocast_enabled(x_RD.device.type):
        dtype = torch.get_autocast_dtype(x_RD.device.type)
        x_RD, weight_VD = x_RD.to(dtype), weight_VD.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    return _CrossEntropy.apply(
        x_RD, weight_VD, bias_V, targets_R, softcap, first, group, ignored, chunk_rows, torch.is_grad_enabled()
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_R: Tensor,
        softcap: float | None,
        first: int,
        group: dist.ProcessGroup | None,
        ignored: int,
        chunk_rows: int,
        with_gradients: bool,
    ) -> Tensor:
        total = x_RD.new_zeros((), dtype=torch.float32)
        gradients: list[Tensor] = []
        if with_gradients:
            gradients = [torch.empty_like(x_RD), torch.zeros_like(weight_VD)]
            gradients += [torch.zeros_like(bias_V)] if bias_V is not None else []
        with torch.autocast(x_RD.device.type, enabled=False):
            for start in range(0, x_RD.shape[0], chunk_rows):
                rows = slice(start, start + chunk_rows)
                x, targets = x_RD[rows], targets_R[rows]
                real = targets != ignored
                here = real & (targets >= first) & (targets < first + weight_VD.shape[0])
                index = (targets - first).where(here, 0).unsqueeze(-1)
                loss, slopes = _chunk(
                    torch.nn.functional.linear(x, weight_VD, bias_V), index, here, real, softcap, group, with_gradients
                )
                total += loss
                if slopes is None:
                    continue
                torch.mm(slopes, weight_VD, out=gradients[0][rows])
                gradients[1].addmm_(slopes.T, x)
                if bias_V is not None:
                    gradients[2] += slopes.sum(0)
                del slopes  # before the next chunk's logits are there
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        # In place: the head's gradient is as large as the head, and a second backward pass is an error of autograd's.
        x, weight, *bias = (gradient.mul_(outer[0].to(gradient.dtype)) for gradient in ctx.saved_tensors)
        return (x, weight, bias[0] if bias else None, *[None] * 7)


def _chunk(
    made_RV: Tensor,
    index_R1: Tensor,
    here_R: Tensor,
    real_R: Tensor,
    softcap: float | None,
    group: dist.ProcessGroup | None,
    with_gradients: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns (the summed loss of a chunk's rows, its gradient to the logits in their dtype, made in their place).

    index_R1   each target's place among this rank's words, 0 where it is not among them
    here_R     whether it is
    real_R     whether the row has a target
    """
    logits, slope = made_RV.float(), None
    dtype = made_RV.dtype
    del made_RV
    if softcap is not None:
        logits = logits.div_(softcap).tanh_()
        slope = logits.square().neg_().add_(1)
        logits *= softcap
    top = logits.amax(-1)
    if group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    logits -= top.unsqueeze(-1)
    picked = logits.gather(-1, index_R1).squeeze(-1) * here_R
    sums = torch.stack([logits.exp_().sum(-1), picked])
    if group is not None:
        dist.all_reduce(sums, group=group)
    loss = ((sums[0].log() - sums[1]) * real_R).sum()
    if not with_gradients:
        return loss, None
    logits /= sums[0].unsqueeze(-1)  # softmax minus one at the target, and nothing where there is no target
    logits.scatter_add_(-1, index_R1, -here_R.float().unsqueeze(-1))
    logits *= real_R.unsqueeze(-1)
    if slope is not None:
        logits *= slope
        del slope
    return loss, logits.to(dtype)
