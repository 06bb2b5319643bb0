"""Activation checkpointing: what backward computes again instead of having kept it.

recompute(decoder.model.layers, "selective")

full        a layer keeps its input only (Chen et al., 2016, arXiv:1604.06174)
selective   matrix products and attention are kept, what is cheap beside them (norms, rotations, activations) is
            computed again (Korthikanti et al., 2022, arXiv:2205.05198, section 5)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

__all__ = ["Recompute", "recompute"]

Recompute = Literal["none", "selective", "full"]

_KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)


def recompute(layers: Iterable[nn.Module], kind: Recompute) -> None:
    """Makes each layer recompute; call it before `compile` and before anything shards the layers."""
    if kind == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # a layer draws no random numbers
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for layer in layers:
        layer.forward = _checkpointed(layer.forward, options)  # type: ignore[method-assign]


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    return lambda *inputs: checkpoint(forward, *inputs, **options)


def _policy(_: object, operation: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
