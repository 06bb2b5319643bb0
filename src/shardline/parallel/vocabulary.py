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

__all__ = ["vocabulary_parallel_cross_entropy"]


def vocabulary_parallel_cross_entropy(
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
        num_words = weight_VD.shape[0]
        gradients: list[Tensor] = []
        if with_gradients:
            gradients = [torch.empty_like(x_RD), torch.zeros_like(weight_VD)]
            gradients += [torch.zeros_like(bias_V)] if bias_V is not None else []
        with torch.autocast(x_RD.device.type, enabled=False):
            for start in range(0, x_RD.shape[0], chunk_rows):
                rows = slice(start, start + chunk_rows)
                x, targets = x_RD[rows], targets_R[rows]
                logits = torch.nn.functional.linear(x, weight_VD, bias_V).float()
                slope = None
                if softcap is not None:
                    capped = torch.tanh(logits / softcap)
                    slope, logits = 1 - capped.square(), softcap * capped
                top = logits.amax(-1)
                if group is not None:
                    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
                logits -= top.unsqueeze(-1)
                real = targets != ignored
                here = real & (targets >= first) & (targets < first + num_words)
                index = (targets - first).where(here, 0).unsqueeze(-1)
                picked = logits.gather(-1, index).squeeze(-1) * here
                sums = torch.stack([logits.exp_().sum(-1), picked])
                if group is not None:
                    dist.all_reduce(sums, group=group)
                total += ((sums[0].log() - sums[1]) * real).sum()
                if not with_gradients:
                    continue
                slopes = logits.div_(sums[0].unsqueeze(-1))  # softmax minus one at the target, nothing for no target
                slopes.scatter_add_(-1, index, -here.float().unsqueeze(-1))
                slopes *= real.unsqueeze(-1)
                if slope is not None:
                    slopes *= slope
                slopes = slopes.to(x.dtype)
                torch.mm(slopes, weight_VD, out=gradients[0][rows])
                gradients[1].addmm_(slopes.T, x)
                if bias_V is not None:
                    gradients[2] += slopes.sum(0)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *bias = (gradient * outer[0].to(gradient.dtype) for gradient in ctx.saved_tensors)
        return (x, weight, bias[0] if bias else None, *[None] * 7)
