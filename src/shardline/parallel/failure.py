"""How a run of many processes fails: one message, from the rank that knows, naming the rank that is to blame.

    with watch_ranks(world, run / "logs", timeout_s=600):
        ...                                             # heartbeats are written; an error leaves as said below

When one rank fails, the others fail after it, in a collective that it does not join. So the first that fails writes
RUN/logs/failure-ID.json, and the rest end in silence with its exit code. Where the first to notice is a rank that
waited in vain, the heartbeats tell which rank it waited for and what that one was doing.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardline.config import InfeasibleError, ShardlineError, UsageError
from shardline.parallel.heartbeat import EVERY_S, Beat, Heartbeat, read_beat

if TYPE_CHECKING:
    from shardline.parallel.world import World

__all__ = ["Failure", "HangError", "diagnose", "find_failures", "read_failure", "settle", "watch_ranks"]

_SILENT_S = 3 * EVERY_S  # a rank whose heartbeat is older than this is stopped, gone, or cut off
_EVIDENCE_S = _SILENT_S + EVERY_S  # how long a rank looks for the reason after its connection broke


class HangError(ShardlineError):
    """A collective that a rank did not join."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What the first failing rank left. `traceback` is empty where `message` is a sentence for the user."""

    rank: int
    host: str
    message: str
    traceback: str
    exit_code: int

    def to_error(self) -> ShardlineError:
        """Returns the error that the rank raised, for a launcher to raise again."""
        kinds = {kind.exit_code: kind for kind in (ShardlineError, UsageError, InfeasibleError)}
        return kinds.get(self.exit_code, ShardlineError)(self.message)


@contextmanager
def watch_ranks(world: World, folder: Path, *, timeout_s: float) -> Iterator[None]:
    """Writes this rank's heartbeats into `folder` while inside, and lets one rank alone tell why the run failed."""
    run_id = world.first(lambda: secrets.token_hex(4))
    heartbeat = world.heartbeat
    watch = None
    if world.device.type == "cuda":  # there torch ends the process itself, and no exception comes
        watch = _Watch(heartbeat, num_ranks=world.size, timeout_s=timeout_s)
    heartbeat.start(folder, run_id=run_id, watch=watch)
    try:
        yield
    except Exception as error:
        verdict = settle(error, heartbeat=heartbeat, num_ranks=world.size)
        heartbeat.close(f"stopped: {_first_line(error)}")
        if verdict is error:
            raise
        raise verdict from error
    heartbeat.close("finished")


def settle(error: Exception, *, heartbeat: Heartbeat, num_ranks: int) -> BaseException:
    """Returns what this rank shall raise: `error` itself, a `HangError` that explains it, or a silent `SystemExit`.

    Exactly one of the ranks gets one of the first two.
    """
    folder = heartbeat.folder
    if folder is None or num_ranks == 1:
        return error
    verdict: Exception = error
    if _is_collective_failure(error):
        explained = _await_evidence(error, folder, heartbeat, num_ranks)
        if explained is None:
            return _silent(folder, heartbeat)
        verdict = HangError(explained)
    if not _claim(folder, verdict, heartbeat=heartbeat):
        return _silent(folder, heartbeat)
    return verdict


def _claim(folder: Path, error: Exception, *, heartbeat: Heartbeat) -> bool:
    """Returns whether this rank is the first to fail; if so, what it says is on disk now."""
    told = isinstance(error, ShardlineError)
    failure = Failure(
        rank=heartbeat.rank,
        host=socket.gethostname(),
        message=str(error) if told else f"{type(error).__name__}: {error}",
        traceback="" if told else "".join(traceback.format_exception(error)),
        exit_code=error.exit_code if isinstance(error, ShardlineError) else 1,
    )
    path = _failure_path(folder, heartbeat.run_id)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(asdict(failure), indent=2) + "\n")
    except FileExistsError:
        return False
    except OSError:  # a disk that takes no more must not silence the one who knows
        return True
    _tell_torchrun(path, failure)
    return True


def find_failures(folder: Path) -> set[Path]:
    """Returns the failure files of a run's logs, of this start and of earlier ones."""
    return set(folder.glob("failure-*.json"))


def read_failure(path: Path) -> Failure | None:
    try:
        return Failure(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not there, or not yet whole
        return None


def _is_collective_failure(error: BaseException) -> bool:
    """Whether `error` says that another process did not answer: gloo's, NCCL's or the store's."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(re.search(r"gloo|NCCL|TCPStore", str(error)))


def diagnose(beats: Sequence[Beat | None], *, own: Beat, now: float, waited_s: float | None) -> str | None:
    """Returns the sentence about the ranks that did not come, or None where the heartbeats accuse none.

    `beats` are those of all ranks, in order, `now` the clock of `own`; `waited_s` is None for a connection that broke.
    """
    verb = "lost a connection" if waited_s is None else f"waited {waited_s:.0f} s"
    head = f"Rank {own.rank} {verb} in {own.operation} of step {own.step}"
    accused = _accused(beats, own=own, now=now, waited=waited_s is not None)
    if not accused:
        return None
    names = f"rank{'s' if len(accused) > 1 else ''} {', '.join(str(rank) for rank in accused)}"
    reasons = " ".join(f"Rank {rank}: {reason}." for rank, reason in accused.items())
    return f"{head} for {names} to join. {reasons} The run goes on from its last checkpoint with --resume."


def _accused(beats: Sequence[Beat | None], *, own: Beat, now: float, waited: bool) -> dict[int, str]:
    """Returns {rank: what is known of it} of the ranks with the plainest reason not to have come.

    Only a rank that `waited` may accuse one of being late: files are written a little after what they tell, so that
    while all runs well most ranks look behind.
    """
    others = {rank: beat for rank, beat in enumerate(beats) if rank != own.rank}
    gone = {rank: reason for rank, beat in others.items() if beat and (reason := _process_trouble(beat, own.host))}
    if gone:
        return {rank: f"{reason}; {_last_seen(others[rank], now)}" for rank, reason in gone.items()}
    silent = {rank: beat for rank, beat in others.items() if beat and now - beat.time > _SILENT_S}
    if silent:
        return {
            rank: f"no heartbeat for {now - beat.time:.0f} s; {_last_seen(beat, now)}" for rank, beat in silent.items()
        }
    if not waited:
        return {}
    missing = [rank for rank, beat in others.items() if beat is None]
    if missing:
        return dict.fromkeys(missing, "no heartbeat since the run started")
    behind = {
        rank: beat
        for rank, beat in others.items()
        if beat and beat.count < own.count and beat.time > own.since + EVERY_S / 2
    }
    fewest = min((beat.count for beat in behind.values()), default=0)
    return {
        rank: f"alive, but behind; {_last_seen(beat, now)}" for rank, beat in behind.items() if beat.count == fewest
    }


def _last_seen(beat: Beat | None, now: float) -> str:
    assert beat is not None
    where = f" ({beat.where})" if beat.where else ""
    return (
        f"last seen on {beat.host}, process {beat.pid}, in {beat.operation} of step {beat.step} since "
        f"{max(0.0, now - beat.since):.0f} s{where}"
    )


def _process_trouble(beat: Beat, host: str) -> str:
    """Returns what the operating system knows of a rank on our own machine; empty where it runs, or runs elsewhere."""
    if beat.host != host:
        return ""
    import psutil  # not at the top: a run that goes well never needs it

    try:
        status = psutil.Process(beat.pid).status()
    except psutil.NoSuchProcess:
        return "its process is gone (killed, or out of memory)"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "its process is gone (killed, or out of memory)"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "its process is stopped (a signal or a debugger holds it)"
    return ""


def _await_evidence(error: Exception, folder: Path, heartbeat: Heartbeat, num_ranks: int) -> str | None:
    """Returns the explanation of a collective's failure, or None when another rank has told the reason already."""
    own = heartbeat.beat()
    waited_s = own.time - own.since if re.search("time", str(error), flags=re.IGNORECASE) else None
    deadline = time.monotonic() + _EVIDENCE_S
    while True:
        if _failure_path(folder, heartbeat.run_id).exists():
            return None
        beats = [read_beat(folder, rank, run_id=heartbeat.run_id) for rank in range(num_ranks)]
        found = diagnose(beats, own=own, now=time.time(), waited_s=waited_s)
        if found is not None:
            return found
        if time.monotonic() > deadline:
            return _no_culprit(error, beats, own)
        time.sleep(0.1)


def _no_culprit(error: Exception, beats: Sequence[Beat | None], own: Beat) -> str:
    now = time.time()
    places = " ".join(f"Rank {beat.rank}: {_last_seen(beat, now)}." for beat in beats if beat and beat.rank != own.rank)
    return (
        f"Rank {own.rank} failed in {own.operation} of step {own.step} ({_first_line(error)}), and every other rank "
        f"sends heartbeats: look at the network between the machines, and at what each was doing. {places}"
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200].encode("ascii", "ignore").decode().strip()


class _Watch:
    """Explains a wait shortly before NCCL's own watchdog aborts the process for it."""

    def __init__(self, heartbeat: Heartbeat, *, num_ranks: int, timeout_s: float) -> None:
        self._heartbeat, self._num_ranks = heartbeat, num_ranks
        self._limit_s = timeout_s - min(10.0, timeout_s / 4)
        self._explained = -1

    def __call__(self, own: Beat) -> None:
        folder, waited_s = self._heartbeat.folder, own.time - own.since
        if folder is None or waited_s < self._limit_s or self._explained == own.count:
            return
        self._explained = own.count
        beats = [read_beat(folder, rank, run_id=own.run) for rank in range(self._num_ranks)]
        found = diagnose(beats, own=own, now=own.time, waited_s=waited_s)
        if found is not None and _claim(folder, HangError(found), heartbeat=self._heartbeat):
            print(f"shardline train: {found}", file=sys.stderr, flush=True)


def _silent(folder: Path, heartbeat: Heartbeat) -> SystemExit:
    failure = read_failure(_failure_path(folder, heartbeat.run_id))
    return SystemExit(failure.exit_code if failure else 1)


def _failure_path(folder: Path, run_id: str) -> Path:
    return folder / f"failure-{run_id}.json"


def _tell_torchrun(path: Path, failure: Failure) -> None:
    """torchrun calls the rank with the oldest such file the root cause; the rank itself prints the words."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = f"rank {failure.rank} failed first; what it said is above, and in {path}"
        Path(file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}), encoding="utf-8")
