"""What the workers run: whole small trainings, returning plain numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardline.config import RunConfig
from shardline.models.config import DecoderConfig, RopeConfig
from shardline.models.feedforward import MixtureOfExperts
from shardline.parallel.shards import LoadShards, SaveShards, Shard
from shardline.parallel.world import World
from shardline.text.dataset import prepare_dataset
from shardline.text.tokenizer import byte_tokenizer
from shardline.training.trainer import Trainer


def small_model(*, tied: bool = True) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=320,
        hidden_size=48,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        max_position_embeddings=256,
        rope=RopeConfig(theta=10000.0),
        tie_word_embeddings=tied,
    )


def make_trainer(world: World, config: RunConfig, cache: Path, *, tied: bool = True) -> Trainer:
    rows, heldout = prepare_dataset(config.data, byte_tokenizer(), cache_dir=cache)
    return Trainer(config=config, world=world, architecture=small_model(tied=tied), rows=rows, heldout=heldout)


def losses(world: World, config: RunConfig, cache: Path, tied: bool) -> dict[str, list[float]]:
    """Trains train.steps steps; returns losses, gradient norms and the evaluations before and after."""
    trainer = make_trainer(world, config, cache, tied=tied)
    before = trainer.evaluate()
    steps = [trainer.train_step() for _ in range(config.train.steps)]
    return {
        "loss": [step.loss for step in steps],
        "grad_norm": [step.grad_norm for step in steps],
        "num_tokens": [float(step.num_tokens) for step in steps],
        "heldout": [before, trainer.evaluate()],
    }


def whole_gradients(trainer: Trainer, *, copies_are_equal: bool = True) -> dict[str, np.ndarray]:
    """Returns every parameter's gradient, put together from all ranks' parts."""
    shards = {
        name: trainer.model.shard(name, parameter.grad)
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }
    return assemble(shards, copies_are_equal=copies_are_equal)


def assemble(shards: dict[str, Shard], *, copies_are_equal: bool = True) -> dict[str, np.ndarray]:
    """Returns whole arrays of what all ranks hold, whose copies must be equal to the bit; every rank must call it."""
    mine = [(name, each.shape, each.offsets, each.local.numpy(force=True).copy()) for name, each in shards.items()]
    everyone: list[list] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    wholes: dict[str, np.ndarray] = {}
    for name, shape, offsets, local in (part for parts in everyone for part in parts):
        whole = wholes.setdefault(name, np.full(shape, np.nan, dtype=np.float32))
        region = whole[tuple(slice(at, at + size) for at, size in zip(offsets, local.shape, strict=True))]
        filled = ~np.isnan(region)
        if copies_are_equal:
            np.testing.assert_array_equal(region[filled], local[filled], err_msg=f"copies of {name} differ")
        region[...] = local
    return wholes


def first_gradients(world: World, config: RunConfig, cache: Path, tied: bool) -> dict[str, np.ndarray]:
    """Returns every parameter's gradient of the first step, whole, as the optimizer sees it."""
    trainer = make_trainer(world, config, cache, tied=tied)
    gradients: dict[str, np.ndarray] = {}

    def record(*_: object) -> None:
        gradients.update(whole_gradients(trainer))

    trainer._optimizer.register_step_pre_hook(record)
    trainer.train_step()
    return gradients


def max_weight_difference(world: World, config: RunConfig, cache: Path) -> float:
    """Trains, and returns how far any two ranks' weights are apart afterwards."""
    trainer = make_trainer(world, config, cache)
    for _ in range(config.train.steps):
        trainer.train_step()
    flat = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    return (world.max(flat) + world.max(-flat)).abs().max().item()


def parameter_dtypes(world: World, config: RunConfig, cache: Path) -> list[str]:
    trainer = make_trainer(world, config, cache)
    trainer.train_step()
    return sorted({str(parameter.dtype) for parameter in trainer.model.parameters()})


def collectives(world: World, config: RunConfig, cache: Path) -> dict[str, int]:
    """Returns how often each collective was called in the second step."""
    trainer = make_trainer(world, config, cache)
    trainer.train_step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trainer.train_step()
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith("c10d::")}


def train_family(world: World, config: RunConfig, cache: Path, model: DecoderConfig) -> dict[str, Any]:
    """Trains a decoder of any family; returns its losses and gradient norms, the gradients of the first step (after
    clipping), and how often an expert ran on no token at all.
    """
    rows, _ = prepare_dataset(config.data, byte_tokenizer(), cache_dir=cache)
    trainer = Trainer(config=config, world=world, architecture=model, rows=rows, heldout=None)
    gradients: dict[str, np.ndarray] = {}
    idle = 0

    def record(*_: object) -> None:
        if not gradients:
            gradients.update(whole_gradients(trainer))

    def count(_module: object, inputs: tuple[torch.Tensor, ...], _output: object) -> None:
        nonlocal idle
        idle += inputs[0].shape[0] == 0

    trainer._optimizer.register_step_pre_hook(record)
    for module in trainer.model.module.modules():
        if isinstance(module, MixtureOfExperts):
            for expert in module.experts:
                expert.register_forward_hook(count)
    steps = [trainer.train_step() for _ in range(config.train.steps)]
    return {
        "loss": [step.loss for step in steps],
        "grad_norm": [step.grad_norm for step in steps],
        "gradients": gradients,
        "idle_experts": int(world.sum(torch.tensor([float(idle)])).item()),
    }


def state_geometry(world: World, config: RunConfig, cache: Path) -> dict[str, tuple[Any, ...]]:
    """Returns (whole shape, offsets, local shape) of each tensor of the optimizer's state that this rank holds."""
    trainer = make_trainer(world, config, cache)
    return {
        name.removeprefix("optimizer."): (shard.shape, shard.offsets, tuple(shard.local.shape))
        for name, shard in trainer.state().items()
        if name.startswith("optimizer.")
    }


def state_dtypes(world: World, config: RunConfig, cache: Path) -> dict[str, str]:
    """Returns the dtype of every tensor of the checkpoint's state on this rank."""
    return {name: str(shard.local.dtype) for name, shard in make_trainer(world, config, cache).state().items()}


def straight_and_resumed(world: World, config: RunConfig, cache: Path, folder: Path) -> tuple[list[float], list[float]]:
    """Returns the losses of a run, and those of one that was saved in the middle and continued by a new trainer."""
    steps = config.train.steps
    straight = make_trainer(world, config, cache)
    expected = [straight.train_step().loss for _ in range(steps)]
    before = make_trainer(world, config, cache)
    actual = [before.train_step().loss for _ in range(steps // 2)]
    dcp.save(dict(before.state()), checkpoint_id=folder / "state", planner=SaveShards())
    after = make_trainer(world, config, cache)
    dcp.load(dict(after.state()), checkpoint_id=folder / "state", planner=LoadShards())
    after.step = before.step
    return expected, actual + [after.train_step().loss for _ in range(steps - steps // 2)]


def overflowing_steps(world: World, config: RunConfig, cache: Path) -> dict[str, list[Any]]:
    """Trains fp16 from a loss scale that is far too large, and says what each step did."""
    trainer = make_trainer(world, config, cache)
    trainer.state()["scaler.scale"].local.fill_(2.0**30)
    told: dict[str, list[Any]] = {"skipped": [], "grad_norm": [], "scale": [], "unchanged": []}
    for _ in range(config.train.steps):
        before = [shard.local.clone() for name, shard in trainer.state().items() if name.startswith("model.")]
        step = trainer.train_step()
        after = [shard.local for name, shard in trainer.state().items() if name.startswith("model.")]
        told["skipped"].append(step.num_skipped)
        told["grad_norm"].append(step.grad_norm)
        told["scale"].append(step.loss_scale)
        told["unchanged"].append(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    return told


def saved_here_loaded_there(world: World, first: RunConfig, second: RunConfig, cache: Path, folder: Path) -> float:
    """Trains under one config, loads the state under another, and returns how far the two are apart, at most."""
    before = make_trainer(world, first, cache)
    for _ in range(first.train.steps):
        before.train_step()
    expected = whole_state(world, before)
    dcp.save(dict(before.state()), checkpoint_id=folder, planner=SaveShards())
    after = make_trainer(world, second, cache)
    dcp.load(dict(after.state()), checkpoint_id=folder, planner=LoadShards())
    actual = whole_state(world, after)
    assert expected.keys() == actual.keys()
    return max(float((expected[name] - actual[name]).abs().max()) for name in expected)


def whole_state(world: World, trainer: Trainer) -> dict[str, torch.Tensor]:
    """Returns every tensor of the state, whole, from all ranks' shards."""
    mine = [(name, s.shape, s.offsets, s.local.clone()) for name, s in trainer.state().items()]
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, mine)
    wholes: dict[str, torch.Tensor] = {}
    for name, shape, offsets, local in (entry for entries in everyone for entry in entries):
        whole = wholes.setdefault(name, torch.full(shape, float("nan"), dtype=local.dtype))
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, local.shape, strict=True))] = local
    assert not any(whole.isnan().any() for whole in wholes.values())
    return wholes


def scaled_losses(world: World, config: RunConfig, cache: Path, scale: float) -> dict[str, Any]:
    """Trains fp16 from the given loss scale."""
    trainer = make_trainer(world, config, cache)
    trainer.state()["scaler.scale"].local.fill_(scale)
    steps = [trainer.train_step() for _ in range(config.train.steps)]
    return {"loss": [step.loss for step in steps], "num_skipped": steps[-1].num_skipped}
