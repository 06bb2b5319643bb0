"""An fp32 weight in the order in which oneDNN reads it, for inference on x86 processors.

    if can_reorder(weight_NK):
        weight = ReorderedWeight(weight_NK)
    y = linear(x, weight)

It is read up to twice as fast as a plain weight, which oneDNN takes too, and MKL (docs/decisions/0014).

Shapes: K summed over, N outputs.
"""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.linear import PackedWeight

__all__ = ["ReorderedWeight", "can_reorder", "padded_rows"]

_ROWS = 32  # that the order is chosen for; it serves every other number too
_STEPS = ((2, 1), (64, 4), (128, 16), (256, 32), (1024, 64), (2**31, 256))  # up to this many rows, multiples of that


def padded_rows(num_rows: int) -> int:
    """Returns the number of rows that a product of `num_rows` is computed with.

    The library writes code for every number of rows that it meets, about 0.6 MB for each shape of weight, and never
    drops it: 512 numbers and five shapes took 1.9 GB. These are 38 up to 1,024.
    """
    step = next(step for limit, step in _STEPS if num_rows <= limit)
    return -(-num_rows // step) * step


def can_reorder(weight_NK: Tensor) -> bool:
    """Whether this machine's library takes such a weight."""
    return (
        torch.backends.mkldnn.is_available()
        and platform.machine() in ("x86_64", "AMD64")
        and weight_NK.device.type == "cpu"
        and weight_NK.dtype == torch.float32
    )


class ReorderedWeight(PackedWeight):
    """The weight itself, to the bit; sums run in another order than `F.linear`'s.

    keep_rows   for a weight that is an embedding as well: the plain one stays beside it
    """

    def __init__(self, weight_NK: Tensor, *, keep_rows: bool = False) -> None:
        super().__init__()
        weight_NK = weight_NK.detach()
        self.shape = weight_NK.shape
        self._reordered = torch.ops.mkldnn._reorder_linear_weight(weight_NK, _ROWS)
        self._plain = weight_NK if keep_rows else None

    @property
    def num_bytes(self) -> int:
        return 4 * self.shape.numel() * (1 if self._plain is None else 2)

    def product(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_empty((*x.shape[:-1], self.shape[0]))
        x_RK = x.reshape(-1, self.shape[1])
        num_rows = len(x_RK)
        padding = padded_rows(num_rows) - num_rows
        if padding:
            x_RK = F.pad(x_RK, (0, 0, 0, padding))
        out_RN = torch.ops.mkldnn._linear_pointwise(x_RK, self._reordered, None, "none", [], "")
        return out_RN[:num_rows].view(*x.shape[:-1], self.shape[0])

    def rows(self, ids: Tensor) -> Tensor:
        assert self._plain is not None, "only embeddings are read by row"
        return F.embedding(ids, self._plain)

    def release(self) -> None:
        self._reordered = self._plain = None
