"""A run goes from layout to layout by its checkpoints alone; its losses are those of one process that never stopped."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardline.checkpoints.huggingface import load_tensors
from shardline.checkpoints.native import Checkpoint, ModelFolder, find_checkpoints, load_state, save_checkpoint
from shardline.checkpoints.peers import Peers
from shardline.checkpoints.sharded import StoredState
from shardline.config import RunConfig
from shardline.models.config import DecoderConfig
from shardline.parallel.world import World
from shardline.text.dataset import prepare_dataset
from shardline.text.tokenizer import byte_tokenizer
from shardline.training.trainer import Trainer
from training.conftest import At
from training.jobs import small_model

STEPS_EACH = 2


# Neighbours are the pairs that are gone through: 14 of them, in a ring without an end.
ROUTE = [
    At(data=4, zero=3),
    At(tensor=2, pipeline=2),
    At(),
    At(data=2, tensor=2, zero=1),
    At(pipeline=2, schedule="interleaved"),
    At(data=2, zero=2),
    At(tensor=4, sequence_parallel=True),
    At(data=2, pipeline=2, zero=3, schedule="gpipe"),
    At(data=2, tensor=2, zero=3, sequence_parallel=True),
    At(tensor=2, pipeline=2, sequence_parallel=True, schedule="zero_bubble_v"),
    At(data=4, zero=1),
    At(data=2, pipeline=2, zero=1),
    At(data=2),
    At(data=2, zero=1, disk=True),
    At(data=4, zero=3),
]


def go_on(
    world: World, config: RunConfig, cache: Path, model: DecoderConfig, folder: Path, steps: int
) -> dict[str, Any]:
    """Loads the newest checkpoint, saves what was loaded again, trains some steps, saves."""
    rows, heldout = prepare_dataset(config.data, byte_tokenizer(), cache_dir=cache)
    trainer = Trainer(config=config, world=world, architecture=model, rows=rows, heldout=heldout)
    peers = Peers.of(world)
    found = find_checkpoints(folder)

    def save(into: Path) -> Checkpoint:
        about = ModelFolder(config=model)
        facts = {"layout": str(trainer.layout)}
        return save_checkpoint(into, step=trainer.step, state=trainer.state(), model=about, facts=facts, peers=peers)

    if found:
        load_state(found[-1], trainer.state())
        trainer.step = found[-1].step
        save(folder / "again")
    losses = [trainer.train_step().loss for _ in range(steps)]
    save(folder)
    return {"losses": losses, "heldout": trainer.evaluate()}


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_through_every_kind_of_layout_is_the_run_of_one_process(tied, workers, base_config, cache, tmp_path):
    assert len(set(pairwise(ROUTE))) >= 12
    model = dataclasses.replace(small_model(tied=tied), num_layers=4, sliding_windows=())
    train = dataclasses.replace(base_config.train, steps=STEPS_EACH * len(ROUTE))
    config = dataclasses.replace(base_config, train=train, run=str(tmp_path / "run"))
    alone = workers.run(1, go_on, At().of(config), cache, model, tmp_path / "alone", train.steps)
    losses: list[float] = []
    for at in ROUTE:
        answer = workers.run(at.num_processes, go_on, at.of(config), cache, model, tmp_path / "route", STEPS_EACH)
        losses += answer["losses"]
    np.testing.assert_allclose(losses, alone["losses"], rtol=1e-5)
    assert answer["heldout"] == pytest.approx(alone["heldout"], rel=1e-5)

    again = {each.step: each for each in find_checkpoints(tmp_path / "route" / "again")}
    saved = {each.step: each for each in find_checkpoints(tmp_path / "route")}
    assert len(again) == len(ROUTE) - 1
    for step, copy in again.items():
        assert_same_state(saved[step], copy)
    weights, state = load_tensors(saved[train.steps].model_folder), StoredState(saved[train.steps].path / "state")
    assert set(weights) == set(state.shapes("model."))
    assert all(torch.equal(tensor, state.read(f"model.{name}")) for name, tensor in weights.items())


def assert_same_state(first: Checkpoint, second: Checkpoint) -> None:
    """The same names and the same bits, whatever layouts wrote them: weights and all of the optimizer's state."""
    ours, theirs = (StoredState(each.path / "state") for each in (first, second))
    names = set(ours.shapes(""))
    assert names == set(theirs.shapes(""))
    assert len([name for name in names if name.startswith("optimizer.")]) >= 2 * len(ours.shapes("model."))
    for name in names:
        assert torch.equal(ours.read(name), theirs.read(name)), (first.path, name)
    ours_layout, theirs_layout = (each.verify()["layout"] for each in (first, second))
    assert ours_layout != theirs_layout, "or else nothing was cut anew"
