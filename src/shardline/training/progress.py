"""What a person sees while a run goes on: one line a step at most, one a second at most."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Progress", "format_duration"]

_MIN_INTERVAL_S = 1.0


class Progress:
    def __init__(self, console: Console, *, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._last_print = 0.0
        self._mean_step_s: float | None = None

    def step(self, row: dict[str, Any]) -> None:
        """Shows a row of metrics.jsonl."""
        # A running mean, so that one slow step does not make the estimate jump.
        mean = self._mean_step_s
        self._mean_step_s = row["step_s"] if mean is None else 0.8 * mean + 0.2 * row["step_s"]
        now, last = time.monotonic(), row["step"] == self._steps
        if not last and now - self._last_print < _MIN_INTERVAL_S:
            return
        self._last_print = now
        left_s = (self._steps - row["step"]) * self._mean_step_s
        norm = "overflow, step left out" if row["grad_norm"] is None else f"{row['grad_norm']:.2f}"
        mfu = "" if row["mfu"] is None else f"  mfu {row['mfu']:.0%}"
        self._console.print(
            f"step {row['step']:>{len(str(self._steps))}}/{self._steps}  loss {row['loss']:.4f}  "
            f"grad {norm}  lr {row['learning_rate']:.2e}  {row['tokens_per_s']:,.0f} tokens/s{mfu}  "
            f"memory {row['memory_gib']:.2f} GiB  ETA {format_duration(left_s)}"
        )

    def say(self, text: str) -> None:
        self._console.print(text)


def format_duration(seconds: float) -> str:
    """Returns `42s`, `3m12s` or `2h05m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
