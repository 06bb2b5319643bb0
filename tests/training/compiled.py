"""Jobs for the workers: the same short training with and without `torch.compile`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from shardline.config import RunConfig
from shardline.models.config import DecoderConfig
from shardline.parallel import compiling
from shardline.parallel.world import World
from shardline.text.dataset import prepare_dataset
from shardline.text.tokenizer import byte_tokenizer
from shardline.training.trainer import Trainer


def eager_and_compiled(
    world: World, config: RunConfig, cache: Path, model: DecoderConfig, backend: str
) -> dict[str, Any]:
    """Returns both runs' losses and evaluations, the graphs that were made, and each compiled step's compile time."""
    eager, _ = _train(world, config, cache, model)
    torch._dynamo.reset()  # which also forgets who listens to it
    compiling.compile_clock.cache_clear()
    torch._dynamo.utils.counters.clear()
    before, compiling.BACKEND = compiling.BACKEND, backend
    try:
        train = dataclasses.replace(config.train, compile=True)
        compiled, compile_s = _train(world, dataclasses.replace(config, train=train), cache, model)
    finally:
        compiling.BACKEND = before
    counters = torch._dynamo.utils.counters
    return {
        "eager": eager,
        "compiled": compiled,
        "compile_s": compile_s,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }


def _train(
    world: World, config: RunConfig, cache: Path, model: DecoderConfig
) -> tuple[list[float | None], list[float]]:
    rows, heldout = prepare_dataset(config.data, byte_tokenizer(), cache_dir=cache)
    trainer = Trainer(config=config, world=world, architecture=model, rows=rows, heldout=heldout)
    steps = [trainer.train_step() for _ in range(config.train.steps)]
    return [*(step.loss for step in steps), trainer.evaluate()], [step.compile_s for step in steps]
