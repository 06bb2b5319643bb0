"""How one tensor of a file becomes ours, and exactly back: what is loaded and saved again has the same bits.

OPS["qkv"].load(theirs, config)     # (query, key, value)
OPS["qkv"].save(ours, config)       # theirs again

torch is imported where it computes: a plan reads configs without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardline.models.config import DecoderConfig

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OPS", "Op"]


@dataclass(frozen=True, kw_only=True)
class Op:
    """Their rows in another order, cut into ours. Nothing is lost on the way, so that `save` undoes `load`.

    transposed  the rows are the file's columns
    order       (number of rows, config) -> which of the file's rows come first, second, ...
    parts       how many tensors of one size ours are, or "qkv": query, key and value
    """

    transposed: bool = False
    order: Callable[[int, DecoderConfig], list[int]] | None = None
    parts: int | Literal["qkv"] = 1

    def load(self, theirs: Tensor, config: DecoderConfig) -> tuple[Tensor, ...]:
        """Returns our tensors, in the order of the row's names."""
        rows = theirs.t() if self.transposed else theirs
        if self.order is not None:
            rows = rows[self.order(len(rows), config)]
        if self.parts == "qkv":
            num_kv = config.num_kv_heads * config.head_dim
            parts = rows.split([config.num_heads * config.head_dim, num_kv, num_kv])
        else:
            parts = rows.chunk(self.parts)
        return tuple(part.contiguous() for part in parts)

    def save(self, ours: Sequence[Tensor], config: DecoderConfig) -> Tensor:
        """Returns the file's tensor."""
        import torch

        rows = ours[0] if len(ours) == 1 else torch.cat(list(ours))
        if self.order is not None:
            order = self.order(len(rows), config)
            rows = rows[sorted(range(len(order)), key=order.__getitem__)]
        return rows.t().contiguous() if self.transposed else rows


def _by_head(num_rows: int, config: DecoderConfig) -> list[int]:
    """The file's rows are [head, (query, key, value), head size]."""
    size = config.head_dim
    starts = [start for part in range(3) for start in range(part * size, num_rows, 3 * size)]
    return [start + i for start in starts for i in range(size)]


def _pairs(num_rows: int, config: DecoderConfig) -> list[int]:
    """The file turns dim 2i of queries and keys with dim 2i + 1; the decoder turns i with i + R/2."""
    size, turning = config.head_dim, config.rope.num_dims(config.head_dim)
    turned = [*range(0, turning, 2), *range(1, turning, 2), *range(turning, size)]
    values = (config.num_heads + config.num_kv_heads) * size  # from this row on, in a fused matrix
    starts = range(0, num_rows, size)
    return [start + i for start in starts for i in (turned if start < values else range(size))]


OPS = {
    "identity": Op(),
    "transpose": Op(transposed=True),
    "gate_up": Op(parts=2),
    "qkv": Op(parts="qkv"),
    "transposed_qkv": Op(transposed=True, parts="qkv"),
    "qkv_by_head": Op(order=_by_head, parts="qkv"),
    "pairs": Op(order=_pairs),
    "qkv_pairs": Op(order=_pairs, parts="qkv"),
}
