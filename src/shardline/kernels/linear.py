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

_FEW_ROWS, _SHORT_ROW = 4, 1024
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

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
    if _is_plain_inference(x, weight):
        return _inference(x, weight, bias)
    return F.linear(x, weight, bias)


def _is_plain_inference(x: Tensor, weight: Tensor) -> bool:
    """fp32 on the CPU in inference mode, as serving runs; training and its evaluation keep what they are held to."""
    return (
        torch.is_inference_mode_enabled()
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def _inference(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Returns what `F.linear` does by the library and the order that read weights fastest (docs/decisions/0014).

    `F.linear` calls MKL, which reads the weights at half of memory's speed for a few rows, and on AMD's processors does
    not use AVX-512. oneDNN, which PyTorch has too, is faster but for 2 to 4 short rows, where MKL's W x^T is.
    """
    num_features = weight_NK.shape[1]
    num_rows = x.numel() // num_features
    if num_rows <= _FEW_ROWS and num_features <= _SHORT_ROW and torch.backends.mkl.is_available():
        x_RK = x.reshape(-1, num_features)
        pair_RK = torch.cat((x_RK, x_RK)) if num_rows == 1 else x_RK  # one alone goes to a routine that is slow
        out_RN = torch.mm(weight_NK, pair_RK.t()).t()[:num_rows].contiguous()
        out = out_RN.view(*x.shape[:-1], -1)
        return out if bias_N is None else out + bias_N
    if not _HAS_ONEDNN:
        return F.linear(x, weight_NK, bias_N)
    # The op wants two dims or more.
    rows = x.unsqueeze(0) if x.ndim == 1 else x
    out = torch.ops.mkldnn._linear_pointwise(rows, weight_NK, bias_N, "none", [], "")
    return out.squeeze(0) if x.ndim == 1 else out


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
