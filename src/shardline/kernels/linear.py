"""Linear maps and embeddings. Every product with a weight goes through `linear`, so a backend is swapped here.

    y = linear(x, weight, bias)

A weight is a tensor, or a `PackedWeight` that computes its own products (quantised ones do).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.nn.functional as F
from torch import Tensor, nn

from shardline.kernels.invariance import fixed_linear, is_batch_invariant

__all__ = ["Embedding", "Linear", "PackedWeight", "embedding", "linear"]


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


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Returns x W^T + b, [..., N], in the dtype of `x`."""
    if isinstance(weight, PackedWeight):
        out = weight.product(x)
        return out if bias is None else out + bias
    if is_batch_invariant():
        return fixed_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def embedding(ids: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    """Returns the rows `ids` of the weight, [..., K]."""
    return weight.rows(ids) if isinstance(weight, PackedWeight) else F.embedding(ids, weight)


class Linear(nn.Linear):
    """PyTorch's module over `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class Embedding(nn.Embedding):
    """PyTorch's module over `embedding`."""

    def forward(self, input: Tensor) -> Tensor:
        return embedding(input, self.weight)
