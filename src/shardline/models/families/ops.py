"""How one tensor of a file becomes ours, and exactly back: what is loaded and saved again has the same bits.

An op's `load` takes their tensor and returns ours, in the order of the rule's names; `save` is its inverse.
torch is imported where it computes: a plan reads configs without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from shardline.models.config import DecoderConfig

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "GATE_UP",
    "IDENTITY",
    "QKV",
    "QKV_BY_HEAD",
    "QKV_PAIRS",
    "TRANSPOSE",
    "TRANSPOSED_QKV",
    "Op",
    "RotaryPairs",
]


class Op(Protocol):
    def load(self, theirs: Tensor, config: DecoderConfig) -> tuple[Tensor, ...]: ...

    def save(self, ours: Sequence[Tensor], config: DecoderConfig) -> Tensor: ...


class _Identity:
    def load(self, theirs: Tensor, config: DecoderConfig) -> tuple[Tensor, ...]:
        return (theirs,)

    def save(self, ours: Sequence[Tensor], config: DecoderConfig) -> Tensor:
        return ours[0]


class _Transpose:
    """GPT-2's Conv1D keeps its weights as [in, out]; vectors stay."""

    def load(self, theirs: Tensor, config: DecoderConfig) -> tuple[Tensor, ...]:
        return (theirs.t().contiguous(),)

    def save(self, ours: Sequence[Tensor], config: DecoderConfig) -> Tensor:
        return ours[0].t().contiguous()


class _Qkv:
    """Rows of query, key and value, one block after the other."""

    def load(self, theirs: Tensor, config: DecoderConfig) -> tuple[Tensor, ...]:
        num_kv = config.num_kv_heads * config.head_dim
        parts = theirs.split([config.num_heads * config.head_dim, num_kv, num_kv])
        return tuple(part.contiguous() for part in parts)

    def save(self, ours: Sequence[Tensor], config: DecoderConfig) -> Tensor:
        import torch

        return torch.cat(list(ours))


class _QkvByHead:
    """BLOOM: rows as [head, (query, key, value), head size]."""

    def load(self, theirs: Tensor, config: DecoderConfig) -> tuple[Tensor, ...]:
        by_head = theirs.view(config.num_heads, 3, config.head_dim, *theirs.shape[1:])
        return tuple(part.flatten(0, 1).contiguous() for part in by_head.unbind(1))

    def save(self, ours: Sequence[Tensor], config: DecoderConfig) -> Tensor:
        import torch

        parts = [part.unflatten(0, (config.num_heads, config.head_dim)) for part in ours]
        return torch.stack(parts, dim=1).flatten(0, 2)


class _GateUp:
    """Rows of gate and up, one block after the other."""

    def load(self, theirs: Tensor, config: DecoderConfig) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in theirs.chunk(2))

    def save(self, ours: Sequence[Tensor], config: DecoderConfig) -> Tensor:
        import torch

        return torch.cat(list(ours))


@dataclass(frozen=True)
class RotaryPairs:
    """Files that turn dim 2i with dim 2i + 1; ours turn i with i + R/2, so the rows of each head are sorted."""

    heads: Literal["num_heads", "num_kv_heads"]

    def load(self, theirs: Tensor, config: DecoderConfig) -> tuple[Tensor, ...]:
        return (self._take(theirs, config, _pairs_to_halves(config)),)

    def save(self, ours: Sequence[Tensor], config: DecoderConfig) -> Tensor:
        return self._take(ours[0], config, _pairs_to_halves(config).argsort())

    def _take(self, tensor: Tensor, config: DecoderConfig, order: Tensor) -> Tensor:
        by_head = tensor.unflatten(0, (getattr(config, self.heads), config.head_dim))
        return by_head.index_select(1, order.to(tensor.device)).flatten(0, 1)


def _pairs_to_halves(config: DecoderConfig) -> Tensor:
    import torch

    turning = torch.arange(config.rope.num_dims(config.head_dim))
    return torch.cat((turning[0::2], turning[1::2], torch.arange(len(turning), config.head_dim)))


class _TransposedQkv:
    def load(self, theirs: Tensor, config: DecoderConfig) -> tuple[Tensor, ...]:
        return QKV.load(theirs.t(), config)

    def save(self, ours: Sequence[Tensor], config: DecoderConfig) -> Tensor:
        return QKV.save(ours, config).t().contiguous()


class _QkvPairs:
    """ChatGLM: fused, and queries and keys hold rotary pairs."""

    def load(self, theirs: Tensor, config: DecoderConfig) -> tuple[Tensor, ...]:
        query, key, value = QKV.load(theirs, config)
        return *_QUERY_PAIRS.load(query, config), *_KEY_PAIRS.load(key, config), value

    def save(self, ours: Sequence[Tensor], config: DecoderConfig) -> Tensor:
        query, key, value = ours
        return QKV.save((_QUERY_PAIRS.save((query,), config), _KEY_PAIRS.save((key,), config), value), config)


IDENTITY, TRANSPOSE, GATE_UP = _Identity(), _Transpose(), _GateUp()
QKV, QKV_BY_HEAD, TRANSPOSED_QKV, QKV_PAIRS = _Qkv(), _QkvByHead(), _TransposedQkv(), _QkvPairs()
_QUERY_PAIRS, _KEY_PAIRS = RotaryPairs("num_heads"), RotaryPairs("num_kv_heads")
