"""What a step of the engine spends on itself: neither the model's operators nor communication.

    own = own_time(trainer)

One step runs under PyTorch's profiler. Forward, backward and optimizer are the model's; inside them only the time
counts as the engine's in which no operator and no collective runs (Python between operators: an upper bound, since a
plain loop's model has such gaps too). Outside them all counts but collectives and waits for them: data, the gradient's
norm and clipping, bookkeeping.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

Interval = tuple[float, float]


def own_time(trainer: Any) -> dict[str, float]:
    """Returns seconds of one step: `step_s`, and the engine's own `outside_s` and `inside_s`."""
    restore = [
        _wrap(trainer, "_run_micro_batches", "MODEL"),
        _wrap(trainer._optimizer, "step", "MODEL"),
        _wrap(dist.Work, "wait", "COMMUNICATION"),
        _wrap(dist, "all_reduce", "COMMUNICATION"),
    ]
    try:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            started = time.perf_counter()
            with record_function("STEP"):
                trainer.train_step()
            wall_s = time.perf_counter() - started
    finally:
        for undo in restore:
            undo()
    events = [(each.name, each.time_range.start / 1e6, each.time_range.end / 1e6) for each in seen.events()]
    step = next((start, end) for name, start, end in events if name == "STEP")
    model = _union(((a, b) for name, a, b in events if name == "MODEL"), within=step)
    talk = _union(
        ((a, b) for name, a, b in events if name == "COMMUNICATION" or name.startswith(("c10d", "gloo", "nccl"))),
        within=step,
    )
    busy = _union(((a, b) for name, a, b in events if name not in ("STEP", "MODEL")), within=step)
    whole = step[1] - step[0]
    outside = whole - _length(_union([*model, *talk], within=step))
    inside = _length(model) - sum(_length(_union(busy, within=interval)) for interval in model)
    return {"step_s": wall_s, "outside_s": outside, "inside_s": inside, "share": (outside + inside) / whole}


def _wrap(owner: Any, name: str, label: str) -> Callable[[], None]:
    """Puts `label` around every call of a method; returns what takes it away again."""
    plain = getattr(owner, name)
    own = vars(owner).get(name) if hasattr(owner, "__dict__") else None

    def labelled(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return plain(*args, **kwargs)

    setattr(owner, name, labelled)
    return lambda: setattr(owner, name, own) if own is not None else delattr(owner, name)


def _union(intervals: Iterable[Interval], *, within: Interval) -> list[Interval]:
    """Disjoint intervals that cover the same time, cut to `within`."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        start, end = max(start, within[0]), min(end, within[1])
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
