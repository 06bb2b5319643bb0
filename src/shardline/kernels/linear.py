"""Linear maps and embeddings. Every product with a weight goes through `linear`, so a backend is swapped here.

    y = linear(x, weight, bias)

A weight is a tensor, or a `PackedWeight` that computes its own products (quantised ones do).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
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
    if _is_decode(x, weight):
        return _few_rows(x, weight, bias)
    return F.linear(x, weight, bias)


def _is_decode(x: Tensor, weight_NK: Tensor) -> bool:
    """Whether these are the few rows of a decode step that MKL multiplies faster the other way round.

    MKL's x W^T reads the weights at half of what memory gives, and W x^T at all of it, for a few rows and a K that
    caches well. Measured with AVX2 on one and two threads (docs/decisions/0014).
    """
    if torch.is_grad_enabled() or x.device.type != "cpu" or x.dtype != torch.float32 or weight_NK.dtype != x.dtype:
        return False
    num_features = weight_NK.shape[1]
    num_rows = x.numel() // num_features
    if not 1 <= num_rows <= 8 or not torch.backends.mkl.is_available() or torch.compiler.is_compiling():
        return False
    if num_features <= 1024:
        return True
    return torch.get_num_threads() > 1 and num_rows <= 4 and (num_rows > 1 or num_features <= 8192)


def _few_rows(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Returns x W^T + b as (W x^T)^T; a single row goes twice, since one alone is another routine's, and slow."""
    x_RK = x.reshape(-1, x.shape[-1])
    pair_RK = x_RK.repeat(2, 1) if len(x_RK) == 1 else x_RK  # not `expand`: MKL takes 4 times as long over it
    out_RN = torch.mm(weight_NK, pair_RK.t()).t()[: len(x_RK)].contiguous()
    out = out_RN.view(*x.shape[:-1], -1)
    return out if bias_N is None else out + bias_N


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
