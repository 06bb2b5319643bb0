"""Training FLOPs of one token, and the model FLOPs utilisation that follows from a measured peak.

    flops = training_flops_per_token(model, sequence_length=512)
    mfu = utilisation(flops, tokens_per_s=700.0, peak_flops=measure_matmul_flops())

Convention, the same as PaLM's appendix B (arXiv:2204.02311): `6 * N_matmul + 12 * L * N * H * s`. N_matmul are the
weights of matrix products that a token meets: of a mixture its k experts and the router; the head counts once, tied or
not, and the input embedding (a look-up) never does. Attention counts every position of the row: causality is not taken
off, and neither are document boundaries; a sliding window caps s in its layer. Recomputation is not counted (model
FLOPs, not hardware FLOPs).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardline.planning.parameters import count_parameters

if TYPE_CHECKING:
    from shardline.models.config import DecoderConfig

__all__ = ["layer_costs", "matmul_parameters", "training_flops_per_token", "utilisation"]


def matmul_parameters(model: DecoderConfig) -> int:
    """Returns N_matmul: the layers' matrices that a token meets, the head, and the projections of its width."""
    count = count_parameters(model)
    return sum(layer.active_matrices for layer in count.layers) + count.embedding + count.projections


def training_flops_per_token(model: DecoderConfig, *, sequence_length: int) -> float:
    """Returns FLOPs of forward and backward for one token in rows of `sequence_length` tokens."""
    width = model.num_heads * model.head_dim
    attention = sum(12 * width * min(sequence_length, window or sequence_length) for window in model.sliding_windows)
    return float(6 * matmul_parameters(model) + attention)


def layer_costs(model: DecoderConfig, *, sequence_length: int) -> tuple[list[float], float]:
    """Returns (training FLOPs of a token in each layer, in the head): what a pipeline is balanced by."""
    count = count_parameters(model)
    width = model.num_heads * model.head_dim
    costs = [
        6.0 * layer.active_matrices + 12 * width * min(sequence_length, window or sequence_length)
        for layer, window in zip(count.layers, model.sliding_windows, strict=True)
    ]
    return costs, 6.0 * count.embedding


def utilisation(flops_per_token: float, *, tokens_per_s: float, peak_flops: float | None) -> float | None:
    """Returns the share of `peak_flops` (FLOP/s of all devices together) in use; None when the peak is not known."""
    if not peak_flops:
        return None
    return flops_per_token * tokens_per_s / peak_flops
