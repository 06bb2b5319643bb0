"""A rank that is stopped, dead, slow, late or ill, in real runs: how they end, when, and what is said."""

from __future__ import annotations

import re
import signal
import sys
import time

import pytest

from parallel.cluster import Cluster, kill, processes_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stops real processes and reads /proc")

LIMIT_S = 3


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path, timeout_s=LIMIT_S)


def test_a_stopped_rank_ends_the_run_within_the_limit(cluster):
    cluster.write(steps=3000)
    process = cluster.start(cluster.ours("--checkpoint.every", "0"))
    beat = cluster.beat_of(1, step=3, process=process)
    stopped = kill(beat, signal.SIGSTOP)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - stopped < LIMIT_S + 10
    assert process.returncode == 1, output
    messages = [line for line in output.splitlines() if line.startswith("shardline train:")]
    assert len(messages) == 1, output
    assert re.search(rf"Rank 0 waited {LIMIT_S} s for rank 1 in .* of step \d+\.", messages[0])
    assert f"Rank 1 (process {beat.pid} on {beat.host}) is stopped by a signal or a debugger; it was in" in messages[0]
    assert "Traceback" not in output
    assert processes_of(str(cluster.file)) == []


def test_a_rank_that_stops_in_a_save_ends_the_run(cluster):
    """Files take as long as they take, so a save's collectives have no limit; a heartbeat that stands still has one."""
    process = cluster.start(cluster.ours(), fault="halt 1")
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 1, output
    messages = [line for line in output.splitlines() if line.startswith("shardline train:")]
    assert len(messages) == 1, output
    assert re.search(
        r"Rank 0 waited \d+ s for rank 1 in save of step 2\. Rank 1 \(.*\) is stopped by a signal", messages[0]
    )
    assert processes_of(str(cluster.file)) == []


@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_rank_is_named_at_once(dead, cluster):
    cluster.write(steps=3000)
    process = cluster.start(cluster.ours("--checkpoint.every", "0"))
    beat = cluster.beat_of(dead, step=3, process=process)
    killed = kill(beat, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - killed < LIMIT_S + 10
    assert process.returncode == 128 + signal.SIGKILL, output
    messages = [line for line in output.splitlines() if line.startswith("shardline train:")]
    assert len(messages) == 1, output
    assert f"lost its connection to rank {dead} in " in messages[0]
    assert f"Rank {dead} (process {beat.pid} on {beat.host}) is gone, killed or out of memory; it was in" in messages[0]
    assert processes_of(str(cluster.file)) == []


def test_a_slow_rank_is_waited_for_until_the_limit(cluster):
    process = cluster.start(cluster.ours(), fault=f"sleep 1 3 {LIMIT_S - 1}")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert len(cluster.losses()) == 6


def test_a_late_rank_is_named_with_what_it_does_under_torchrun(cluster):
    process = cluster.start(cluster.torchrun(), fault="sleep 1 3 40")
    cluster.beat_of(0, step=3, process=process)
    began = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < LIMIT_S + 15
    assert process.returncode != 0
    messages = [line for line in output.splitlines() if line.startswith("shardline train:")]
    assert len(messages) == 1, output
    assert f"Rank 0 waited {LIMIT_S} s for rank 1 in" in messages[0]
    assert "is alive, but late; it was in data of step 3" in messages[0]
    assert "calling with_fault" in messages[0], "the line of code that it sleeps in"


@pytest.mark.parametrize("launcher", ["ours", "torchrun"])
def test_the_first_traceback_is_printed_once_in_full(launcher, cluster):
    process = cluster.start(getattr(cluster, launcher)(), fault="crash 1 3")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert output.count("RuntimeError: the rank is ill") == 1, output
    assert len(re.findall(r"^(?:\[rank\d\]: )?Traceback", output, flags=re.MULTILINE)) == 1 + (launcher == "torchrun")
    for place in ("in with_fault", "in _run_steps"):
        assert place in output
    assert "Rank 1 failed first" in output or "rank 1 failed first" in output
    assert processes_of(str(cluster.file)) == []
