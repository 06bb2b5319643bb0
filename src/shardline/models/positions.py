"""Rotary position embedding: frequencies from the config, and the turn of queries and keys.

Shapes: B batch, T tokens, N heads, H head size. The layout is Hugging Face's: dim i turns with dim i + H/2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardline.models.config import RopeConfig

__all__ = ["Rope", "inverse_frequencies", "rotate"]


class Rope:
    """Turns positions into cos and sin; holds no parameters and no buffers that a checkpoint or shard could lose."""

    def __init__(self, rope: RopeConfig, *, head_dim: int, max_position_embeddings: int) -> None:
        self._rope = rope
        self._head_dim = head_dim
        self._max_positions = max_position_embeddings
        self._frequencies: dict[torch.device, tuple[Tensor, float]] = {}

    def cos_sin(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos_BTH and sin_BTH in fp32 for integer positions."""
        device = positions_BT.device
        if device not in self._frequencies:
            frequencies, scale = inverse_frequencies(
                self._rope, head_dim=self._head_dim, max_position_embeddings=self._max_positions
            )
            self._frequencies[device] = frequencies.to(device), scale
        frequencies, scale = self._frequencies[device]
        angles = positions_BT.unsqueeze(-1).float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * scale, angles.sin() * scale


def rotate(x_BTNH: Tensor, cos_BTH: Tensor, sin_BTH: Tensor) -> Tensor:
    """Returns x turned by its token's angles, in the dtype of `x`."""
    first, second = x_BTNH.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    cos, sin = cos_BTH.unsqueeze(2).to(x_BTNH.dtype), sin_BTH.unsqueeze(2).to(x_BTNH.dtype)
    return x_BTNH * cos + turned * sin


def inverse_frequencies(rope: RopeConfig, *, head_dim: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    """Returns (radians per token of each pair, fp32 of shape [H/2]; factor on cos and sin)."""
    with torch.device("cpu"):  # a model being built on the meta device still needs real angles
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        plain = 1.0 / rope.theta**exponents
        if rope.kind == "default":
            return plain, 1.0
        if rope.kind == "linear":
            return plain / rope.factor, 1.0
        if rope.kind == "llama3":
            return _llama3(rope, plain, max_position_embeddings), 1.0
        assert rope.kind == "yarn", rope.kind
        return _yarn(rope, plain, head_dim=head_dim, max_position_embeddings=max_position_embeddings)


def _llama3(rope: RopeConfig, plain: Tensor, max_position_embeddings: int) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between interpolated."""
    original = rope.original_max_position_embeddings or max_position_embeddings
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = torch.where(wavelength > original / rope.low_freq_factor, plain / rope.factor, between)
    return torch.where(wavelength < original / rope.high_freq_factor, plain, stretched)


def _yarn(rope: RopeConfig, plain: Tensor, *, head_dim: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    """YaRN, sections 3.2-3.4: a ramp over dims between `beta_fast` and `beta_slow` turns in the original context."""
    original = rope.original_max_position_embeddings or max_position_embeddings

    def dim_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies = plain / rope.factor * ramp + plain * (1 - ramp)

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return frequencies, magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return frequencies, magnitude(1.0)
