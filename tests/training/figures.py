"""What tests record for docs/parity.md, in its words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardline.config import ParallelConfig
from shardline.parallel.grid import Layout


def layout_name(parallel: ParallelConfig, processes: int) -> str:
    layout = Layout.resolve(parallel, world_size=processes)
    words = [f"data {layout.data}", f"ZeRO-{layout.zero}"]
    words += [f"over {layout.zero_group}"] if layout.zero_group is not None else []
    words += [f"tensor {layout.tensor}"] if layout.tensor > 1 else []
    words += ["sequence parallel"] if layout.sequence_parallel else []
    words += [f"pipeline {layout.pipeline} {layout.schedule}"] if layout.pipeline > 1 else []
    return ", ".join(words)


def apart(actual: Mapping[str, Sequence[float]], expected: Mapping[str, Sequence[float]], *keys: str) -> float:
    """The worst relative difference of two runs' figures under `keys`."""
    pairs = (pair for key in keys for pair in zip(actual[key], expected[key], strict=True))
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
