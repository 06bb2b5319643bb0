"""The optimizer's parameter groups and the learning-rate schedules, as functions of the step alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardline.config import OptimizerConfig
from shardline.parallel.data import DataParallel

__all__ = ["build_optimizer", "learning_rate", "set_learning_rate"]


def build_optimizer(config: OptimizerConfig, ranks: DataParallel, decoder: nn.Module) -> Optimizer:
    """Returns AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101); vectors (norms, biases) are not decayed."""
    parameters = list(decoder.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return ranks.make_optimizer(torch.optim.AdamW, groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


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


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
