"""How a checkpoint is written by several ranks: who writes what, what is in memory meanwhile, and what goes on."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardline.checkpoints import native
from shardline.checkpoints.huggingface import save_folder
from shardline.checkpoints.native import Checkpoint, ModelFolder, find_checkpoints, load_state, save_checkpoint
from shardline.checkpoints.peers import Peers
from shardline.checkpoints.saver import Saver
from shardline.checkpoints.sharded import StoredState
from shardline.config import CheckpointConfig, RunConfig, ShardlineError
from shardline.parallel.world import World
from shardline.text.tokenizer import byte_tokenizer
from training.conftest import with_layout
from training.jobs import make_trainer, small_model
from training.test_resume import losses_of, run_job

MODEL = ModelFolder(config=small_model(), tokenizer=byte_tokenizer(), max_shard_bytes=20_000)
LAYOUTS = [(2, 0), (2, 1), (2, 3)]


class Weighed(StoredState):
    """Notes how many bytes of what it has read are alive at once, and how many it has read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.alive: list[weakref.ref[Tensor]] = []
        self.most_bytes = self.read_bytes = 0

    def read(self, name: str) -> Tensor:
        tensor = super().read(name)
        self.alive = [each for each in self.alive if each() is not None] + [weakref.ref(tensor)]
        self.most_bytes = max(self.most_bytes, sum(each().nbytes for each in self.alive))
        self.read_bytes += tensor.nbytes
        return tensor


def write_model_twice(world: World, config: RunConfig, cache: Path, folder: Path) -> dict[str, int]:
    """Saves, writes the model folder once more while weighing, and a third time from whole tensors on rank 0."""
    trainer = make_trainer(world, config, cache)
    trainer.train_step()
    peers = Peers.of(world)
    checkpoint = save_checkpoint(folder, step=1, state=trainer.state(), model=MODEL, facts={}, peers=peers)
    weighed = Weighed(checkpoint.path / "state")
    peers.first(lambda: (folder / "again").mkdir())
    written = MODEL.write(folder / "again", weighed, peers)
    if world.is_first:
        stored = StoredState(checkpoint.path / "state")
        tensors = {name: stored.read(f"model.{name}") for name in stored.shapes("model.")}
        save_folder(
            folder / "whole",
            config=MODEL.config,
            tensors=tensors,
            tokenizer=MODEL.tokenizer,
            max_shard_bytes=MODEL.max_shard_bytes,
        )
    return {
        "most": weighed.most_bytes,
        "read": weighed.read_bytes,
        "files": sum(path.suffix == ".safetensors" for path in written),
        "model": sum(tensor.nbytes for tensor in weighed.shapes("model.").values()),
        "largest": max(tensor.nbytes for tensor in weighed.shapes("model.").values()),
    }


@pytest.mark.parametrize(("size", "zero"), LAYOUTS)
def test_no_rank_holds_the_model_that_all_of_them_write(size, zero, workers, base_config, cache, tmp_path):
    config = with_layout(base_config, zero=zero, micro_batch=4)
    answers = workers.run_all(size, write_model_twice, config, cache, tmp_path)
    model, largest = answers[0]["model"], answers[0]["largest"]
    assert sum(answer["read"] for answer in answers) == model, "each tensor is read by one rank"
    for answer in answers:
        assert answer["files"] > 1
        assert answer["read"] < 0.7 * model
        assert answer["most"] <= largest < 0.3 * model, "one tensor at a time"
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert len([name for name in whole if name.endswith(".safetensors")]) > 4
    for folder in (tmp_path / "again", tmp_path / "step-1" / "model"):
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def save_apart(world: World, config: RunConfig, cache: Path, folder: Path, leftover: bool) -> None:
    """Each rank has its own file system, and maybe what an earlier save left there."""
    native._VISIBLE_WITHIN_S = 0.2
    trainer = make_trainer(world, config, cache)
    mine = folder / f"machine-{world.rank}"
    if leftover:
        (mine / ".step-1.tmp" / "state").mkdir(parents=True)
    save_checkpoint(mine, step=1, state=trainer.state(), model=MODEL, facts={}, peers=Peers.of(world))


@pytest.mark.parametrize("leftover", [False, True])
def test_ranks_without_a_common_file_system_are_told_so(leftover, workers, base_config, cache, tmp_path):
    config = with_layout(base_config, zero=3, micro_batch=4)
    wanted = (
        r"The checkpoint of step 1 was not saved: rank 1 \(.*\) can't see .*/machine-1/\.step-1\.tmp.*, which rank 0 "
        r"wrote; all ranks must see the run directory on one file system: choose such a folder with --run\. "
        r"No checkpoint is complete yet\."
    )
    with pytest.raises(ShardlineError, match=wanted):
        workers.run(2, save_apart, config, cache, tmp_path, leftover)
    assert not find_checkpoints(tmp_path / "machine-0")
    assert not list((tmp_path / "machine-0").iterdir()), "what was written is gone again"


def save_with_a_hole(world: World, config: RunConfig, cache: Path, folder: Path) -> None:
    state = make_trainer(world, config, cache).state()
    if not world.is_first:
        del state["optimizer.model.layers.0.mlp.up_proj.weight.exp_avg"]
    save_checkpoint(folder, step=1, state=state, model=MODEL, facts={}, peers=Peers.of(world))


def test_a_part_that_no_rank_holds_is_no_checkpoint_of_zeros(workers, base_config, cache, tmp_path):
    config = with_layout(base_config, zero=3, micro_batch=4)
    wanted = r"checkpoint of step 1 was not saved: rank 0 could not write .*/state: Failed to validate global plan"
    with pytest.raises(ShardlineError, match=wanted):
        workers.run(2, save_with_a_hole, config, cache, tmp_path)
    assert not list(tmp_path.iterdir())


class HeldUp(Saver):
    """Writes to a disk that takes nothing, not the first byte, until `released`."""

    released = threading.Event()

    def _write(self, *args: Any, **options: Any) -> None:
        assert self.released.wait(60)
        super()._write(*args, **options)


def save_behind(world: World, config: RunConfig, cache: Path, folder: Path) -> dict[str, Any]:
    trainer = make_trainer(world, config, cache)
    said: list[str] = []
    saver = HeldUp(folder, world=world, asynchronous=True, published=lambda checkpoint: None, say=said.append)
    saver.released = threading.Event()
    losses, buffers = [], []

    def save() -> None:
        saver.save(step=trainer.step, state=trainer.state(), model=MODEL, facts={"layout": "?"})
        buffers.append({name: buffer.data_ptr() for name, buffer in saver._staging._buffers.items()})

    def steps(count: int) -> None:
        losses.extend(trainer.train_step().loss for _ in range(count))

    steps(2)
    wanted = {name: shard.local.clone() for name, shard in trainer.state().items()}
    save()
    steps(3)
    complete_meanwhile = [each.step for each in find_checkpoints(folder)]
    saver.released.set()
    save()  # waits for the first
    complete_later = [each.step for each in find_checkpoints(folder)]
    steps(1)
    saver.wait()
    assert saver.newest == find_checkpoints(folder)[-1]
    fresh = make_trainer(world, config, cache)
    first = Checkpoint(step=2, path=folder / "step-2")
    first.verify()
    load_state(first, fresh.state())
    return {
        "losses": losses,
        "meanwhile": complete_meanwhile,
        "later": complete_later,
        "same": all(torch.equal(shard.local, wanted[name]) for name, shard in fresh.state().items()),
        "changed": any(not torch.equal(shard.local, wanted[name]) for name, shard in trainer.state().items()),
        "reused": buffers[0] == buffers[1],
        "copy": saver._staging.num_bytes,
        "state": sum(shard.local.nbytes for shard in trainer.state().values()),
        "said": said,
    }


@pytest.mark.parametrize(("size", "zero"), LAYOUTS)
def test_steps_go_on_while_a_save_is_held_up(size, zero, workers, base_config, cache, tmp_path):
    config = with_layout(base_config, zero=zero, micro_batch=4)
    answers = workers.run_all(size, save_behind, config, cache, tmp_path / "saved")
    alone = workers.run(size, save_nothing, config, cache)
    for answer in answers:
        assert answer["losses"] == alone, "a save must not touch training"
        assert answer["meanwhile"] == []
        assert 2 in answer["later"]
        assert answer["same"], "the checkpoint is the state of the step that it was called after"
        assert answer["changed"], "or else the line above proves nothing"
        assert answer["reused"]
        assert "in the background, after" in answer["said"][0]
    # Weights under ZeRO-0 and 1 and the optimizer's under ZeRO-0 are on every rank; the rest is dealt out already.
    held, copies = sum(answer["state"] for answer in answers), [answer["copy"] for answer in answers]
    share = {0: 1 / 2, 1: 3 / 4, 3: 1}[zero]
    assert sum(copies) == pytest.approx(share * held, rel=0.02), "each shard is copied by one rank"
    assert max(copies) < 1.2 * min(copies)


def save_nothing(world: World, config: RunConfig, cache: Path) -> list[float]:
    trainer = make_trainer(world, config, cache)
    return [trainer.train_step().loss for _ in range(6)]


@pytest.mark.parametrize(("size", "zero"), [(2, 0), (2, 3)])
def test_a_run_with_saves_in_the_background_is_the_same_run(size, zero, workers, base_config, cache, tmp_path):
    config = with_layout(base_config, zero=zero, micro_batch=4, steps=7)
    runs = []
    for asynchronous in (False, True):
        checkpoint = CheckpointConfig(every=1, keep_last=2, keep_every=3, asynchronous=asynchronous)
        run = dataclasses.replace(config, checkpoint=checkpoint, run=str(tmp_path / str(asynchronous)))
        result = workers.run(size, run_job, run, cache, False, 7)
        found = find_checkpoints(Path(run.run) / "checkpoints")
        assert [each.step for each in found] == [3, 6, 7], "the last two, and multiples of three"
        assert result["checkpoint"] == str(found[-1].path)
        files = [each.verify()["files"] for each in found]
        weights = [facts for each in files for name, facts in each.items() if name.startswith("model/")]
        runs.append((losses_of(run.run), weights))
    assert runs[0] == runs[1], "losses, and every byte of the models"
