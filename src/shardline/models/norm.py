"""The norm module: a weight, and the kernel's arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardline.kernels import rms_norm

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim of size `dim`."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self._eps)
