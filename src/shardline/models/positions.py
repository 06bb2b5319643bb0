"""Positions: rotary frequencies and the turn of queries and keys, and ALiBi's slopes.

Shapes: B batch, T tokens, N heads, H head size. The layout is Hugging Face's for Llama: of R dims that turn, dim i
turns with dim i + R/2. Families whose files hold pairs are permuted at load.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardline.kernels import rowwise
from shardline.models.config import RopeConfig

__all__ = ["Rope", "alibi_slopes", "inverse_frequencies", "rotate"]

_MAX_CACHED = 64


class Rope:
    """Turns positions into cos and sin; holds no parameters and no buffers that a checkpoint or shard could lose."""

    def __init__(self, rope: RopeConfig, *, head_dim: int, max_position_embeddings: int) -> None:
        self._rope = rope
        self._head_dim = head_dim
        self._max_positions = max_position_embeddings
        self._cache: dict[tuple[torch.device, int], tuple[Tensor, float]] = {}

    def cos_sin(self, positions_BT: Tensor, lengths_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns cos_BTR and sin_BTR in fp32 for integer positions.

        lengths_BT   tokens of the sequence that each token belongs to, where angles depend on it (longrope, dynamic);
                     without it, all count as long as the furthest position of the batch
        """
        if not self._rope.depends_on_length:
            return self._angles(positions_BT, 0)
        if lengths_BT is None:
            return self._angles(positions_BT, int(positions_BT.max()) + 1)
        cos_BTR, sin_BTR = self._angles(positions_BT, int(lengths_BT.max()))
        for length in lengths_BT.unique().tolist()[:-1]:
            here_BT1 = (lengths_BT == length).unsqueeze(-1)
            cos, sin = self._angles(positions_BT, length)
            cos_BTR, sin_BTR = torch.where(here_BT1, cos, cos_BTR), torch.where(here_BT1, sin, sin_BTR)
        return cos_BTR, sin_BTR

    def _angles(self, positions_BT: Tensor, length: int) -> tuple[Tensor, Tensor]:
        length = self._length_class(length)
        key = positions_BT.device, length
        if key not in self._cache:
            frequencies, scale = inverse_frequencies(
                self._rope, head_dim=self._head_dim, max_position_embeddings=self._max_positions, length=length
            )
            if len(self._cache) >= _MAX_CACHED:  # dynamic has one for every length
                self._cache.clear()
            self._cache[key] = frequencies.to(positions_BT.device), scale
        frequencies, scale = self._cache[key]
        angles = positions_BT.unsqueeze(-1).float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return rowwise(torch.cos, angles) * scale, rowwise(torch.sin, angles) * scale

    def _length_class(self, length: int) -> int:
        """All lengths with the same frequencies share one number."""
        if self._rope.switch_length is not None:
            return self._rope.switch_length if length >= self._rope.switch_length else 1
        if self._rope.kind == "dynamic":
            return max(length, self._max_positions)
        return 0


def rotate(x_BTNH: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    """Returns x with its first R dims turned by its token's angles, in the dtype of `x`."""
    num_dims = cos_BTR.shape[-1]
    turning, rest = x_BTNH[..., :num_dims], x_BTNH[..., num_dims:]
    first, second = turning.chunk(2, dim=-1)
    cos, sin = cos_BTR.unsqueeze(2).to(x_BTNH.dtype), sin_BTR.unsqueeze(2).to(x_BTNH.dtype)
    turned = turning * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if not rest.shape[-1] else torch.cat((turned, rest), dim=-1)


def alibi_slopes(num_heads: int) -> Tensor:
    """Returns slopes_N, fp32 (Press et al., 2022, arXiv:2108.12409): powers of 2 ** (-8 / n), or between them."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")


def inverse_frequencies(
    rope: RopeConfig, *, head_dim: int, max_position_embeddings: int, length: int = 0
) -> tuple[Tensor, float]:
    """Returns (radians per token of each pair, fp32 [R/2]; factor on cos and sin) for sequences of `length`."""
    dims = rope.num_dims(head_dim)
    with torch.device("cpu"):  # a model being built on the meta device still needs real angles
        if rope.kind == "dynamic":
            grown = rope.factor * length / max_position_embeddings - (rope.factor - 1)
            return _plain(rope.theta * max(1.0, grown) ** (dims / (dims - 2)), dims), 1.0
        plain = _plain(rope.theta, dims)
        if rope.kind == "default":
            return plain, 1.0
        if rope.kind == "linear":
            return plain / rope.factor, 1.0
        if rope.kind == "llama3":
            return _llama3(rope, plain, max_position_embeddings), 1.0
        if rope.kind == "longrope":
            return _longrope(rope, plain, length)
        assert rope.kind == "yarn", rope.kind
        return _yarn(rope, plain, dims, max_position_embeddings)


def _plain(theta: float, dims: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dims, 2, dtype=torch.int64).float() / dims)


def _llama3(rope: RopeConfig, plain: Tensor, max_position_embeddings: int) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between interpolated."""
    original = rope.original_max_position_embeddings or max_position_embeddings
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = torch.where(wavelength > original / rope.low_freq_factor, plain / rope.factor, between)
    return torch.where(wavelength < original / rope.high_freq_factor, plain, stretched)


def _longrope(rope: RopeConfig, plain: Tensor, length: int) -> tuple[Tensor, float]:
    """LongRoPE: a divisor for each pair, one list up to the original context and one beyond."""
    original = rope.original_max_position_embeddings
    assert original is not None, "read_rope refuses a longrope without it"
    divisors = torch.tensor(rope.long_factor if length > original else rope.short_factor, dtype=torch.float32)
    if rope.attention_factor is not None:
        return plain / divisors, rope.attention_factor
    scale = 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(original))
    return plain / divisors, scale


def _yarn(rope: RopeConfig, plain: Tensor, dims: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    """YaRN, sections 3.2-3.4: a ramp over dims between `beta_fast` and `beta_slow` turns in the original context."""
    original = rope.original_max_position_embeddings or max_position_embeddings

    def dim_of(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dims // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies = plain / rope.factor * ramp + plain * (1 - ramp)

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return frequencies, magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return frequencies, magnitude(1.0)
