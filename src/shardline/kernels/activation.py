"""The nonlinear functions between linear maps, elementwise."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.invariance import rowwise

__all__ = ["ACTIVATIONS", "soft_cap"]


def _silu(x: Tensor) -> Tensor:
    return rowwise(F.silu, x)


def _gelu(x: Tensor) -> Tensor:
    return rowwise(F.gelu, x)


def _plain_gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_tanh(x: Tensor) -> Tensor:
    return rowwise(_plain_gelu_tanh, x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
}


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """Returns cap * tanh(x / cap), or `x` where there is no cap (Gemma 2)."""
    return x if cap is None else cap * rowwise(torch.tanh, x / cap)
