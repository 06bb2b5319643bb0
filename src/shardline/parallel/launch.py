"""Our own local launcher: starts N processes on this machine as torchrun would, and watches them.

It sets torchrun's variables, so that the program below does not know who started it. Rank 0 writes to our
terminal, the others to their log. The first rank that fails ends the rest, and its exit code becomes ours; what it
said, on whichever rank, is printed once and in full.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from shardline.config import UsageError
from shardline.parallel.failure import Failure, find_failures, read_failure
from shardline.parallel.heartbeat import read_beat

__all__ = ["follow_launcher", "launch"]

_LAUNCHER = "SHARDLINE_LAUNCHER_PID"
_GRACE_S = 10.0
_POLL_S = 0.05
_TELL_S = 3.0
# Ranks save and end with 128 + the signal's number (training.interruption); that is no failure to report.
_STOPPING = (signal.SIGTERM, signal.SIGUSR1)
_STOPPED = tuple(128 + number for number in _STOPPING)


def launch(command: Sequence[str], *, num_processes: int, log_dir: Path) -> int:
    """Runs `python -m shardline COMMAND...` in `num_processes` ranks and returns the exit code.

    Each rank gets its share of the cores as threads unless OMP_NUM_THREADS is set. Raises the `ShardlineError` that
    ended the run when another rank than 0, which has our terminal, was the one to tell it.
    """
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"Can't write to {log_dir}: {error.strerror}. Choose another --run.") from None
    earlier = find_failures(log_dir)
    environment = {
        "OMP_NUM_THREADS": str(max(1, _num_cores() // num_processes)),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        _LAUNCHER: str(os.getpid()),
    }
    ranks: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_stop, ranks)
        for number in _STOPPING:
            stack.enter_context(_forward(number, ranks))
        for rank in range(num_processes):
            output = None if rank == 0 else stack.enter_context(_log(log_dir, rank).open("ab"))
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "shardline", *command],
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            )
        failed = _wait(ranks)
        if failed is None:
            return 0
        code = ranks[failed].returncode
        if code in _STOPPED:
            return code
        if code < 0:
            _let_others_tell(ranks)
        told = not find_failures(log_dir) - earlier and failed > 0 and _told_by_first(ranks, _log(log_dir, failed))
    exit_code = code if code >= 0 else 128 - code
    failure = next((read_failure(path) for path in find_failures(log_dir) - earlier), None)
    if failure is not None:
        _pass_on(failure, exit_code)
    elif code < 0:
        print(_killed(failed, ranks[failed], log_dir), file=sys.stderr)
    elif failed > 0 and not told:
        log = _log(log_dir, failed)
        print(
            "\n".join([f"Rank {failed} failed first (exit code {code}); the end of {log}:", *_tail(log)]),
            file=sys.stderr,
        )
    return exit_code


def follow_launcher() -> None:
    """Ends this process when the launcher that started it is gone, even killed, so that no rank is orphaned."""
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None or os.getppid() != int(launcher):
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="follow-launcher", daemon=True).start()


def _log(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank-{rank}.log"


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int | None:
    """Returns the first rank that failed, else one that a signal stopped, or None when all succeeded.

    Of several that are found at once, the one that was killed is the cause: the others lost their connection to it.
    """
    while True:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code and code not in _STOPPED]
        if failed:
            return min(failed, key=lambda rank: (codes[rank] or 0) > 0)
        if None not in codes:
            return next((rank for rank, code in enumerate(codes) if code), None)
        time.sleep(_POLL_S)


def _let_others_tell(ranks: list[subprocess.Popen[bytes]]) -> None:
    """A killed rank can say nothing; the others lose their connection to it, and then they know where it was."""
    deadline = time.monotonic() + _TELL_S
    while time.monotonic() < deadline and any(process.poll() is None for process in ranks):
        time.sleep(0.05)


def _pass_on(failure: Failure, exit_code: int) -> None:
    """Prints what the first failing rank said, unless it was rank 0, which said it on our terminal."""
    if failure.rank == 0:
        return
    if not failure.traceback:
        error = failure.to_error()
        error.exit_code = exit_code
        raise error
    print(f"Rank {failure.rank} failed first (exit code {exit_code}):\n{failure.traceback}", file=sys.stderr, end="")


def _killed(rank: int, process: subprocess.Popen[bytes], log_dir: Path) -> str:
    beat = read_beat(log_dir, rank)
    seen = f"; it was in {beat.operation} of step {beat.step}" if beat and beat.pid == process.pid else ""
    return f"Rank {rank} was killed by {signal.Signals(-process.returncode).name}{seen}."


def _told_by_first(ranks: list[subprocess.Popen[bytes]], log: Path) -> bool:
    """Whether the failed rank stopped with a sentence for the user: rank 0 then stops with the same one."""
    lines = _tail(log)
    said = max((index for index, line in enumerate(lines) if line.startswith("shardline ")), default=len(lines))
    if said == len(lines) or any(line.startswith("Traceback ") for line in lines[said:]):
        return False
    with contextlib.suppress(subprocess.TimeoutExpired):
        ranks[0].wait(_GRACE_S)
    return bool(ranks[0].poll())


def _tail(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]


def _stop(ranks: list[subprocess.Popen[bytes]]) -> None:
    running = [process for process in ranks if process.poll() is None]
    for process in running:
        process.terminate()
        if hasattr(signal, "SIGCONT"):
            process.send_signal(signal.SIGCONT)  # a stopped process takes no other signal
    deadline = time.monotonic() + _GRACE_S
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _forward(number: signal.Signals, ranks: list[subprocess.Popen[bytes]]):
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(signum: int, frame: object) -> None:
        for process in ranks:
            process.send_signal(signum)

    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
