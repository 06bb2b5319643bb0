"""Which rank is the odd one: runs as their ranks leave them, with real processes where the system is asked of one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from shardline.cli.main import main
from shardline.config import UsageError
from shardline.parallel.failure import Failure
from shardline.parallel.heartbeat import Beat, Heartbeat, heartbeat_path
from shardline.training.diagnosis import examine_run
from shardline.training.run_directory import RunDirectory, open_log

ELSEWHERE = "another-machine"


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    return folder


def beat(folder: Path, rank: int, **changes) -> None:
    now = time.time()
    values = {
        "run": "now",
        "rank": rank,
        "time": now,
        "since": now - 1.0,
        "step": 7,
        "operation": "forward-backward",
        "count": 50,
        "where": "loss.py:59 in forward",
        "pid": 4711,
        "host": ELSEWHERE,
    }
    path = heartbeat_path(folder / "logs", rank)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(asdict(Beat(**{**values, **changes}))))
    os.replace(scratch, path)  # a reader sees a whole file, as it does of the real thing


def log(run: Path, rank: int, *, of: int):
    logger = open_log(RunDirectory(run), rank=rank)
    logger.info("rank %d of %d starts, process %d", rank, of, 4711)
    return logger


def fail(run: Path, rank: int, message: str) -> None:
    failure = Failure(rank=rank, host=ELSEWHERE, message=message, traceback="", exit_code=1)
    (run / "logs" / "failure-now.json").write_text(json.dumps(asdict(failure)))


def odd(run: Path, *, watch_s: float = 0.0):
    found = examine_run(run, watch_s=watch_s)
    return found, [(check.rule, check.facts) for check in found.checks if check.name == "odd rank" and check.rule]


def test_a_finished_run_has_no_odd_rank(run):
    for rank in range(3):
        beat(run, rank, operation="finished", time=time.time() - 1000)
        log(run, rank, of=3).info("done")
    found, accused = odd(run)
    assert accused == []
    assert [rank.state for rank in found.ranks] == ["finished"] * 3
    assert found.checks[0].facts == f"finished, 3 ranks on {ELSEWHERE}, at step 7"
    assert {check.verdict for check in found.checks} == {"ok"}


def test_the_silent_rank_is_named(run):
    beat(run, 0, operation="gradients (all-reduce)")
    beat(run, 1, time=time.time() - 60, since=time.time() - 90)
    beat(run, 2, operation="gradients (all-reduce)")
    found, accused = odd(run)
    assert accused == [("rank-silent", "rank 1")]
    check = found.checks[1]
    assert "silent for 60 s" in check.reason
    assert "since 30 s at loss.py:59" in check.reason
    assert ELSEWHERE in check.fix
    assert found.odd_ranks == (1,)


def test_of_a_run_that_is_over_the_first_to_fall_silent_is_named(run):
    for rank, (ago, count) in enumerate([(500, 90), (510, 80), (501, 91)]):
        beat(run, rank, time=time.time() - ago, count=count)
    found, accused = odd(run)
    assert accused == [("rank-silent", "rank 1")]
    assert found.checks[0].facts.startswith("stands still, 3 ranks")


def test_the_late_rank_is_named_while_the_others_wait(run):
    for rank in (0, 2, 3):
        beat(run, rank, operation="gradients (all-reduce)", since=time.time() - 40)
    beat(run, 1, operation="save", since=time.time() - 41, count=48)
    _, accused = odd(run)
    assert accused == [("rank-late", "rank 1")]


def test_the_slow_rank_is_named_after_several_looks(run):
    """Two ranks really write heartbeats; one computes while the other waits for it, over and over."""
    fast, slow = Heartbeat(rank=0), Heartbeat(rank=1)
    for heartbeat in (fast, slow):
        heartbeat.start(run / "logs", run_id="now")
    stop = threading.Event()

    def train() -> None:
        while not stop.wait(0.02):
            for heartbeat in (fast, slow):
                heartbeat.begin_step(3)
                heartbeat.mark("forward-backward")
            fast.enter("all-reduce")
            stop.wait(1.0)
            slow.enter("all-reduce")

    thread = threading.Thread(target=train)
    thread.start()
    try:
        time.sleep(0.6)
        found, accused = odd(run, watch_s=2.4)
    finally:
        stop.set()
        thread.join()
        fast.close("finished")
        slow.close("finished")
    assert accused == [("rank-slow", "rank 1")]
    assert found.checks[1].verdict == "warn"


def test_ranks_that_take_turns_are_not_accused(run):
    beat(run, 0, operation="gradients (all-reduce)")
    beat(run, 1)
    assert odd(run)[1] == []


def test_gone_and_stopped_processes_are_told_apart(run):
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleeper) as stopped, subprocess.Popen(sleeper) as gone:
        try:
            for rank, process in enumerate((stopped, gone)):
                beat(run, rank, pid=process.pid, host=socket.gethostname())
            beat(run, 2, pid=os.getpid(), host=socket.gethostname(), operation="gradients (all-reduce)")
            stopped.send_signal(signal.SIGSTOP)
            gone.kill()
            gone.wait()
            deadline = time.monotonic() + 5
            while (found := odd(run)[1]) != [("rank-stopped", "rank 0"), ("rank-gone", "rank 1")]:
                assert time.monotonic() < deadline, found
                time.sleep(0.02)
        finally:
            stopped.kill()


def test_the_rank_whose_log_ends_in_an_error_is_named(run):
    for rank in range(2):
        beat(run, rank, time=time.time() - 100)
    logger = log(run, 1, of=2)
    try:
        raise RuntimeError("the disk is full")
    except RuntimeError:
        logger.exception("rank %d stops", 1)
    log(run, 0, of=2).info("step 7")
    found, accused = odd(run)
    assert accused == [("ended-with-error", "rank 1")]
    assert "RuntimeError: the disk is full" in found.checks[1].reason
    assert found.checks[1].fix.startswith("Read RUN/logs/rank-1.log")


def test_an_error_of_an_earlier_start_is_forgotten(run):
    beat(run, 0)
    log(run, 0, of=1).error("rank 0 stops")
    log(run, 0, of=1)
    assert odd(run)[1] == []


def test_the_first_failure_counts_and_a_rank_waited_for_in_vain_is_the_odd_one(run):
    for rank in range(3):
        beat(run, rank, operation="stopped: something", time=time.time() - 100)
    fail(run, 2, "OutOfMemoryError: tried to allocate 20 GiB")
    found, accused = odd(run)
    assert accused == [("failed-first", "rank 2")]
    fail(
        run,
        0,
        "Rank 0 waited 600 s for ranks 1, 2 in gradients (all-reduce) of step 7. Rank 1 (process 4711 on node1) is "
        "gone, killed or out of memory; it was in save of step 6, since 3 s, at loss.py:59 in forward. Rank 2 (process "
        "4712 on node2) is stopped by a signal or a debugger; it was in data, since 3 s. --resume continues from the "
        "last checkpoint.",
    )
    found, accused = odd(run)
    assert accused == [("others-waited-in-vain", "rank 1"), ("others-waited-in-vain", "rank 2")]
    assert found.checks[1].reason.startswith(
        "is gone, killed or out of memory; it was in save of step 6, since 3 s, at loss"
    )
    assert "stopped by a signal" in found.checks[2].reason
    assert found.odd_ranks == (1, 2)


def test_files_of_an_earlier_start_do_not_count(run):
    beat(run, 0)
    beat(run, 1, run="before", time=time.time() - 5000)
    assert [rank.rank for rank in odd(run)[0].ranks] == [0]


def test_a_smaller_start_after_a_larger_one_misses_nobody(run):
    for rank in range(4):
        log(run, rank, of=4)
    for rank in range(2):
        log(run, rank, of=2)
        beat(run, rank)
    found, accused = odd(run)
    assert len(found.ranks) == 2
    assert accused == []


def test_a_clock_that_is_wrong_accuses_nobody_that_moves(run):
    """One rank's machine is an hour ahead, another's an hour behind; both go on writing. A third has stopped to."""
    stop = threading.Event()

    def write() -> None:
        count = 0
        while not stop.wait(0.1):
            count += 1
            beat(run, 0, time=time.time() + 3600, count=count)
            beat(run, 1, time=time.time() - 3600, count=count)
            beat(run, 2, count=count)

    beat(run, 3, time=time.time() + 3600)
    thread = threading.Thread(target=write)
    thread.start()
    try:
        time.sleep(0.3)
        _, accused = odd(run, watch_s=0.8)
    finally:
        stop.set()
        thread.join()
    assert accused == [("rank-silent", "rank 3")]


def test_a_rank_that_stopped_with_an_error_alone_is_named(run):
    beat(run, 0, operation="stopped: the loss is nan", time=time.time() - 100)
    found, accused = odd(run)
    assert accused == [("ended-with-error", "rank 0")]
    assert "the loss is nan" in found.checks[1].reason


def test_a_rank_that_never_came_is_named(run):
    for rank in (0, 1, 3):
        beat(run, rank, operation="start (barrier)")
        log(run, rank, of=4)
    assert odd(run)[1] == [("rank-missing", "rank 2")]


@pytest.mark.parametrize(
    ("times", "waits", "rule"),
    [
        ([9.0] + [1.0] * 20, 0.01, ""),
        ([1.0] * 15 + [2.0] * 5, 0.01, "slowed-down"),
        ([1.0] * 20, 0.4, "data-bound"),
    ],
)
def test_the_pace(run, times, waits, rule):
    beat(run, 0, operation="finished")
    rows = [json.dumps({"step": n, "step_s": s, "data_wait_s": waits * s}) for n, s in enumerate(times)]
    (run / "metrics.jsonl").write_text("\n".join(rows) + '\n{"step": 99, "ste')
    (check,) = (check for check in examine_run(run).checks if check.name == "pace")
    assert check.rule == rule
    assert check.facts.startswith("1 s a step")


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="holds no heartbeats and no logs"):
        examine_run(tmp_path)


def test_the_verb_names_the_rank_and_gives_no_host_away(run, capsys):
    beat(run, 0, time=time.time() - 90)
    beat(run, 1, time=time.time() - 60, operation="gradients (all-reduce)")
    assert main(["doctor", "--run", str(run)]) == 1
    assert "fail  odd rank  rank 0: has been silent for" in capsys.readouterr().out
    assert main(["doctor", "--run", str(run), "--json", "--redact"]) == 1
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["odd_ranks"] == [0]
    assert ELSEWHERE not in captured.out + captured.err
    assert "<host-" in result["checks"][1]["fix"]
