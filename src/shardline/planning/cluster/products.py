"""How near to a device's best a matrix product of given dimensions comes.

    product_efficiency(8192, 1800, 14400, device)     # 1,800 columns are no whole number of tiles

Three effects (NVIDIA's Matrix Multiplication Background guide): operands that don't start on a boundary of 128 bytes
are loaded slowly; the last tile of a dimension and the last wave of tiles are partly empty; a short product does not
fill the pipeline.
"""

from __future__ import annotations

import math
from functools import lru_cache

__all__ = ["layer_efficiency", "product_efficiency"]

_TILE_M, _TILE_N = 128, 256
_ALIGNED = 64  # elements of two bytes in 128 bytes
_UNALIGNED = 0.53  # fit to BLOOM's hidden sizes 14,400 and 13,824, the same layout: 1.27 times
_FILL = 500  # products of this depth reach half


@lru_cache(maxsize=16384)
def product_efficiency(m: int, n: int, k: int, units: int) -> float:
    """Returns the share of the best rate that [m, k] @ [k, n] reaches on a device with `units` of tiles at once."""
    tiles = math.ceil(m / _TILE_M) * math.ceil(n / _TILE_N)
    waves = tiles / max(1, units)
    full = waves / math.ceil(waves)
    # Libraries choose other tiles, or split k, where waves would be bad: about half of the loss remains.
    wave = 1 - (1 - full) * 0.5
    edge = (m / (math.ceil(m / 64) * 64)) * (n / (math.ceil(n / 64) * 64))
    aligned = 1.0 if n % _ALIGNED == 0 and k % _ALIGNED == 0 else _UNALIGNED
    return wave * edge * aligned * k / (k + _FILL)


@lru_cache(maxsize=16384)
def layer_efficiency(
    tokens: int, hidden: int, width: int, kv: int, inner: int, gated: bool, t: int, units: int
) -> float:
    """Returns the mean share over a layer's products, weighted by their work."""
    work = time = 0.0
    for n, k in (
        ((width + 2 * kv) / t, hidden),
        (hidden, width / t),
        ((2 if gated else 1) * inner / t, hidden),
        (hidden, inner / t),
    ):
        n, k = max(1, int(n)), max(1, int(k))
        flops = float(n) * k
        work += 3 * flops
        time += flops / product_efficiency(tokens, n, k, units)  # forward
        time += flops / product_efficiency(tokens, k, n, units)  # gradient of the input
        time += flops / product_efficiency(n, k, tokens, units)  # gradient of the weight: as deep as there are tokens
    return work / time
