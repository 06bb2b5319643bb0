"""Who takes what, as arithmetic on sizes: whole things dealt out to ranks, and the part that a fraction selects.

deal([8, 4, 4, 2], ranks=2)                      # [0, 1, 1, 0]: 10 and 8
largest_first([8, 4, 4, 2], fraction=0.5)        # {0, 1}: the largest until half of the total is there
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["deal", "largest_first"]


def deal(sizes: Sequence[int], *, ranks: int) -> list[int]:
    """Returns the rank that owns each thing: largest first, each to the rank with the least so far."""
    owners = [0] * len(sizes)
    shares = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        share, rank = shares[0]
        owners[index] = rank
        heapq.heapreplace(shares, (share + sizes[index], rank))
    return owners


def largest_first(sizes: Sequence[int], *, fraction: float) -> set[int]:
    """Returns the indices of the largest things that together reach `fraction` of the total."""
    wanted, chosen = fraction * sum(sizes), set[int]()
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if wanted <= 0:
            break
        chosen.add(index)
        wanted -= sizes[index]
    return chosen
