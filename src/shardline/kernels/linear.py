"""Linear maps and embeddings. Every product with a weight goes through `linear`, so a backend is swapped here.

    y = linear(x, weight, bias)

A weight is a tensor, or a `PackedWeight` that computes its own products: quantised, or in another order in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shardline.kernels.invariance import fixed_linear, is_batch_invariant

__all__ = ["Embedding", "Linear", "PackedWeight", "embedding", "joint", "linear"]


class PackedWeight(nn.Module, ABC):
    """A weight [N, K] in a form of its own; it takes the place of a module's `weight`."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that it takes."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Returns x W^T, [..., N]."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Returns rows of W as fp32, [..., K]."""

    @abstractmethod
    def release(self) -> None:
        """Gives the memory back; what it held is lost, and it must be replaced before anything asks for a product."""


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Returns x W^T + b, [..., N], in the dtype of `x`."""
    if isinstance(weight, PackedWeight):
        out = weight.product(x)
        return out if bias is None else out + bias
    if is_batch_invariant():
        return fixed_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def joint(x: Tensor, *maps: Linear) -> tuple[Tensor, ...]:
    """Returns what each of several maps makes of `x`, by one product where serving has joined their weights."""
    joined = maps[0].joined
    if joined is None:
        return tuple(each(x) for each in maps)
    return joined(x).split([each.out_features for each in maps], dim=-1)


def embedding(ids: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    """Returns the rows `ids` of the weight, [..., K]."""
    return weight.rows(ids) if isinstance(weight, PackedWeight) else F.embedding(ids, weight)


class Linear(nn.Linear):
    """PyTorch's module over `linear`.

    joined   the map whose outputs are this one's and those of others that read the same input, one after the other
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.joined: Linear | None = None

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class Embedding(nn.Embedding):
    """PyTorch's module over `embedding`."""

    def forward(self, input: Tensor) -> Tensor:
        return embedding(input, self.weight)
