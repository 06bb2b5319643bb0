"""The norm modules: weights, and the kernel's arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardline.kernels import rms_norm
from shardline.models.config import DecoderConfig

__all__ = ["RMSNorm", "make_norm"]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim of size `dim`; the scale is `offset` + weight."""

    def __init__(self, dim: int, *, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))
        self._eps = eps
        self._offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self._eps, offset=self._offset)


def make_norm(config: DecoderConfig, dim: int) -> nn.Module:
    """Returns the family's kind of norm over `dim`."""
    if config.norm == "layer":
        return nn.LayerNorm(dim, eps=config.norm_eps)
    return RMSNorm(dim, eps=config.norm_eps, offset=config.norm_offset)
