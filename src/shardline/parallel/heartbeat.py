"""What each rank is doing, in a small file that outlives it: RUN/logs/rank-K.heartbeat.

    heartbeat = Heartbeat(rank=world.rank)
    heartbeat.start(run / "logs", run_id=...)     # a thread writes the file from here on
    heartbeat.begin_step(12)
    heartbeat.mark("forward-backward")            # two assignments: what a step pays
    heartbeat.close("finished")

The thread looks four times a second, writes when something changed, and every two seconds anyway. A file whose `time`
stands still therefore belongs to a process that is gone or stopped, and one whose `count` is behind the others' to the
rank that they wait for. Each file is replaced whole, so a reader never sees half of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

__all__ = ["EVERY_S", "Beat", "Heartbeat", "heartbeat_path", "read_beat"]

EVERY_S = 2.0  # seconds between two writes of a rank in which nothing changes
_LOOK_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One heartbeat.

    run         names this start of the run; a file of an earlier start has another
    time        when it was written, in seconds since 1970
    since       when the operation began
    step        the step that it belongs to; 0 before the first
    operation   the phase, and the collective in it when the rank waits in one of ours
    count       phases and collectives begun so far; all ranks go through the same ones
    where       the line of code that the main thread is in
    """

    run: str
    rank: int
    time: float
    since: float
    step: int
    operation: str
    count: int
    where: str
    pid: int
    host: str


class Heartbeat:
    """This rank's position. Without `start` nothing is written, and a mark costs the same."""

    def __init__(self, *, rank: int) -> None:
        self.rank = rank
        self.folder: Path | None = None
        self.run_id = ""
        self.broken = False  # a collective has failed: groups are of no more use, not even to be closed
        self.ending = False  # this rank knows that the run has failed, and is on its way out
        self._phase = "start"
        self._collective: str | None = None
        self._step = 0
        self._count = 0
        self._since = time.time()
        self._host = socket.gethostname()
        self._main = threading.get_ident()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def begin_step(self, step: int) -> None:
        """What follows belongs to `step`, counted from 1."""
        self._step = step

    def mark(self, phase: str) -> None:
        """The rank begins `phase`: data, forward-backward, gradients, optimizer, evaluate, save, ..."""
        self._phase, self._collective = phase, None
        self._count += 1
        self._since = time.time()

    def enter(self, collective: str) -> None:
        """The rank begins to wait for the others in `collective`."""
        self._collective = collective
        self._count += 1
        self._since = time.time()

    def leave(self) -> None:
        """The collective is done. One that fails stays named: the message about it is still to be written."""
        self._collective = None
        self._since = time.time()

    def beat(self) -> Beat:
        """Returns what would be written now."""
        return Beat(
            run=self.run_id,
            rank=self.rank,
            time=time.time(),
            since=self._since,
            step=self._step,
            operation=self._phase if self._collective is None else f"{self._phase} ({self._collective})",
            count=self._count,
            where=_where(self._main),
            pid=os.getpid(),
            host=self._host,
        )

    def start(self, folder: Path, *, run_id: str, watch: Callable[[Beat], None] | None = None) -> None:
        """Writes the first heartbeat and starts the thread; `watch` is called with each one that it writes."""
        assert self._thread is None, "a heartbeat is started once"
        self.folder, self.run_id, self._main = folder, run_id, threading.get_ident()
        self._write(self.beat())
        self._thread = threading.Thread(target=self._run, args=(watch,), name="heartbeat", daemon=True)
        self._thread.start()

    def close(self, last_words: str) -> None:
        """Stops the thread and leaves `last_words` as the operation; safe to call twice or without `start`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        thread.join()
        self._phase, self._collective = last_words, None
        self._write(self.beat())

    def _run(self, watch: Callable[[Beat], None] | None) -> None:
        written, at = self._count, time.monotonic()
        while not self._stop.wait(_LOOK_S):
            if self._count == written and time.monotonic() - at < EVERY_S:
                continue
            beat = self.beat()
            self._write(beat)
            written, at = beat.count, time.monotonic()
            if watch is not None:
                watch(beat)

    def _write(self, beat: Beat) -> None:
        """A full or vanished disk must not end a training that needs the file only when something else is wrong."""
        assert self.folder is not None
        path = heartbeat_path(self.folder, self.rank)
        scratch = path.with_name(f".{path.name}.tmp")
        with contextlib.suppress(OSError), self._lock:
            scratch.write_text(json.dumps(asdict(beat)) + "\n", encoding="utf-8")
            os.replace(scratch, path)


def heartbeat_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.heartbeat"


def read_beat(folder: Path, rank: int, *, run_id: str | None = None) -> Beat | None:
    """Returns a rank's last heartbeat, or None where it wrote none in the start of the run called `run_id`."""
    try:
        beat = Beat(**json.loads(heartbeat_path(folder, rank).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not there, or of another version
        return None
    return beat if run_id in (None, beat.run) else None


def _where(thread: int) -> str:
    """Returns the innermost line of ours that `thread` is in, and what it called."""
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None and not _is_ours(frame):
        frame = frame.f_back
    if innermost is None or frame is None:
        return ""
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
    return place if frame is innermost else f"{place}, calling {innermost.f_code.co_name}"


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name.startswith("shardline.") and name != __name__
