"""The libraries' optimizers, each with its options from the config and the state that it keeps for a parameter.

    optimizer = make_library_optimizer("muon", config)           # without parameters yet
    state = initial_state("muon", parameter)                     # {"momentum_buffer": zeros}

State is made by us before the first step, since a checkpoint may fill it before that; a test holds it against what the
library would have made.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardline.config import OptimizerConfig, UsageError
from shardline.parallel.offload import Memory
from shardline.training.groups import Kind

__all__ = ["initial_state", "make_library_optimizer", "require_library"]


def require_library(kind: Kind) -> None:
    """Raises `UsageError` with the line that installs what `kind` needs, where that is missing."""
    if kind == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        raise UsageError(
            "optimizer.name = adamw_8bit uses torchao, which is not installed; run `pip install torchao`, or set "
            "optimizer.name to adamw, adafactor or muon."
        )


def make_library_optimizer(kind: Kind, config: OptimizerConfig) -> Optimizer:
    """Returns the optimizer with one group, which holds a placeholder; the caller sets parameters, rate and decay."""
    placeholder = [nn.Parameter(torch.zeros(1, 1))]
    if kind == "adamw":
        return torch.optim.AdamW(placeholder, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    if kind == "muon":
        return torch.optim.Muon(
            placeholder, lr=config.lr, momentum=config.momentum, adjust_lr_fn=config.adjust_lr_fn, nesterov=True
        )
    if kind == "adafactor":
        return torch.optim.Adafactor(placeholder, lr=config.lr, beta2_decay=config.beta2_decay)
    require_library(kind)
    with warnings.catch_warnings():  # torchao's import says on its own what it could not load and what torch deprecates
        warnings.simplefilter("ignore")
        library = importlib.import_module("torchao.optim")
    return library.AdamW8bit(placeholder, lr=config.lr, betas=config.betas, eps=config.eps)


def initial_state(
    kind: Kind, parameter: Tensor, memory: Memory, *, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Returns the state of a parameter before its first step, in `memory`, with the library's keys and shapes.

    dtype   of what is as large as the parameter; the rest is fp32
    """
    shape = tuple(parameter.shape)
    if kind == "muon":
        return {"momentum_buffer": memory.zeros(shape, dtype=dtype)}
    step = torch.zeros((), dtype=torch.float32)
    if kind == "adafactor":
        if len(shape) < 2:
            return {"step": step, "variance": memory.zeros(shape, dtype=dtype)}
        return {
            "step": step,
            "row_var": memory.zeros((*shape[:-1], 1)),
            "col_var": memory.zeros((*shape[:-2], 1, shape[-1])),
        }
    if kind == "adamw":
        return {
            "step": step.to(parameter.device),  # the fused step reads it where the parameter is
            "exp_avg": memory.zeros(shape, dtype=dtype),
            "exp_avg_sq": memory.zeros(shape, dtype=dtype),
        }
    return {"step": step, **_quantized(parameter)}


def _quantized(parameter: Tensor) -> dict[str, Tensor]:
    """torchao makes its blocks itself, on a step that changes nothing."""
    probe = nn.Parameter(torch.zeros_like(parameter))
    probe.grad = torch.zeros_like(probe)
    optimizer = make_library_optimizer("adamw_8bit", OptimizerConfig(name="adamw_8bit"))
    optimizer.param_groups[0]["params"] = [probe]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    return {key: value for key, value in optimizer.state[probe].items() if key != "step"}
