"""What the optimizer does with each parameter, decided by its name in the whole model: no layout changes it.

    roles = assign_roles(config.optimizer, decoder.config)
    roles["model.layers.0.mlp.up_proj.weight"]      # Role(kind="muon", lr_scale=1.0, weight_decay=0.1, frozen=False)

Matrices are decayed, vectors (norms, biases) are not. Muon takes the hidden matrices, and AdamW what remains, the
embeddings and the head among it (Jordan et al., 2024, kellerjordan.github.io/posts/muon).
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

from shardline.config import OptimizerConfig, UsageError
from shardline.models.config import DecoderConfig
from shardline.models.decoder import Decoder

__all__ = ["Kind", "NamedParameters", "Role", "assign_roles", "freeze"]

Kind = Literal["adamw", "adafactor", "muon", "adamw_8bit"]


class NamedParameters(Protocol):
    """A decoder, or what a rank holds of one."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters under their names in the whole model."""
        ...


@dataclass(frozen=True, kw_only=True)
class Role:
    """How one parameter is stepped. lr_scale: factor on the run's learning rate."""

    kind: Kind
    lr_scale: float
    weight_decay: float
    frozen: bool


def assign_roles(config: OptimizerConfig, model: DecoderConfig) -> dict[str, Role]:
    """Returns the role of every parameter of the whole model, also of those that other pipeline stages hold.

    Raises `UsageError` for a pattern that is the first match of no parameter.
    """
    if config.name == "muon" and config.muon_lr and not config.lr:
        raise UsageError(
            f"optimizer.muon_lr = {config.muon_lr} follows the schedule of optimizer.lr, which is 0; set optimizer.lr "
            "above 0, and scale the rest down with optimizer.groups."
        )
    with torch.device("meta"):
        decoder = Decoder(model)
    outer = {id(module.weight) for module in decoder.modules() if isinstance(module, nn.Embedding)}
    if not model.tie_word_embeddings:
        outer.add(id(decoder.lm_head.weight))
    used: set[str] = set()
    roles: dict[str, Role] = {}
    for name, parameter in decoder.named_parameters():
        kind: Kind = config.name
        if kind == "muon" and (parameter.ndim != 2 or id(parameter) in outer):
            kind = "adamw"
        lr_scale, decay, frozen = 1.0, config.weight_decay if parameter.ndim >= 2 else 0.0, False
        if kind == "muon" and config.muon_lr is not None and config.lr:
            lr_scale = config.muon_lr / config.lr
        group = next((group for group in config.groups if fnmatch.fnmatchcase(name, group.pattern)), None)
        if group is not None:
            used.add(group.pattern)
            lr_scale, frozen = lr_scale * group.lr_scale, group.freeze
            decay = decay if group.weight_decay is None else group.weight_decay
        roles[name] = Role(kind=kind, lr_scale=lr_scale, weight_decay=decay, frozen=frozen)
    for index, group in enumerate(config.groups):
        if group.pattern not in used:
            raise UsageError(f"optimizer.groups.{index}.pattern = {group.pattern!r} {_unmatched(group.pattern, roles)}")
    if all(role.frozen for role in roles.values()):
        raise UsageError("optimizer.groups freezes every parameter, so there is nothing to train; free some.")
    return roles


def freeze(decoder: NamedParameters, roles: dict[str, Role]) -> None:
    """Takes gradients away from the parameters that are frozen; call it before anything wraps the decoder."""
    for name, parameter in decoder.named_parameters():
        if roles[name].frozen:
            parameter.requires_grad_(False)


def _unmatched(pattern: str, names: Iterable[str]) -> str:
    names = list(names)
    taken = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if taken:
        return f"comes too late: an earlier pattern matches {taken[0]} and all others that it would; move it up."
    close = difflib.get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.3) or names[:3]
    return f"matches no parameter of the model; the nearest names are {', '.join(close)}."
