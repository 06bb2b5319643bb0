"""What a piece of work allocates, from torch's own profiler."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak(run: Callable[[], Any]) -> tuple[int, int, Any]:
    """Returns (most bytes at once, bytes left, result) of what `run` allocates on the CPU."""
    gc.collect()  # what earlier models left in cycles would count as freed here
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            result = run()
    finally:
        gc.enable()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, now, result
