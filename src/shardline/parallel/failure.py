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
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
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
_NOTICE_S = 5.0  # how long a rank may work on after another has told why the run fails
_FAILED = "failed"
_EVIDENCE_S = _SILENT_S + EVERY_S  # how long a rank looks for the reason after its connection broke
_MARGIN_S = 4.0  # what a collective with a limit of its own gets to fail by itself


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
    # On CUDA torch ends the process itself, and no exception comes.
    limit_s = timeout_s - min(10.0, timeout_s / 4) if world.device.type == "cuda" else None
    watch = _Watch(heartbeat, num_ranks=world.size, timeout_s=timeout_s, explain_after_s=limit_s)
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
    heartbeat.ending = True
    if threading.current_thread() is threading.main_thread():
        # A launcher sends SIGTERM as soon as it sees the first rank die, and this process is about to end by itself.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    verdict: Exception = error
    if _is_collective_failure(error):
        heartbeat.broken = True
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


def diagnose(
    beats: Sequence[Beat | None],
    *,
    own: Beat,
    now: float,
    waited_s: float | None,
    alive: Collection[int] = (),
    patient: bool = False,
    blames_late: bool = True,
) -> str | None:
    """Returns the sentences about the ranks that did not come, or None where the heartbeats accuse none.

    beats     those of all ranks, in order
    now       the clock of `own`, the heartbeat of the rank whose collective failed, from when it did
    waited_s  how long it waited; None for a connection that broke
    alive     ranks whose heartbeat was seen to change, whatever their machine's clock says
    patient   the other ranks have had the time to fail as well: one that still works is the one they waited for
    blames_late  whether a rank that is alive may be the one
    """
    late = blames_late and waited_s is not None
    accused = _accused(beats, own=own, now=now, waited=late, alive=alive, patient=patient)
    if not accused:
        return None
    names = f"rank{'s' if len(accused) > 1 else ''} {', '.join(map(str, accused))}"
    verb = f"waited {waited_s:.0f} s for" if waited_s is not None else "lost its connection to"
    reasons = " ".join(f"Rank {rank} {reason}." for rank, reason in accused.items())
    head = f"Rank {own.rank} {verb} {names} in {_operation(own)}."
    return f"{head} {reasons} --resume continues from the last checkpoint."


def _accused(
    beats: Sequence[Beat | None], *, own: Beat, now: float, waited: bool, alive: Collection[int], patient: bool
) -> dict[int, str]:
    """Returns {rank: what is known of it} of the ranks with the plainest reason not to have come.

    Only a rank that `waited` may accuse one of being late: files are written a little after what they tell, so that
    while all runs well most ranks look behind.
    """
    others = {rank: beat for rank, beat in enumerate(beats) if rank != own.rank}
    known = [beat for beat in others.values() if beat is not None]
    if gone := {beat.rank: reason for beat in known if (reason := _process_trouble(beat, own.host, now))}:
        return gone
    if silent := [beat for beat in known if beat.rank not in alive and now - beat.time > _SILENT_S]:
        return {
            beat.rank: f"({_identity(beat)}) is silent for {now - beat.time:.0f} s; {_was(beat, now)}"
            for beat in silent
        }
    if not waited:
        return {}
    if missing := [rank for rank, beat in others.items() if beat is None]:
        return dict.fromkeys(missing, "has sent no heartbeat since the run started")
    late = [beat for beat in known if beat.count < own.count and beat.time > own.since + EVERY_S / 2]
    fewest = min((beat.count for beat in late), default=0)
    late = [beat for beat in late if beat.count == fewest]
    if patient and not late:
        late = [beat for beat in known if not beat.operation.startswith(_FAILED)]
    return {beat.rank: f"({_identity(beat)}) is alive, but late; {_was(beat, now)}" for beat in late}


def _operation(beat: Beat) -> str:
    return f"{beat.operation} of step {beat.step}" if beat.step else beat.operation


def _identity(beat: Beat) -> str:
    return f"process {beat.pid} on {beat.host}"


def _was(beat: Beat, now: float) -> str:
    where = f", at {beat.where}" if beat.where else ""
    return f"it was in {_operation(beat)}, since {max(0.0, now - beat.since):.0f} s{where}"


def _process_trouble(beat: Beat, host: str, now: float) -> str:
    """Returns what the operating system knows of a rank on our own machine; empty where it runs, or runs elsewhere."""
    if beat.host != host:
        return ""
    import psutil  # not at the top: a run that goes well never needs it

    try:
        status = psutil.Process(beat.pid).status()
    except psutil.NoSuchProcess:
        status = psutil.STATUS_DEAD
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return f"({_identity(beat)}) is gone, killed or out of memory; {_was(beat, now)}"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return f"({_identity(beat)}) is stopped by a signal or a debugger; {_was(beat, now)}"
    return ""


def _await_evidence(error: Exception, folder: Path, heartbeat: Heartbeat, num_ranks: int) -> str | None:
    """Returns the explanation of a collective's failure, or None when another rank has told the reason already."""
    own = heartbeat.beat()
    waited_s = own.time - own.since if re.search("time", str(error), flags=re.IGNORECASE) else None
    heartbeat.mark(f"{_FAILED} in {own.operation}")
    started = time.monotonic()
    first = {rank: read_beat(folder, rank, run_id=heartbeat.run_id) for rank in range(num_ranks)}
    while True:
        if _failure_path(folder, heartbeat.run_id).exists():
            return None
        elapsed_s = time.monotonic() - started
        patient = elapsed_s > _EVIDENCE_S
        beats = [read_beat(folder, rank, run_id=heartbeat.run_id) for rank in range(num_ranks)]
        alive = range(num_ranks)  # until a beat and a half has passed, and with it the chance to be seen
        if elapsed_s > 1.5 * EVERY_S:
            alive = [rank for rank, beat in enumerate(beats) if beat != first[rank]]
        found = diagnose(beats, own=own, now=time.time(), waited_s=waited_s, alive=alive, patient=patient)
        if found is not None:
            return found
        if patient:
            return _no_culprit(error, beats, own)
        time.sleep(0.1)


def _no_culprit(error: Exception, beats: Sequence[Beat | None], own: Beat) -> str:
    now = time.time()
    others = " ".join(f"Rank {beat.rank}: {_was(beat, now)}." for beat in beats if beat and beat.rank != own.rank)
    return (
        f"Rank {own.rank} failed in {_operation(own)} ({_first_line(error)}), though every other rank sends "
        f"heartbeats; look at the network between the machines. {others}"
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200].encode("ascii", "ignore").decode().strip()


class _Watch:
    """What the heartbeat's thread looks after, beside a main thread that may be stuck.

    Ends the process where another rank has told why the run fails and ours does not notice: no launcher then needs to
    wait for it. Ends it too where it waits for a rank whose heartbeat stands still for the time limit: a save has no
    limit of its own, since files take as long as they take, and would wait for a lost machine for hours. With
    `explain_after_s` also explains a wait, shortly before NCCL's own watchdog aborts the process.
    """

    def __init__(
        self, heartbeat: Heartbeat, *, num_ranks: int, timeout_s: float, explain_after_s: float | None
    ) -> None:
        self._heartbeat, self._num_ranks, self._explain_after_s = heartbeat, num_ranks, explain_after_s
        self._timeout_s = max(timeout_s, _SILENT_S)
        self._failed_at: float | None = None
        self._moved: dict[int, tuple[float, float]] = {}  # rank -> (time of its last beat, our clock when it was new)
        self._looked_at = 0.0

    def __call__(self, own: Beat) -> None:
        assert self._heartbeat.folder is not None
        path = _failure_path(self._heartbeat.folder, own.run)
        waited_s = own.time - own.since
        if path.exists():
            self._failed_at = self._failed_at or time.monotonic()
            if time.monotonic() - self._failed_at > _NOTICE_S and not self._heartbeat.ending:
                failure = read_failure(path)
                os._exit(failure.exit_code if failure else 1)
        elif self._explain_after_s is not None and waited_s > self._explain_after_s:
            self._explain(self._heartbeat.folder, own, blames_late=True)
        elif waited_s > _SILENT_S and not self._heartbeat.ending:
            self._look_for_the_lost(self._heartbeat.folder, own, waited_s=waited_s)
        else:
            self._moved.clear()

    def _look_for_the_lost(self, folder: Path, own: Beat, *, waited_s: float) -> None:
        """Notes which heartbeats move, by our own clock; of many ranks each looks seldom."""
        now = time.monotonic()
        if now - self._looked_at < self._timeout_s / 4:
            return
        self._looked_at = now
        for rank in range(self._num_ranks):
            beat = read_beat(folder, rank, run_id=own.run)
            if beat is not None and (rank not in self._moved or self._moved[rank][0] != beat.time):
                self._moved[rank] = beat.time, now
        still = {rank for rank, (_, moved_at) in self._moved.items() if now - moved_at > self._timeout_s}
        if waited_s > self._timeout_s + _MARGIN_S and still - {own.rank}:
            alive = [rank for rank in range(self._num_ranks) if rank not in still]
            self._explain(folder, own, blames_late=False, alive=alive)

    def _explain(self, folder: Path, own: Beat, *, blames_late: bool, alive: Collection[int] = ()) -> None:
        beats = [read_beat(folder, rank, run_id=own.run) for rank in range(self._num_ranks)]
        waited_s = own.time - own.since
        found = diagnose(beats, own=own, now=own.time, waited_s=waited_s, alive=alive, blames_late=blames_late)
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
        record = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": record}), encoding="utf-8")
