"""Root-mean-square norm (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Returns x / rms(x) * weight over the last dim: the statistics in fp32, the product in the dtype of `x`."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
