"""Root-mean-square norm (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0) -> Tensor:
    """Returns x / rms(x) * (offset + weight) over the last dim, in the dtype of `x`.

    Statistics are fp32. With an offset (Gemma: 1 + w) the product is fp32 too; without, it is in the dtype of `x`
    (Llama). Each is how its family was trained, and in bf16 they differ; in fp32 PyTorch's fused op does both.
    """
    if x.dtype == weight.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], offset + weight if offset else weight, eps)
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (normed * (offset + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)
