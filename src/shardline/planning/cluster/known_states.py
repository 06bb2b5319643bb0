"""What other tools' estimators say of model states, to compare with: they count no activations, logits or buffers.

zero_paper_bytes(7.5e9, ranks=64, stage=2)                        # 16.6 GB: ZeRO, figure 1
deepspeed_zero3_bytes(2.851e9, 32.9e6, gpus=8, offload_optimizer=True)    # (host, device)
"""

from __future__ import annotations

__all__ = ["deepspeed_zero2_bytes", "deepspeed_zero3_bytes", "zero_paper_bytes"]

_PINNED = 1.5  # what DeepSpeed adds for the host's buffers


def zero_paper_bytes(parameters: float, *, ranks: int, stage: int) -> float:
    """Returns bytes of one rank (Rajbhandari et al., 2019, arXiv:1910.02054): 2 + 2 + 12 an element, each shared out
    from its stage on."""
    weights, gradients, optimizer = 2.0, 2.0, 12.0
    return parameters * (
        weights / (ranks if stage >= 3 else 1)
        + gradients / (ranks if stage >= 2 else 1)
        + optimizer / (ranks if stage >= 1 else 1)
    )


def deepspeed_zero2_bytes(
    parameters: float, *, gpus: int, nodes: int = 1, offload_optimizer: bool = False
) -> tuple[float, float]:
    """Returns (host of a node, device) bytes as DeepSpeed's estimate_zero2_model_states_mem_needs counts them."""
    total = gpus * nodes
    if offload_optimizer:
        return parameters * max(4 * total, 16) * _PINNED, 2 * parameters
    return parameters * 4 * gpus * _PINNED, 2 * parameters + 18 * parameters / total


def deepspeed_zero3_bytes(
    parameters: float,
    largest_layer: float,
    *,
    gpus: int,
    nodes: int = 1,
    offload_parameters: bool = False,
    offload_optimizer: bool = False,
    zero_init: bool = True,
) -> tuple[float, float]:
    """Returns (host of a node, device) bytes as DeepSpeed's estimate_zero3_model_states_mem_needs counts them."""
    total = gpus * nodes
    layer = 4 * largest_layer
    whole = 4 * gpus * parameters
    share = 1 / nodes
    if offload_optimizer and offload_parameters:
        host = 18 * parameters * share
        return (host if zero_init else max(whole, host)) * _PINNED, layer
    if offload_optimizer:
        host = 16 * parameters * share
        return (host if zero_init else max(whole, host)) * _PINNED, layer + 2 * parameters / total
    host = 4 * largest_layer * gpus if zero_init else whole
    return host * _PINNED, layer + 18 * parameters / total
