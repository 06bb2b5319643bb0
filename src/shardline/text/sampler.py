"""Data order as an index: step n reads samples [n * B, (n + 1) * B) of an endless order in which each epoch is one
seeded permutation of the rows.

    rows = sample_rows(step, global_batch=8, num_rows=dataset.num_rows, seed=0)
    mine = rows[rank * 8 // num_ranks : (rank + 1) * 8 // num_ranks]

Nothing is carried from step to step, so resuming is exact, at any number of ranks.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from shardline.config.errors import UsageError

__all__ = ["sample_rows"]


def sample_rows(step: int, *, global_batch: int, num_rows: int, seed: int) -> np.ndarray:
    """Returns the rows of step `step` (from 0) as int64 [global_batch]; a step may cross the end of an epoch."""
    if num_rows < 1:
        raise UsageError(f"The dataset has {num_rows} rows; at least 1 is needed to draw a batch of {global_batch}.")
    rows = np.empty(global_batch, dtype=np.int64)
    filled = 0
    while filled < global_batch:
        epoch, offset = divmod(step * global_batch + filled, num_rows)
        count = min(global_batch - filled, num_rows - offset)
        rows[filled : filled + count] = _permutation(seed, epoch, num_rows)[offset : offset + count]
        filled += count
    return rows


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    # Sorting raw bits, not Generator.permutation: numpy keeps the bit streams across versions, not the methods.
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(num_rows)
    return np.argsort(bits, kind="stable")
