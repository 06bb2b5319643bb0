"""Checkpoints and resuming: what a run does after a stop, a SIGKILL, a change of layout, or damage."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from shardline.checkpoints.huggingface import load_decoder
from shardline.checkpoints.native import Checkpoint, find_checkpoints
from shardline.config import CheckpointConfig, RunConfig, ShardlineError, UsageError, dump_config
from shardline.models.attention import DenseAttention
from shardline.text.tokenizer import Tokenizer
from shardline.training.run import train
from shardline.training.run_directory import RunDirectory, read_metrics
from training.conftest import At, with_layout


def run_job(world, config: RunConfig, cache: Path, resume: bool, steps: int) -> dict:
    """A whole run over the workers, in their process; `steps` cuts it short without touching the schedule."""
    os.environ["SHARDLINE_CACHE"] = str(cache)
    console = Console(file=io.StringIO())
    if steps < config.train.steps:
        return dataclasses.asdict(_train_until(steps, config, world, console))
    return dataclasses.asdict(train(config, world=world, console=console, resume=resume))


def _train_until(steps: int, config, world, console):
    """Stops a run right after the checkpoint of step `steps`: the last rank gets SIGTERM, and all of them agree."""
    from shardline.training import run as module

    class Stopping(module._Loop):
        def _save(self) -> None:
            super()._save()
            if self._trainer.step == steps and world.rank == world.size - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    original, module._Loop = module._Loop, Stopping
    try:
        result = train(config, world=world, console=console)
    finally:
        module._Loop = original
    assert (result.step, result.stopped) == (steps, "SIGTERM")
    return result


def losses_of(run: str | Path) -> list[float]:
    return [row["loss"] for row in read_metrics(Path(run) / "metrics.jsonl")]


@pytest.fixture(scope="module")
def run_config(base_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    config = with_layout(base_config, zero=0, micro_batch=4, steps=8)
    config = dataclasses.replace(config, checkpoint=CheckpointConfig(every=3, keep_last=2))

    def make(name: str, *, zero: int = 0, micro_batch: int = 4) -> RunConfig:
        return dataclasses.replace(with_layout(config, zero=zero, micro_batch=micro_batch), run=str(folder / name))

    return make


@pytest.fixture(scope="module")
def whole_run(workers, run_config, cache):
    config = run_config("whole", zero=2)
    return config, workers.run(2, run_job, config, cache, False, 8)


def test_the_run_directory_is_complete(whole_run):
    config, result = whole_run
    run = Path(config.run)
    for name in ("config.yaml", "plan.json", "metrics.jsonl", "report.html", "logs/rank-0.log", "logs/rank-1.log"):
        assert (run / name).stat().st_size > 0, name
    assert [each.step for each in find_checkpoints(run / "checkpoints")] == [6, 8], "every 3, the last, 2 kept"
    rows = list(read_metrics(run / "metrics.jsonl"))
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert set(rows[0]) == {
        "step", "tokens", "loss", "grad_norm", "learning_rate", "tokens_per_s", "mfu", "memory_gib", "step_s",
        "data_wait_s", "heldout_loss", "compile_s", "loss_scale", "num_skipped",
    }  # fmt: skip
    assert result["heldout_loss_after"] == rows[-1]["heldout_loss"] < result["heldout_loss_before"]
    assert result["measured_memory_gib"] > 0
    assert result["predicted_memory_gib"] > 0


def test_every_checkpoint_holds_a_folder_that_transformers_opens(whole_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, result = whole_run
    ids = AutoTokenizer.from_pretrained(result["model"])("def f(x):\n    return x", return_tensors="pt").input_ids
    ours = load_decoder(result["model"])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(result["model"]).eval()(ids).logits
        actual = ours(ids, positions_BT=torch.arange(ids.shape[1])[None], attention=DenseAttention())
    assert (actual - expected).abs().max() <= 1e-5
    assert Tokenizer.load(result["model"]).eos_token_ids == ours.config.eos_token_ids


# The same layout must continue bit for bit, another one to rounding (test_reshard.py goes through many of those).
SAME = [At(), At(data=2), At(data=2, zero=1), At(data=2, zero=2), At(data=4, zero=3), At(tensor=2, pipeline=2)]
OTHER = [(At(data=4, zero=3), At()), (At(tensor=2, pipeline=2), At(data=2, tensor=2, zero=1))]


@pytest.mark.parametrize(("before", "after"), [*((at, at) for at in SAME), *OTHER])
def test_a_stopped_run_continues_as_if_nothing_had_happened(before, after, workers, run_config, cache, whole_run):
    name = f"{before}-{after}"
    first, second = (at.of(run_config(name)) for at in (before, after))
    workers.run(before.num_processes, run_job, first, cache, False, 3)
    workers.run(after.num_processes, run_job, second, cache, True, 8)
    continued, whole = losses_of(first.run), losses_of(whole_run[0].run)
    np.testing.assert_allclose(continued, whole, rtol=1e-5)
    if before == after:
        alone = before.of(run_config(f"alone-{before}"))
        workers.run(before.num_processes, run_job, alone, cache, False, 8)
        assert continued == losses_of(alone.run), "the same layout must give the same bits"


def test_a_run_is_never_overwritten(whole_run, workers, cache):
    config, _ = whole_run
    before = (Path(config.run) / "metrics.jsonl").read_bytes()
    with pytest.raises(UsageError, match="already holds a run; pass --resume"):
        workers.run(2, run_job, config, cache, False, 8)
    assert (Path(config.run) / "metrics.jsonl").read_bytes() == before


def test_two_runs_are_never_in_one_folder_at_once(run_config, monkeypatch):
    monkeypatch.setattr("shardline.training.run_directory._PATIENCE_S", 0.2)
    config = run_config("twice")
    first, second = RunDirectory(config.run), RunDirectory(config.run)
    assert first.open(config, resume=False) is None
    for resume in (False, True):
        with pytest.raises(UsageError, match="Another process is training in"):
            second.open(config, resume=resume)
    first.close()
    assert second.open(config, resume=False) is None
    second.close()


def test_a_run_of_no_steps_leaves_its_model_and_can_go_on(workers, run_config, cache):
    config = run_config("no-steps")
    none = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=0))
    result = workers.run(2, run_job, none, cache, False, 0)
    assert (result["step"], result["loss"]) == (0, None)
    load_decoder(result["model"])
    assert workers.run(2, run_job, config, cache, True, 8)["step"] == 8


def test_resuming_a_finished_run_changes_nothing(whole_run, workers, cache):
    config, result = whole_run
    again = workers.run(2, run_job, config, cache, True, 8)
    assert again["step"] == 8
    assert again["heldout_loss_after"] == pytest.approx(result["heldout_loss_after"], rel=1e-6)
    assert again["heldout_loss_before"] == result["heldout_loss_before"]
    assert again["checkpoint"] == result["checkpoint"]


def test_a_resumed_run_must_be_the_same_run(whole_run, workers, cache):
    config, _ = whole_run
    other = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=5))
    with pytest.raises(UsageError, match=r"was trained with train\.seed = 0, and this config says 5"):
        workers.run(2, run_job, other, cache, True, 8)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no manifest", "manifest is no JSON"])
def test_a_damaged_checkpoint_is_named_and_nothing_is_lost(damage, workers, run_config, cache):
    config = run_config(f"damage-{damage}")
    workers.run(1, run_job, config, cache, False, 8)
    newest, older = find_checkpoints(Path(config.run) / "checkpoints")[::-1]
    victim = next((newest.path / "state").glob("*.distcp"))
    if damage == "truncated":
        victim.write_bytes(victim.read_bytes()[:-7])
    elif damage == "flipped":
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    elif damage == "missing":
        victim.unlink()
    elif damage == "no manifest":
        (newest.path / "manifest.json").unlink()
    else:
        (newest.path / "manifest.json").write_text("{")
    with pytest.raises(ShardlineError, match=f"delete .*step-8 to resume from {older.path.name}"):
        workers.run(1, run_job, config, cache, True, 8)
    assert older.verify()["step"] == 6
    assert len(losses_of(config.run)) == 8


def test_leftovers_of_a_killed_save_are_not_checkpoints(tmp_path):
    (tmp_path / ".step-9.tmp" / "state").mkdir(parents=True)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-10").mkdir()
    (tmp_path / "notes").mkdir()
    assert [each.step for each in find_checkpoints(tmp_path)] == [2, 10]
    assert find_checkpoints(tmp_path / "nowhere") == []
    with pytest.raises(ShardlineError, match=r"manifest\.json is missing or damaged; there is no older checkpoint"):
        Checkpoint(step=2, path=tmp_path / "step-2").verify()


def test_sigkill_in_mid_step_and_resume_gives_the_same_losses(run_config, cache, tmp_path, whole_run):
    """Two real processes under the launcher, both killed with SIGKILL in the middle of a step, then started again."""
    config = dataclasses.replace(run_config("killed", zero=2), run=str(tmp_path / "run"))
    # A step long enough to be hit in its middle.
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=12, global_batch=16, eval_every=0, eval_rows=2),
        checkpoint=CheckpointConfig(every=2, keep_last=3),
    )
    file = tmp_path / "run.yaml"
    environment = {**os.environ, "SHARDLINE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}

    def start(run: Path, *words: str) -> subprocess.Popen:
        file.write_text(dump_config(dataclasses.replace(config, run=str(run))))
        command = [sys.executable, "-m", "shardline", "train", str(file), "--nproc", "2", "--json", *words]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(process: subprocess.Popen) -> dict:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        return json.loads(output)

    finish(start(tmp_path / "alone"))
    process = start(tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
        assert time.monotonic() < deadline, process.stderr.read()
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(ranks) == 2
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    assert process.wait(timeout=30) == 128 + signal.SIGKILL
    process.communicate()
    reached = len(list(read_metrics(metrics)))
    assert 5 <= reached < 12
    result = finish(start(tmp_path / "run", "--resume"))
    assert result["step"] == 12
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "alone")
