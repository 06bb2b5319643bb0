"""How a run ends before its last step, and how it goes on: signals, a full disk, a rank that torchrun starts again."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardline.checkpoints.native import find_checkpoints
from shardline.config import CheckpointConfig, RunConfig, UsageError, dump_config
from shardline.training.run_directory import RunDirectory, read_metrics
from training.conftest import with_layout
from training.test_resume import losses_of, run_job

STEPS = 60


@pytest.fixture(scope="module")
def config(base_config) -> RunConfig:
    config = with_layout(base_config, zero=2, micro_batch=2, steps=STEPS)
    train = dataclasses.replace(config.train, global_batch=4, eval_every=0, eval_rows=1)
    return dataclasses.replace(config, train=train, checkpoint=CheckpointConfig(every=3, asynchronous=True))


@pytest.fixture(scope="module")
def whole(config, workers, cache, tmp_path_factory) -> list[float]:
    """The losses of the run that nothing stops."""
    run = dataclasses.replace(config, run=str(tmp_path_factory.mktemp("whole")), checkpoint=CheckpointConfig(every=0))
    workers.run(2, run_job, run, cache, False, STEPS)
    return losses_of(run.run)


@pytest.fixture
def begin(tmp_path, cache):
    @contextmanager
    def begin(config: RunConfig, *words: str, launcher: tuple[str, ...] = ()) -> Iterator[subprocess.Popen]:
        file = tmp_path / "run.yaml"
        file.write_text(dump_config(config))
        own = ("--nproc", "2") if not launcher else ()
        process = subprocess.Popen(
            [sys.executable, "-m", *launcher, "shardline", "train", str(file), *own, "--json", *words],
            env={**os.environ, "SHARDLINE_CACHE": str(cache), "OMP_NUM_THREADS": "1", "COLUMNS": "1000"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                for rank in ranks_of(process).values():  # torchrun's have a session of their own
                    os.kill(rank, signal.SIGKILL)
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    return begin


def steps_of(config: RunConfig) -> int:
    path = Path(config.run) / "metrics.jsonl"
    return len(list(read_metrics(path))) if path.exists() else 0


def wait_for(process: subprocess.Popen, condition) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "nothing happened in 90 s"
        time.sleep(0.005)


def ranks_of(process: subprocess.Popen) -> dict[int, int]:
    """Returns {rank: pid} of a launcher's children, from their environment."""
    ranks = {}
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        rank = next((value for value in variables if value.startswith(b"RANK=")), None)
        if rank is not None:
            ranks[int(rank.removeprefix(b"RANK="))] = int(pid)
    return ranks


def test_signals_save_and_stop_and_the_run_goes_on(config, begin, whole, workers, cache, tmp_path):
    config = dataclasses.replace(config, run=str(tmp_path / "run"))
    reached = 0
    # Slurm's warning to the launcher, then Kubernetes' to one rank alone.
    for number, words in ((signal.SIGUSR1, ()), (signal.SIGTERM, ("--resume",))):
        with begin(config, *words) as process:
            wait_for(process, lambda before=reached: steps_of(config) >= before + 4)
            os.kill(process.pid if number == signal.SIGUSR1 else ranks_of(process)[1], number)
            output, errors = process.communicate(timeout=60)
        assert process.returncode == 128 + number, errors
        result = json.loads(output)
        assert result["stopped"] == number.name
        assert reached < result["step"] < STEPS
        reached = result["step"]
        assert f"stopped by {number.name} after step {reached} of {STEPS}; --resume continues" in errors
        newest = find_checkpoints(tmp_path / "run" / "checkpoints")[-1]
        assert (newest.step, str(newest.path)) == (reached, result["checkpoint"])
        newest.verify()
        assert steps_of(config) == reached
        assert "Traceback" not in errors
    # Ctrl-C reaches every process of the terminal.
    with begin(config, "--resume") as process:
        wait_for(process, lambda: steps_of(config) > reached)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    told = "shardline train: interrupted; what was saved is whole; go on from the last checkpoint with --resume."
    assert errors.count(told) == 1, errors
    result = workers.run(2, run_job, config, cache, True, STEPS)
    assert (result["step"], result["stopped"]) == (STEPS, None)
    assert losses_of(config.run) == whole


def test_torchrun_recovers_from_a_killed_rank_by_itself(config, begin, whole, tmp_path):
    config = dataclasses.replace(config, run=str(tmp_path / "run"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = (
        "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--master-port", port, "-m", "--",
    )  # fmt: skip
    with begin(config, launcher=launcher) as process:
        wait_for(process, lambda: find_checkpoints(tmp_path / "run" / "checkpoints") and steps_of(config) >= 5)
        first = ranks_of(process)
        os.kill(first[1], signal.SIGKILL)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f"resumed from {tmp_path / 'run' / 'checkpoints'}" in errors
    said = [json.loads(line) for line in output.splitlines()]  # the first attempt's rank 0 told why it stopped
    assert ["error" in each for each in said] in ([True, False], [False])
    assert said[-1]["step"] == STEPS
    assert losses_of(config.run) == whole


def test_a_restart_does_not_go_on_with_what_the_first_start_was_refused(config, tmp_path):
    run = RunDirectory(tmp_path)
    assert run.open(config, resume=False) is None
    run.append_metrics({"step": 1, "loss": 1.0})
    assert run.open(config, resume=False, restarts=1) is None, "torchrun's second attempt at its own run"
    run.append_metrics({"step": 1, "loss": 1.0})
    for restarts in (0, 1, 2):  # another launch, which torchrun then repeats
        with pytest.raises(UsageError, match="already holds a run; pass --resume"):
            run.open(config, resume=False, restarts=restarts)
    assert len(list(read_metrics(run.metrics))) == 1
    assert run.open(config, resume=True) is None
    assert run.open(config, resume=False, restarts=1) is None


def test_a_disk_that_takes_no_more_ends_the_run_with_a_sentence(config, begin, tmp_path):
    config = dataclasses.replace(config, run=str(tmp_path / "run"))
    checkpoints = tmp_path / "run" / "checkpoints"
    with begin(config) as process:
        wait_for(process, lambda: find_checkpoints(checkpoints))
        rank = ranks_of(process)[1]
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (200_000, 200_000))  # every large file of this rank's fails
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    message = json.loads(output)["error"]["message"]
    newest = find_checkpoints(checkpoints)[-1]
    assert "was not saved: rank 1 could not write" in message
    assert "File too large" in message
    assert message.endswith(f"{newest.path} is whole: --resume goes on from it.")
    assert message in errors
    assert steps_of(config) < STEPS, "the ranks agree to stop at once, not at the end"
    newest.verify()
    assert not list(checkpoints.glob(".step-*"))
