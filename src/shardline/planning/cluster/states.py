"""Bytes of weights, gradients and optimizer state of one rank, and of what is gathered from other ranks for a while.

Adapters (LoRA) leave the base frozen: no gradients or moments of it, nf4 weights with QLoRA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardline.planning.cluster.engines import Engine
    from shardline.planning.cluster.job import Job
    from shardline.planning.cluster.shape import ModelShape

__all__ = ["StateBytes", "adapter_elements", "state_bytes"]

# nf4 with a 32-bit scale for 64 weights; double quantisation saves 0.37 bit (Dettmers et al., 2023, arXiv:2305.14314).
_NF4 = 4.5 / 8
_EIGHT_BIT = 2.06  # two moments of a byte, and a 32-bit scale for 256 of them (Dettmers et al., 2021, arXiv:2110.02861)
_RANK = 8  # of an adapter whose size is not given


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes on the device, and on the host what is offloaded; `gathered` is there only while layers are computed."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    host: float


def adapter_elements(shape: ModelShape, rank: int = _RANK) -> float:
    """Returns the elements of a LoRA adapter of queries and values."""
    width, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return shape.num_layers * rank * (2 * shape.hidden_size + width + kv)


def state_bytes(job: Job, kind: Engine, *, layers: float, ends: float, num_layers: int) -> StateBytes:
    """Returns the bytes of a rank: `layers` elements in its `num_layers` layers, `ends` in embedding and head."""
    layout = job.layout
    ranks = layout.shard or layout.data * layout.context
    elements = layers + ends
    zero = layout.zero

    # Experts are on 1 of layout.expert data ranks already: ZeRO shares them out over so many fewer.
    routed = (1 - job.shape.dense_layers / job.shape.num_layers) * job.shape.num_experts * job.shape.expert_parameters
    twice = num_layers * routed / layout.expert / layout.tensor * (layout.expert - 1)

    def shared(pairs: tuple[tuple[float, int], ...], count: float) -> float:
        more = 0.0 if job.adapter else twice
        return sum(
            size * (count + (more if zero >= stage else 0.0)) / (ranks if zero >= stage else 1) for size, stage in pairs
        )

    states = kind.states_of(job.precision)
    frozen = bool(job.adapter)
    trained = elements
    if frozen:
        full = job.adapter_parameters or adapter_elements(job.shape)
        trained = full * layers / max(1.0, job.shape.num_layers * job.shape.layer_parameters())
    weights = shared(states.weights, trained)
    gradients = shared(states.gradients, trained)
    if job.fused_backward:  # one tensor at a time: the largest is a whole end or a layer
        gradients *= max(ends, layers / max(1, num_layers)) / max(1.0, elements)
    optimizer = _moments(job, shared(states.optimizer, trained), trained / (ranks if zero >= 1 else 1))
    base = base_size = 0.0
    if frozen:
        layer_size = _NF4 if job.adapter == "qlora" else 2.0
        base = (layers * layer_size + ends * 2) / (ranks if zero >= 2 else 1)
        base_size = layer_size
    gathered = 0.0
    if zero >= 2 and ranks > 1:
        size = base_size or (4.0 if job.precision == "fp32" else min(2.0, states.weights[0][0]))
        if zero == 2 and not kind.gradients_persist:
            weights += elements * size  # whole weights stay after the forward pass
        elif zero == 3:
            per_layer = layers / max(1, num_layers) * size
            gathered = kind.prefetch * per_layer + min(ends, job.shape.embedding_parameters / layout.tensor) * 2
            if kind.live_elements:  # DeepSpeed gathers product by product, as many as may be alive
                product = job.shape.hidden_size * job.shape.ffn_size / layout.tensor
                gathered = max(product, min(kind.live_elements, elements)) * size
            if layout.pipeline > 1 and kind.kept_weights:
                gathered = elements * kind.kept_weights
                gradients += elements * kind.kept_gradients if job.num_micro_batches > 1 else 0.0
    host = 0.0
    if "optimizer" in job.offload:
        host, optimizer = host + optimizer, 0.0
        if kind.gradients_persist:  # DeepSpeed sends gradients on as they come
            host, gradients = host + gradients, gradients if zero < 2 else 0.0
    if "parameters" in job.offload:
        host, weights, base = host + weights + base, 0.0, 0.0
        if not kind.live_elements:
            ahead = kind.prefetch_offloaded * layers / max(1, num_layers) * (base_size or 2.0)
            gathered = max(gathered, ahead + ends * 2)
    return StateBytes(weights=weights + base, gradients=gradients, optimizer=optimizer, gathered=gathered, host=host)


def _moments(job: Job, adam: float, elements: float) -> float:
    """Returns the optimizer's bytes of a rank's part, from what AdamW's would be."""
    match job.optimizer:
        case "adamw_8bit":
            moments = 4.0 if job.precision.endswith("_pure") else 8.0
            return max(0.0, adam - moments * elements) + _EIGHT_BIT * elements
        case "sgd" | "muon":
            return adam - (2.0 if job.precision.endswith("_pure") else 4.0) * elements
        case "adafactor":
            return max(0.0, adam - (4.0 if job.precision.endswith("_pure") else 8.0) * elements)
        case "none":
            return 0.0
        case _:
            return adam
