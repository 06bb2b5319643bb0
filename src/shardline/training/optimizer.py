"""The optimizer of a run, and the learning-rate schedules, as functions of the step alone.

    roles = assign_roles(config.optimizer, decoder.config)         # training.groups
    optimizer = build_optimizer(config, ranks, decoder, roles=roles, mesh=mesh, folder=folder)
    begin_step(optimizer, rate=learning_rate(config.optimizer, step=7, steps=100), step=7)
    optimizer.step()
    state = optimizer_state(optimizer, decoder)                    # NAME.KEY -> Shard

AdamW in fp32 is PyTorch's fused one over each rank's part of the parameters, as ZeRO deals them out. Everything else is
stepped in buckets (`training.bucketed`): optimizers that look at whole matrices, offloaded state, pure bf16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardline.config import OptimizerConfig, RunConfig
from shardline.parallel.data import DataParallel, owned_state
from shardline.parallel.offload import DiskMemory, HostMemory, Memory
from shardline.parallel.shards import Shard
from shardline.parallel.whole import Place, WholeParameters, local_part
from shardline.training.bucketed import BUCKET_ELEMENTS, BucketedOptimizer, LocalSource, Source, WholeSource
from shardline.training.groups import NamedParameters, Role
from shardline.training.kinds import make_library_optimizer
from shardline.training.rounding import StochasticRounding

__all__ = ["begin_step", "build_optimizer", "learning_rate", "optimizer_state"]


def build_optimizer(
    config: RunConfig,
    ranks: DataParallel,
    decoder: NamedParameters,
    *,
    roles: Mapping[str, Role],
    mesh: DeviceMesh | None = None,
    placements: Mapping[str, Place] | None = None,
    folder: Path | None = None,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> Optimizer:
    """Returns the optimizer of this rank's share of the decoder's parameters that are not frozen.

    mesh        the run's grid of ranks; None: one process
    placements  where tensor-parallel parts lie; what is not in it is whole but for ZeRO
    folder      where state goes that is offloaded to disk
    """
    groups = _groups(config, decoder, roles)
    offload = config.parallel.offload
    pure = config.train.precision == "bf16_pure"
    fused = config.optimizer.name == "adamw" and offload.optimizer == "none" and not pure
    whole = not fused and (config.optimizer.name != "adamw" or config.parallel.zero == 1)
    # It takes every rank of the run to make a group, also those whose stage is frozen.
    group = _stage_group(mesh) if whole and mesh is not None else None
    if not groups:
        return torch.optim.AdamW([{"params": [], "lr_scale": 1.0}])
    if fused:
        plain = [{key: value for key, value in group.items() if key not in ("names", "kind")} for group in groups]
        optimizer = config.optimizer
        return ranks.make_optimizer(
            torch.optim.AdamW, plain, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, fused=True
        )
    parameters: dict[str, nn.Parameter] = {
        name: parameter for group in groups for name, parameter in zip(group["names"], group["params"], strict=True)
    }
    placements = placements or {}
    source: Source = LocalSource(parameters, placements)
    if whole:
        moments = {name: 2 if g["kind"] == "adamw" else 1 for g in groups for name in g["names"]}
        source = WholeSource(WholeParameters(parameters.items(), placements=placements, group=group, weights=moments))
    return BucketedOptimizer(
        groups,
        source=source,
        libraries={kind: make_library_optimizer(kind, config.optimizer) for kind in {g["kind"] for g in groups}},
        device=local_part(next(iter(parameters.values())), None).local.device,
        memory=_memory(offload.optimizer, folder),
        fraction=offload.optimizer_fraction,
        rounding=StochasticRounding(seed=config.train.seed) if pure else None,
        bucket_elements=bucket_elements,
    )


def begin_step(optimizer: Optimizer, *, rate: float, step: int) -> None:
    """Sets what changes with the step (0-based): each group's learning rate, and what random bits depend on."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]
    if isinstance(optimizer, BucketedOptimizer):
        optimizer.step_index = step


def optimizer_state(
    optimizer: Optimizer, decoder: NamedParameters, *, placements: Mapping[str, Place] | None = None
) -> dict[str, Shard]:
    """Returns the state that this rank holds as NAME.KEY: live tensors, to save, or to fill before the next step."""
    if isinstance(optimizer, BucketedOptimizer):
        return optimizer.shards()
    names: dict[Tensor, str] = {parameter: name for name, parameter in decoder.named_parameters()}
    state: dict[str, Shard] = {}
    for parameter, values in owned_state(optimizer).items():
        place = (placements or {}).get(names[parameter])
        for key, value in values.items():
            state[f"{names[parameter]}.{key}"] = local_part(value, place if value.ndim else None)
    return state


def _groups(config: RunConfig, decoder: NamedParameters, roles: Mapping[str, Role]) -> list[dict[str, Any]]:
    """Parameters of equal roles together, in the order of the first of each."""
    groups: dict[Role, dict[str, Any]] = {}
    for name, parameter in decoder.named_parameters():
        role = roles[name]
        if role.frozen:
            continue
        options = {"kind": role.kind, "lr_scale": role.lr_scale, "weight_decay": role.weight_decay}
        group = groups.setdefault(role, {"params": [], "names": [], "lr": config.optimizer.lr, **options})
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def _memory(place: str, folder: Path | None) -> Memory | None:
    if place == "none":
        return None
    if place == "cpu":
        return HostMemory()
    assert folder is not None, "disk offload has a folder"
    return DiskMemory(folder)


def _stage_group(mesh: DeviceMesh) -> ProcessGroup | None:
    """The data x tensor ranks of this rank's pipeline stage."""
    stage = mesh["data", "tensor"]
    return None if stage.size() == 1 else cast(ProcessGroup, stage._flatten().get_group())


def learning_rate(config: OptimizerConfig, *, step: int, steps: int) -> float:
    """Returns the rate of step `step` (0-based) of `steps`.

    Warm-up climbs linearly and reaches `lr` at step `warmup_steps - 1`. Then
    cosine    falls to `min_lr_fraction * lr` at the last step (Loshchilov and Hutter, 2017, arXiv:1608.03983)
    wsd       stays, and falls linearly over the last `decay_fraction` of the steps (Hu et al., 2024, arXiv:2404.06395)
    constant  stays
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    floor = config.lr * config.min_lr_fraction
    if config.schedule == "cosine":
        span = max(1, steps - 1 - config.warmup_steps)
        progress = min(1.0, (step - config.warmup_steps) / span)
        return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.schedule == "wsd":
        decay_steps = max(1, round(steps * config.decay_fraction))
        left = (steps - 1 - step) / decay_steps
        return floor + (config.lr - floor) * min(1.0, max(0.0, left))
    return config.lr
