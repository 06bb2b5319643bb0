"""Which decode rows of a step are attended together, and which of their blocks they share.

    groups = arrange(chunks, block_size=16, share=True)     # the rows, in the order of the groups

Rows of similar lengths make a group, so that little is padded. Rows whose tables begin with the same blocks (requests
after the same system prompt) make one too where that saves reading: the shared blocks are read once for all of them
(cascade attention; Ye et al., 2024, "Cascade Inference").
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from shardline.serving.blocks import PADDING_BLOCK
from shardline.serving.scheduler import Chunk

__all__ = ["Arranged", "arrange"]

MAX_PADDING = 1.5  # rows padded to more than this many times their length start a group of their own
MIN_SAVED_BLOCKS = 32  # that sharing spares to read; its two more calls a layer cost about as much as 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Arranged:
    """One group: its rows, the blocks that all begin with, and the table of what follows in each, padded."""

    chunks: list[Chunk]
    shared: list[int]
    tables: np.ndarray  # [rows, blocks] int64


def arrange(chunks: list[Chunk], *, block_size: int, share: bool) -> list[Arranged]:
    """Returns the groups of chunks of a single token each."""
    alone, groups = chunks, []
    if share:
        alone, sharing = _find_sharing(chunks, block_size)
        groups = [_group(members, block_size, shared) for members, shared in sharing]
    ordered = sorted(alone, key=lambda chunk: -chunk.start)
    first = 0
    for row in range(1, len(ordered) + 1):
        if row < len(ordered) and (ordered[row].start + 1) * MAX_PADDING >= ordered[first].start + 1:
            continue
        groups.append(_group(ordered[first:row], block_size, []))
        first = row
    return groups


def _find_sharing(chunks: list[Chunk], block_size: int) -> tuple[list[Chunk], list[tuple[list[Chunk], list[int]]]]:
    """Returns (rows that share nothing worth it, [(rows, their common blocks)]).

    The block that a row writes to now is never shared.
    """
    by_first = defaultdict(list)
    for chunk in chunks:
        by_first[chunk.sequence.block_table[0] if chunk.start >= block_size else PADDING_BLOCK].append(chunk)
    alone, sharing = by_first.pop(PADDING_BLOCK, []), []
    for members in by_first.values():
        shared = _common(members, block_size) if len(members) > 1 else []
        if (len(members) - 1) * len(shared) >= MIN_SAVED_BLOCKS:
            sharing.append((members, shared))
        else:
            alone = alone + members
    return alone, sharing


def _common(chunks: list[Chunk], block_size: int) -> list[int]:
    longest = min(chunk.start for chunk in chunks) // block_size
    tables = np.array([chunk.sequence.block_table[:longest] for chunk in chunks])
    differs = (tables != tables[0]).any(0)
    return tables[0, : int(differs.argmax()) if differs.any() else longest].tolist()


def _group(chunks: list[Chunk], block_size: int, shared: list[int]) -> Arranged:
    begin = len(shared)
    ends = [chunk.start // block_size + 1 for chunk in chunks]
    tables = np.full((len(chunks), max(ends) - begin), PADDING_BLOCK, dtype=np.int64)
    for index, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
        tables[index, : end - begin] = chunk.sequence.block_table[begin:end]
    return Arranged(chunks=chunks, shared=shared, tables=tables)
