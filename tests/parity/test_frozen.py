"""Frozen parameters under every mechanism, down to a pipeline stage in which nothing is trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from torch.distributed.tensor import DTensor

from parity.jobs import Difference, Training, gate_model, train
from shardline.config import OptimizerConfig, ParallelConfig, ParameterGroupConfig, RunConfig
from shardline.parallel.world import World
from shardline.text.dataset import prepare_dataset
from shardline.text.tokenizer import byte_tokenizer
from shardline.training.trainer import Trainer
from training.conftest import with_layout

FROZEN = {
    "the first stage": ("model.embed_tokens.*", "model.layers.[01].*"),
    "all but the head": ("model.*",),
    "all but one matrix in the middle": (
        "lm_head.*",
        "*norm*",
        "*embed*",
        "model.layers.[023].*",
        "*.self_attn.*",
        "*.[ug]*_proj.*",
    ),
}
# Processes, layout, optimizer.
LAYOUTS = {
    "1f1b": (2, ParallelConfig(pipeline=2), "adamw"),
    "interleaved, ZeRO-2": (4, ParallelConfig(pipeline=2, schedule="interleaved", zero=2), "adamw"),
    "zero_bubble_v, ZeRO-3": (4, ParallelConfig(pipeline=2, schedule="zero_bubble_v", zero=3), "muon"),
    "1f1b, ZeRO-1": (4, ParallelConfig(pipeline=2, zero=1), "muon"),
    "sequence parallel": (2, ParallelConfig(tensor=2, sequence_parallel=True), "adamw"),
    "ZeRO-1": (2, ParallelConfig(zero=1), "adamw"),
}


def freezing(config: RunConfig, patterns: tuple[str, ...], *, optimizer: str) -> RunConfig:
    groups = tuple(ParameterGroupConfig(pattern=pattern, freeze=True) for pattern in patterns)
    chosen = OptimizerConfig(name=optimizer, lr=3e-3, warmup_steps=1, groups=groups)  # type: ignore[arg-type]
    return dataclasses.replace(config, optimizer=chosen)


@pytest.fixture(scope="module")
def references(workers, base_config, cache):
    found: dict[tuple[str, str], Training] = {}

    def get(frozen: str, optimizer: str) -> Training:
        if (frozen, optimizer) not in found:
            config = freezing(base_config, FROZEN[frozen], optimizer=optimizer)
            config = with_layout(config, zero=0, micro_batch=16, steps=2)
            found[frozen, optimizer] = workers.run(1, train, config, cache, gate_model(tied=False))
        return found[frozen, optimizer]

    return get


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("frozen", FROZEN)
def test_what_is_trained_is_trained_as_in_one_process(frozen, layout, references, workers, base_config, cache):
    processes, parallel, optimizer = LAYOUTS[layout]
    expected = references(frozen, optimizer)
    config = dataclasses.replace(freezing(base_config, FROZEN[frozen], optimizer=optimizer), parallel=parallel)
    actual = workers.run(processes, train, with_layout(config, micro_batch=4, steps=2), cache, gate_model(tied=False))
    Difference.between(actual, expected).check()


def all_sharded_after_a_step(world: World, config: RunConfig, cache: Path) -> bool:
    rows, heldout = prepare_dataset(config.data, byte_tokenizer(), cache_dir=cache)
    trainer = Trainer(config=config, world=world, architecture=gate_model(tied=False), rows=rows, heldout=heldout)
    trainer.train_step()
    return all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())


def test_a_frozen_stage_is_sharded_again_after_each_step(workers, base_config, cache):
    config = freezing(base_config, FROZEN["the first stage"], optimizer="adamw")
    config = dataclasses.replace(config, parallel=ParallelConfig(pipeline=2, zero=2))
    assert all(workers.run_all(4, all_sharded_after_a_step, with_layout(config, micro_batch=4, steps=1), cache))
