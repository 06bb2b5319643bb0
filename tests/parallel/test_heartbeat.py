"""Heartbeats: what they say, that readers see whole files, what they cost; and whom a diagnosis names."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time

import pytest

from shardline.parallel.failure import _Watch, diagnose, find_failures, read_failure, settle
from shardline.parallel.heartbeat import EVERY_S, Beat, Heartbeat, heartbeat_path, read_beat


@pytest.fixture
def heartbeat(tmp_path):
    heartbeat = Heartbeat(rank=3)
    heartbeat.start(tmp_path, run_id="now")
    yield heartbeat
    heartbeat.close("done")


def wait_for(what, seconds: float = 3 * EVERY_S):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_the_file_follows_the_operation(heartbeat, tmp_path):
    first = read_beat(tmp_path, 3)
    assert first is not None
    assert (first.rank, first.pid, first.run, first.step) == (3, os.getpid(), "now", 0)
    heartbeat.begin_step(12)
    heartbeat.mark("forward-backward")
    beat = wait_for(lambda: (beat := read_beat(tmp_path, 3)) and beat.step == 12 and beat)
    assert beat.operation == "forward-backward"
    assert beat.count == first.count + 1
    heartbeat.enter("all-reduce")
    wait_for(lambda: read_beat(tmp_path, 3).operation == "forward-backward (all-reduce)")
    heartbeat.leave()
    heartbeat.close("finished")
    assert read_beat(tmp_path, 3).operation == "finished"
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_rank_in_which_nothing_changes_still_beats(heartbeat, tmp_path):
    first = read_beat(tmp_path, 3)
    later = wait_for(lambda: (beat := read_beat(tmp_path, 3)).time > first.time and beat)
    assert dataclasses.replace(later, time=0, where="") == dataclasses.replace(first, time=0, where="")


def test_readers_never_see_half_a_file(heartbeat, tmp_path):
    stop, broken = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            try:
                json.loads(heartbeat_path(tmp_path, 3).read_text())
            except ValueError as error:
                broken.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(300):
        heartbeat._write(heartbeat.beat())
    stop.set()
    reader.join()
    assert not broken


def test_another_start_s_file_is_not_taken_for_this_one_s(heartbeat, tmp_path):
    assert read_beat(tmp_path, 3, run_id="now") is not None
    assert read_beat(tmp_path, 3, run_id="before") is None
    assert read_beat(tmp_path, 0) is None
    heartbeat_path(tmp_path, 1).write_text('{"rank"')
    assert read_beat(tmp_path, 1) is None


def test_a_disk_that_takes_no_more_does_not_end_the_training(tmp_path):
    heartbeat = Heartbeat(rank=0)
    heartbeat.start(tmp_path / "nowhere", run_id="x")
    heartbeat.mark("step")
    heartbeat.close("done")


def beat(rank: int, **changes) -> Beat:
    fields = {
        "run": "now", "rank": rank, "time": 100.0, "since": 90.0, "step": 7, "operation": "optimizer", "count": 50,
        "where": "trainer.py:9 in train_step", "pid": 10 + rank, "host": f"node{rank}",
    }  # fmt: skip
    return Beat(**{**fields, **changes})


OWN = beat(0, operation="gradients (all-reduce)", host="node0")


def test_a_silent_rank_on_another_machine_is_named_with_its_last_place():
    beats = [OWN, beat(1), beat(2, time=60.0, since=55.0)]
    message = diagnose(beats, own=OWN, now=100.0, waited_s=30.0)
    assert message == (
        "Rank 0 waited 30 s for rank 2 in gradients (all-reduce) of step 7. Rank 2 (process 12 on node2) is silent for "
        "40 s; it was in optimizer of step 7, since 45 s, at trainer.py:9 in train_step. --resume continues from the "
        "last checkpoint."
    )
    assert "lost its connection to rank 2 in" in diagnose(beats, own=OWN, now=100.0, waited_s=None)


def test_a_clock_that_is_off_accuses_nobody():
    beats = [OWN, beat(1), beat(2, time=60.0)]
    assert diagnose(beats, own=OWN, now=100.0, waited_s=30.0, alive=[0, 1, 2]) is None


def test_the_ranks_furthest_behind_are_named():
    beats = [OWN, beat(1, count=49), beat(2, count=48, operation="data"), beat(3, count=48)]
    message = diagnose(beats, own=OWN, now=100.0, waited_s=30.0)
    assert message.startswith("Rank 0 waited 30 s for ranks 2, 3 in ")
    assert "Rank 2 (process 12 on node2) is alive, but late; it was in data of step 7" in message
    assert "Rank 1 " not in message


def test_a_broken_connection_does_not_accuse_who_is_a_little_behind():
    assert diagnose([OWN, beat(1, count=49)], own=OWN, now=100.0, waited_s=None) is None


def test_a_rank_that_never_came_and_one_that_does_not_fail():
    assert "Rank 1 has sent no heartbeat since the run started" in diagnose([OWN, None], own=OWN, now=1.0, waited_s=9.0)
    beats = [OWN, beat(1, operation="failed in gradients"), beat(2)]
    assert diagnose(beats, own=OWN, now=100.0, waited_s=9.0) is None
    assert "for rank 2 in" in diagnose(beats, own=OWN, now=100.0, waited_s=9.0, patient=True)


@pytest.fixture
def sigterm():
    """`settle` belongs to a process that is about to end; this one is not."""
    previous = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, previous)


@pytest.mark.usefixtures("sigterm")
def test_one_rank_tells_and_the_others_are_silent(heartbeat, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    other = Heartbeat(rank=1)
    other.folder, other.run_id = tmp_path, "now"
    error = KeyError("x")
    assert settle(error, heartbeat=heartbeat, num_ranks=2) is error
    silent = settle(ValueError("y"), heartbeat=other, num_ranks=2)
    assert isinstance(silent, SystemExit)
    assert silent.code == 1
    (path,) = find_failures(tmp_path)
    failure = read_failure(path)
    assert (failure.rank, failure.message) == (3, "KeyError: 'x'")
    assert "rank 3 failed first" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


def test_a_stalled_rank_explains_itself_where_no_exception_will_come(tmp_path, capsys):
    """The way of CUDA, where NCCL's watchdog aborts the process: the heartbeat's thread speaks before it."""
    heartbeat, late = Heartbeat(rank=0), Heartbeat(rank=1)
    late.start(tmp_path, run_id="now")
    heartbeat.mark("step")
    heartbeat.enter("all-reduce")
    heartbeat.start(tmp_path, run_id="now", watch=_Watch(heartbeat, num_ranks=2, timeout_s=60, explain_after_s=0.5))
    wait_for(lambda: find_failures(tmp_path))
    heartbeat.close("done")
    late.close("done")
    error = capsys.readouterr().err
    assert error.startswith("shardline train: Rank 0 waited ")
    assert "s for rank 1 in step (all-reduce). Rank 1 (process" in error
    assert error.count("\n") == 1
