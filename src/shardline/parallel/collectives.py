"""What crosses the tensor-parallel ranks, as operations that autograd can differentiate. No arithmetic of a model here.

The pairs are those of Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053, section 3; Korthikanti et al., 2022,
arXiv:2205.05198, section 4.2.2, for the sequence):

    operation          forward                         backward
    copy               nothing                         all-reduce
    reduce             all-reduce                      nothing
    gather             all-gather along the sequence   reduce-scatter along it
    scatter            reduce-scatter                  all-gather
    gather_replicated  all-gather                      this rank's part: every rank has the same gradient
    split              this rank's part                all-gather

The sequence is dim 1 of [B, T, D].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["copy", "gather", "gather_replicated", "reduce", "scatter", "split"]


def copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _Pair.apply(x, group, _same, _all_reduce)


def reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _Pair.apply(x, group, _all_reduce, _same)


def gather(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _Pair.apply(x_BTD, group, _all_gather, _reduce_scatter)


def scatter(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _Pair.apply(x_BTD, group, _reduce_scatter, _all_gather)


def gather_replicated(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _Pair.apply(x_BTD, group, _all_gather, _part)


def split(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _Pair.apply(x_BTD, group, _part, _all_gather)


class _Pair(torch.autograd.Function):
    """One communication forward, its transpose backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: Any, backward: Any) -> Tensor:
        ctx.group, ctx.transpose = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.transpose(gradients[0], ctx.group), None, None, None


def _same(x: Tensor, _: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group.size()
    parts = x_BTD.new_empty((size, *x_BTD.shape))
    dist.all_gather_single(parts.flatten(0, 1), x_BTD.contiguous(), group=group)
    return parts.movedim(0, 1).flatten(1, 2)


def _reduce_scatter(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = torch.cat(x_BTD.chunk(group.size(), dim=1))
    own = parts.new_empty((x_BTD.shape[0], x_BTD.shape[1] // group.size(), x_BTD.shape[2]))
    dist.reduce_scatter_single(own, parts, group=group)
    return own


def _part(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x_BTD.chunk(group.size(), dim=1)[group.rank()].contiguous()
