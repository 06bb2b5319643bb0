"""Stochastic rounding to bf16, with random bits that no layout and no resume changes.

    rounding = StochasticRounding(seed=0)
    rounding.copy(value, target, step=7, name="model.norm.weight", index=global_index(...))

bf16 keeps 8 bits of a number, and an update smaller than 1/512 of a weight is lost when it is rounded to nearest.
Rounded up with the probability that the dropped bits say, it is right on average (Zamirai et al., 2020,
arXiv:2010.06192).

The construction: a bf16 number is the upper half of an fp32 number, so 16 random bits are added to the lower half and
the lower half is dropped. The bits of one element are the lower half of

    h(h(i xor k0) xor k1)

where i is the element's index in the whole parameter, (k0, k1) the BLAKE2b hash of (seed, step, parameter, tensor), and
h a bijection of 32-bit words (xor-shift, multiply, twice) in which every input bit flips every output bit with a
probability of about one half. An element's bits depend on nothing else: not on the rank that computes them, not on what
lies beside it in memory, not on a generator's state.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["StochasticRounding", "global_index"]

# Elements hashed at a time: on a CPU their words stay in a core's cache, on a GPU each block is a dozen launches.
_BLOCK = {"cpu": 1 << 16}
_BLOCK_ELSEWHERE = 1 << 24


class StochasticRounding:
    """Rounds fp32 values into bf16 tensors."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def copy(self, value: Tensor, target: Tensor, *, step: int, name: str, index: Tensor | int) -> None:
        """Writes `value` (fp32) to `target` (bf16), both contiguous and of one size.

        index   int64, each element's index in the whole parameter, rising; an int: that of the first, the others follow
        name    of the parameter and the tensor: two tensors of one parameter round independently
        """
        digest = hashlib.blake2b(f"{self._seed}/{step}/{name}".encode(), digest_size=8).digest()
        keys = int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)
        values, targets = value.view(-1), target.view(-1)
        if not values.numel():
            return
        last = index + values.numel() - 1 if isinstance(index, int) else int(index[-1])
        block = _BLOCK.get(values.device.type, _BLOCK_ELSEWHERE)
        for begin in range(0, values.numel(), block):
            end = min(begin + block, values.numel())
            if isinstance(index, int):
                place = torch.arange(index + begin, index + end, device=values.device)
            else:
                place = index[begin:end]
            bits = _random_words(place, keys, wide=last >= 1 << 32).bitwise_and_(0xFFFF)
            bits += values[begin:end].view(torch.int32)
            targets[begin:end] = bits.bitwise_and_(-0x10000).view(torch.float32)


def global_index(
    shape: Sequence[int], *, offsets: Sequence[int], sizes: Sequence[int], begin: int, end: int, device: torch.device
) -> Tensor | int:
    """Returns where elements [begin, end) of a part (flat) lie in the whole (flat): a first index where they are
    consecutive, otherwise int64 [end - begin].

    shape            of the whole
    offsets, sizes   of the part in it
    """
    if tuple(sizes[1:]) == tuple(shape[1:]):
        return begin + (offsets[0] * math.prod(shape[1:]) if shape else 0)
    flat = torch.arange(begin, end, device=device)
    index, stride = torch.zeros_like(flat), 1
    for dim in range(len(shape) - 1, -1, -1):
        index += (flat % sizes[dim] + offsets[dim]) * stride
        flat //= sizes[dim]
        stride *= shape[dim]
    return index


def _random_words(index: Tensor, keys: tuple[int, int], *, wide: bool) -> Tensor:
    """Returns 32 random bits (int32) for each index (int64); `wide`: one of them may need more than 32 bits."""
    words = index.to(torch.int32)
    if wide:
        high = (index >> 32).to(torch.int32)
        words = torch.where(high == 0, words, words ^ _mix(high ^ keys[1]))
    return _mix(_mix(words ^ keys[0]) ^ keys[1])


def _mix(words: Tensor) -> Tensor:
    """A bijection of 32-bit words; the multipliers are those of Wellons' lowbias32 (nullprogram.com, public domain)."""
    words = words ^ ((words >> 16) & 0xFFFF)
    words *= 0x7FEB352D
    words ^= (words >> 15) & 0x1FFFF
    words *= 0x846CA68B - (1 << 32)
    words ^= (words >> 16) & 0xFFFF
    return words
