"""kill -9 in the middle of saves, twenty times over: what is called a checkpoint is whole, and nothing else is lost."""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import os
import random
import signal
import time
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from rich.console import Console

from shardline.checkpoints.native import find_checkpoints
from shardline.config import CheckpointConfig, RunConfig
from shardline.training.run_directory import read_metrics
from training.conftest import with_layout

NUM_KILLS = 20
STEPS = 48
# Ranks are forked from a server that has imported everything: 20 starts of two take seconds instead of minutes.
CONTEXT = multiprocessing.get_context("forkserver")


def run_rank(store: str, rank: int, config: RunConfig, cache: str) -> None:
    import torch
    import torch.distributed as dist

    from shardline.parallel.world import start_world
    from shardline.training.run import train

    torch.set_num_threads(1)
    os.environ["SHARDLINE_CACHE"] = cache
    with start_world(store=dist.FileStore(store, 2), rank=rank, size=2) as world:
        train(config, world=world, console=Console(file=io.StringIO()), resume=True)


def start(folder: Path, config: RunConfig, cache: Path) -> list[BaseProcess]:
    store = str(folder / f"store-{time.monotonic_ns()}")
    ranks: list[BaseProcess] = [
        CONTEXT.Process(target=run_rank, args=(store, rank, config, str(cache)), daemon=True) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def finish(ranks: list[BaseProcess]) -> None:
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]


def wait_for(ranks: list[BaseProcess], condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "no save began in 60 s"
        assert all(rank.is_alive() for rank in ranks), "a rank ended by itself"
        time.sleep(0.001)


def changed_since(path: Path, wall_ns: int) -> bool:
    """True for a folder that is being written; one that the last kill left behind is older."""
    try:
        return path.stat().st_ctime_ns > wall_ns
    except FileNotFoundError:
        return False


@pytest.fixture(autouse=True)
def imported_once(monkeypatch):
    tests = str(Path(__file__).parents[1])  # the server looks nowhere else for what it is to import
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH")))))
    CONTEXT.set_forkserver_preload(["training.warm"])


def test_kill_at_twenty_instants_of_saves(base_config, cache, tmp_path, record_property):
    config = with_layout(base_config, zero=3, micro_batch=2, steps=STEPS)
    train = dataclasses.replace(config.train, global_batch=4, eval_every=0, eval_rows=1)
    config = dataclasses.replace(config, train=train, run=str(tmp_path / "run"))
    alone = dataclasses.replace(config, run=str(tmp_path / "alone"), checkpoint=CheckpointConfig(every=0))
    finish(start(tmp_path, alone, cache))

    checkpoints = Path(config.run) / "checkpoints"
    chance = random.Random(1130)
    unfinished, reached = 0, []
    for kill in range(NUM_KILLS):
        asynchronous = kill % 2 == 1
        saving = CheckpointConfig(every=1, keep_last=2, asynchronous=asynchronous)
        started = time.time_ns()
        ranks = start(tmp_path, dataclasses.replace(config, checkpoint=saving), cache)
        before = reached[-1] if reached else 0
        # Some saves are let through, then one begins, and after part of its length both ranks are gone at once.
        target = before + 1 + chance.randrange(2)
        wait_for(ranks, partial(changed_since, checkpoints / f".step-{target}.tmp", started))
        time.sleep(chance.random() * 0.25)
        for rank in ranks:
            os.kill(rank.pid, signal.SIGKILL)
        for rank in ranks:
            rank.join(20)
        unfinished += any(checkpoints.glob(".step-*.tmp"))
        found = find_checkpoints(checkpoints)
        for each in found:
            assert each.verify()["step"] == each.step
        assert not found or found[-1].step >= target - 1, "the save before had been complete"
        reached.append(found[-1].step if found else 0)
    assert reached == sorted(reached)
    assert reached[-1] < STEPS
    assert unfinished >= NUM_KILLS // 4, f"only {unfinished} of {NUM_KILLS} kills hit a save: {reached}"
    finish(start(tmp_path, dataclasses.replace(config, checkpoint=CheckpointConfig(every=0)), cache))
    continued, whole = (list(read_metrics(Path(each.run) / "metrics.jsonl")) for each in (config, alone))
    assert [row["step"] for row in continued] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in continued] == [row["loss"] for row in whole]
    record_property("kills", NUM_KILLS)
    record_property("kills that left an unfinished save", unfinished)
    print(f"{NUM_KILLS} kills, {unfinished} left an unfinished save; newest checkpoint after each: {reached}")
