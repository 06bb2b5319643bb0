"""Signals that ask a run to save and go: SIGTERM (Kubernetes, Slurm at a time limit) and SIGUSR1 (Slurm's --signal).

    with Interruption() as interruption:
        interruption.votes          # (0, 0), and (1, 0) once SIGTERM has come

A handler only remembers. The ranks agree as the next step begins (`Trainer.train_step`), wherever the signal arrived.
"""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Any

__all__ = ["SIGNALS", "Interruption"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Interruption:
    """Remembers signals between enter and exit; does nothing outside the main thread, where Python takes none."""

    def __init__(self) -> None:
        self._came: set[int] = set()
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def votes(self) -> tuple[int, ...]:
        """1 for each of `SIGNALS` that has come to this process, otherwise 0."""
        return tuple(int(number in self._came) for number in SIGNALS)

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: object) -> None:
        self._came.add(number)
