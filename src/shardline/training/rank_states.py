"""What each rank of a run does or did, from the heartbeats and logs that it left in RUN/logs.

    ranks = read_ranks(run / "logs")
    for rank in ranks: print(rank.rank, rank.state, rank.operation)

A run that is going on is watched for a little more than the time between two heartbeats: one look can't tell the slow
rank from one that happens to be behind, nor a silent machine from one whose clock is wrong.
"""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardline.parallel.heartbeat import EVERY_S, Beat, read_beat

__all__ = ["SILENT_S", "WATCH_S", "RankState", "read_ranks"]

SILENT_S = 3 * EVERY_S
WATCH_S = EVERY_S + 0.4
_LOOK_S = 0.25
_ERROR = re.compile(r"^\d{4}-\d\d-\d\d \S+ (ERROR|CRITICAL) (.*)")
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d \S+ [A-Z]+ ")
_START = re.compile(r" rank \d+ of (\d+) starts")


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank of the run's last start.

    run      names that start; empty where the rank wrote no heartbeat in it
    state    finished, failed, gone (its process), stopped (by a signal), silent, waiting (for others), working, missing
    since_s  how long it had been in its operation when it wrote its last heartbeat, which is `age_s` old
    behind   in how many of the looks the others waited and this rank was the last; `looks` of them
    error    the last words of its log, where that ends in an error
    """

    rank: int
    state: str
    run: str = ""
    host: str = ""
    pid: int = 0
    step: int = 0
    operation: str = ""
    count: int = 0
    since_s: float = 0.0
    age_s: float = 0.0
    where: str = ""
    behind: int = 0
    looks: int = 0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class _Log:
    num_ranks: int  # of its last start
    error: str


@dataclass(kw_only=True)
class _Watch:
    """The last heartbeats, and what several looks at them told."""

    beats: dict[int, Beat]
    moved: set[int]
    behind: dict[int, int]
    looks: int = 0


def read_ranks(logs: Path, *, watch_s: float = WATCH_S) -> tuple[RankState, ...]:
    """Returns the ranks of the last start, in order; () where no rank ever wrote anything."""
    beats = _newest_start(logs)
    written = {rank: _read_log(logs / f"rank-{rank}.log") for rank in _numbers(logs, "log")}
    # A start of fewer ranks leaves the logs of an earlier, larger one beside its own.
    sizes = [log.num_ranks for rank, log in written.items() if rank in beats or not beats]
    size = max([*sizes, *(rank + 1 for rank in beats)], default=0)
    watch = _look(logs, beats, watch_s=watch_s)
    now = time.time()
    return tuple(_state(rank, watch, written.get(rank), now=now) for rank in range(size))


def _newest_start(logs: Path) -> dict[int, Beat]:
    """Returns the heartbeats of the run's last start: files of an earlier one may lie beside them."""
    read = {rank: beat for rank in _numbers(logs, "heartbeat") if (beat := read_beat(logs, rank)) is not None}
    if not read:
        return {}
    newest = max(read.values(), key=lambda beat: beat.time).run
    return {rank: beat for rank, beat in sorted(read.items()) if beat.run == newest}


def _numbers(logs: Path, ending: str) -> list[int]:
    found = (re.fullmatch(rf"rank-(\d+)\.{ending}", path.name) for path in logs.glob(f"rank-*.{ending}"))
    return sorted(int(match[1]) for match in found if match)


def _look(logs: Path, beats: dict[int, Beat], *, watch_s: float) -> _Watch:
    """Watches a run of several ranks that goes on."""
    watch = _Watch(beats=beats, moved=set(), behind={})
    deadline = time.monotonic() + watch_s
    while len(beats) > 1 and time.monotonic() < deadline and _goes_on(watch):
        if watch.looks:
            time.sleep(_LOOK_S)
        for rank, beat in watch.beats.items():
            newer = read_beat(logs, rank, run_id=beat.run)
            if newer is not None and newer != beat:
                watch.moved.add(rank)
                watch.beats[rank] = newer
        watch.looks += 1
        last = [rank for rank, beat in watch.beats.items() if not _waits(beat)]
        if len(last) == 1:
            watch.behind[last[0]] = watch.behind.get(last[0], 0) + 1
    return watch


def _goes_on(watch: _Watch) -> bool:
    beats = watch.beats.values()
    return not any(_is_over(beat) for beat in beats) and any(_is_fresh(beat, time.time()) for beat in beats)


def _state(rank: int, watch: _Watch, log: _Log | None, *, now: float) -> RankState:
    beat, error = watch.beats.get(rank), log.error if log else ""
    if beat is None:
        return RankState(rank=rank, state="failed" if error else "missing", error=error)
    process = _process(beat) if not _is_over(beat) else ""
    if beat.operation == "finished":
        state = "finished"
    elif beat.operation.startswith(("stopped:", "failed")) or error:
        state = "failed"
        error = error or beat.operation.removeprefix("stopped: ")
    elif process:
        state = process
    elif rank not in watch.moved and not _is_fresh(beat, now):
        state = "silent"
    else:
        state = "waiting" if _waits(beat) else "working"
    return RankState(
        rank=rank,
        state=state,
        run=beat.run,
        host=beat.host,
        pid=beat.pid,
        step=beat.step,
        operation=beat.operation,
        count=beat.count,
        since_s=max(0.0, beat.time - beat.since),
        age_s=max(0.0, now - beat.time),
        where=beat.where,
        behind=watch.behind.get(rank, 0),
        looks=watch.looks,
        error=error,
    )


def _read_log(path: Path) -> _Log:
    """Reads a rank's log from its last start on."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return _Log(num_ranks=0, error="")
    starts = [number for number, line in enumerate(lines) if _START.search(line)]
    lines = lines[starts[-1] :] if starts else lines
    match = _START.search(lines[0]) if starts else None
    num_ranks = int(match[1]) if match else 0
    errors = [number for number, line in enumerate(lines) if _ERROR.match(line)]
    if not errors or any(_STAMP.match(line) for line in lines[errors[-1] + 1 :]):
        return _Log(num_ranks=num_ranks, error="")
    told = [line for line in lines[errors[-1] :] if line.strip()]
    words = told[-1].strip() if len(told) > 1 else (_ERROR.match(told[0]) or ["", "", ""])[2]
    return _Log(num_ranks=num_ranks, error=words[:300].rstrip("."))


def _process(beat: Beat) -> str:
    """Returns "gone" or "stopped" for a rank on this machine whose process is so; "" where it runs, or elsewhere."""
    if beat.host != socket.gethostname():
        return ""
    try:
        process = psutil.Process(beat.pid)
        status = process.status()
        if process.create_time() > beat.time + 1.0:
            return "gone"  # the number belongs to another process by now
    except psutil.NoSuchProcess:
        return "gone"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else ""


def _is_fresh(beat: Beat, now: float) -> bool:
    """Whether it was written just now, by a clock that is not far ahead of ours."""
    return -SILENT_S <= now - beat.time <= SILENT_S


def _is_over(beat: Beat) -> bool:
    return beat.operation == "finished" or beat.operation.startswith("stopped:")


def _waits(beat: Beat) -> bool:
    """A collective that the rank is in stands in brackets behind the phase."""
    return beat.operation.endswith(")")
