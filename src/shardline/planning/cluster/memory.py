"""The fattest rank's memory in closed form, for any engine, device and number of nodes (microseconds).

    estimate_memory(job).expected_bytes / 2**30
    estimate_memory(job, measure="allocated")     # what torch.cuda.max_memory_allocated() would say

A step has moments of large use, and the peak is the largest of them on the pipeline rank where it is largest:

    loss      all activations in flight and the logits; gradients only where the engine keeps them allocated
    backward  the same without logits, but with what one layer's backward pass (and recomputation) needs
    update    all gradients, and the last layer's backward pass

`measure` is what is counted: "allocated" tensors, "reserved" also what the allocator holds and can't use, "device" also
the driver's context and libraries, which is what must fit.

Activation coefficients are bytes a token and hidden size (Korthikanti et al., 2022, arXiv:2205.05198: 10 + 24/t for a
GPT), extended to gated feed-forwards, grouped keys and what a frozen weight needs not keep.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from shardline.planning.cluster.engines import Engine, engine
from shardline.planning.cluster.job import Job, Measure, Memory
from shardline.planning.cluster.own_memory import own_memory
from shardline.planning.cluster.states import state_bytes

if TYPE_CHECKING:
    from shardline.planning.cluster.job import ClusterLayout
    from shardline.planning.cluster.shape import ModelShape

__all__ = [
    "Measure",
    "activation_bytes",
    "closed_form",
    "estimate_memory",
    "has_head",
    "in_flight",
    "stage_layers",
    "stage_parameters",
]

GIB = 1 << 30
_LOW, _HIGH = 0.88, 1.12


def estimate_memory(job: Job, *, measure: Measure = "device") -> Memory:
    """Returns the peak of the fattest rank with its parts, the band, and the host's memory for what is offloaded.

    Shardline's own trainer is known better than by a closed form with constants: see `own_memory`.
    """
    return own_memory(job, measure) or closed_form(job, measure=measure)


def closed_form(job: Job, *, measure: Measure = "device") -> Memory:
    """Returns the same by the engine's constants alone, in a fifth of the time."""
    kind = engine(job.engine)
    last = job.layout.pipeline - 1
    best, best_rank, most, host = {}, 0, -1.0, 0.0
    for rank in {0, last}:
        moments, rank_host = _moments(job, kind, rank, measure)
        host = max(host, rank_host)
        for parts in moments:
            total = sum(parts.values())
            if total > most:
                best, best_rank, most = parts, rank, total
    per_node = min(job.num_devices, job.devices_per_node)
    return Memory(
        parts=best,
        low_bytes=_LOW * most,
        high_bytes=_HIGH * most,
        capacity_bytes=float(job.device.memory_bytes),
        pipeline_rank=best_rank,
        host_bytes=host * per_node,
        host_capacity_bytes=float(job.device.host_bytes),
    )


def stage_layers(shape: ModelShape, layout: ClusterLayout, rank: int) -> int:
    """Returns how many layers a pipeline rank has: the first ones take what does not divide."""
    base, rest = divmod(shape.num_layers, layout.pipeline)
    return base + (rank < rest)


def stage_parameters(shape: ModelShape, layout: ClusterLayout, rank: int) -> tuple[float, float]:
    """Returns (elements of the layers, elements of embedding and head) that a rank holds, before ZeRO."""
    t = layout.tensor
    norms = shape.norm_parameters
    copies = max(1.0, t / shape.num_kv_heads)  # fewer key heads than tensor ranks: some hold the same ones
    kv = 0 if shape.kv_lora else 2 * shape.hidden_size * shape.num_kv_heads * shape.head_dim
    layer = shape.layer_parameters(experts_share=1 / layout.expert)
    per_layer = norms + (layer - norms + kv * (copies - 1)) / t
    first, last = rank == 0, has_head(layout, rank)
    ends = shape.embedding_parameters / t if first else 0.0
    if last and not (first and shape.tied):
        ends += shape.head_parameters / t
    return stage_layers(shape, layout, rank) * per_layer, ends


def has_head(layout: ClusterLayout, rank: int) -> bool:
    """Whether a pipeline rank holds the head: the last one, or where stages are placed like a V, the first."""
    return rank == (0 if layout.schedule == "zero_bubble_v" else layout.pipeline - 1)


def in_flight(layout: ClusterLayout, rank: int, num_micro_batches: int) -> float:
    """Returns how many micro-batches' activations of all its layers a rank holds at its peak."""
    p, v, m = layout.pipeline, layout.virtual_stages, num_micro_batches
    if p == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return float(m)
    if layout.schedule == "zero_bubble_v":
        return float(min(m, p))  # its limit, on each rank
    if v > 1:
        return min(float(m), ((p - rank - 1) * 2 + (v - 1) * p + 1) / v)  # passes of 1/v of the rank's layers
    return float(min(m, p - rank))


@lru_cache(maxsize=4096)
def activation_bytes(
    shape: ModelShape,
    *,
    sequence_length: int,
    flash: bool = True,
    norm: float = 0.0,
    inner_bytes: float | None = None,
    dropout: bool = False,
    frozen: bool = False,
) -> tuple[float, float]:
    """Returns (bytes a token of one layer that tensor ranks each hold, bytes that they share out)."""
    hidden, width = shape.hidden_size, shape.num_heads * shape.head_dim
    kv = 2 * (width if shape.kv_lora else shape.num_kv_heads * shape.head_dim)
    inputs = 1 if frozen else 2  # a frozen product needs no input for a gradient of its own
    held = hidden * (4 + 2 * inputs + norm + (2 if dropout else 0))
    inner = float(shape.ffn_size)
    if shape.num_experts:
        dense = shape.dense_layers / shape.num_layers
        routed = (shape.expert_size or shape.ffn_size) * shape.experts_per_token + shape.shared_size
        inner = dense * shape.ffn_size + (1 - dense) * routed
        held += 2 * hidden * (shape.experts_per_token - 1) * (1 - dense)  # a token's copies for its experts
    if inner_bytes is None:
        inner_bytes = 8.0 if shape.gated else 4.0
    shared = 2 * (2 * width + kv) + (inner_bytes - (2 if frozen else 0)) * inner
    shared += 4 * shape.num_heads if flash else 5 * shape.num_heads * sequence_length
    return held, shared


def _moments(job: Job, kind: Engine, rank: int, measure: Measure) -> tuple[list[dict[str, float]], float]:
    """Returns (parts of each moment of a rank, its bytes on the host)."""
    layout, shape = job.layout, job.shape
    num_layers = stage_layers(shape, layout, rank)
    layers, ends = stage_parameters(shape, layout, rank)
    state = state_bytes(job, kind, layers=layers, ends=ends, num_layers=num_layers)
    tokens = job.micro_batch * job.sequence_length / layout.context
    saved_layer, extra = _layer(job, kind, tokens)
    flights = in_flight(layout, rank, job.num_micro_batches)
    saved = saved_layer * num_layers * flights
    host = state.host
    if "activations" in job.offload:
        host, saved = host + saved, min(saved, 5 * saved_layer)
    logits = 0.0
    if has_head(layout, rank):
        logits = tokens * shape.vocab_size / layout.tensor * (kind.chunked if job.loss == "chunked" else kind.logits)
    gradients = state.gradients
    persist = gradients if kind.gradients_persist or job.num_micro_batches > 1 else 0.0
    buffers = 0.0
    if job.num_devices > 1:
        buffers = 2 * min(kind.buffer_elements, layers + ends)
        if measure == "device":
            nodes = job.num_devices > job.devices_per_node
            buffers += kind.buffers_gib * GIB * (1.0 if nodes else 0.5)  # rings within a node need fewer channels
    whole = 0.0
    if kind.whole_at_load and layout.zero == 3:
        whole = layers * (0.57 if job.adapter == "qlora" else 2.0) + ends * 2 - state.gathered
    # With a cut sequence the head gathers whole rows, and their gradient is whole too.
    rows = 6 * shape.hidden_size * tokens if logits and layout.sequence_parallel else 0.0
    found = []
    for now, activations, loss in (
        (persist, saved + rows, logits),
        (persist, saved + extra, 0.0),
        (gradients, min(saved, saved_layer) + extra, 0.0),
    ):
        gathered = state.gathered + max(0.0, whole)
        loose = activations + loss + state.gathered
        found.append(
            {
                "weights": state.weights,
                "gradients": now,
                "optimizer": state.optimizer,
                "activations": activations,
                "logits": loss,
                "communication": gathered + buffers,
                "runtime": kind.context_gib * GIB if measure == "device" else 0.0,
                "fragmentation": 0.0 if measure == "allocated" else kind.fragments * loose + kind.unmodelled_gib * GIB,
            }
        )
    return found, host


def _layer(job: Job, kind: Engine, tokens: float) -> tuple[float, float]:
    """Returns (bytes that one layer saves for backward, bytes more while one layer's backward pass runs)."""
    layout, shape = job.layout, job.shape
    t = layout.tensor
    cut = t if layout.sequence_parallel else 1
    hidden = shape.hidden_size
    inner = kind.inner_gated if shape.gated else kind.inner_plain
    if job.precision in ("fp8_mixed", "fp4_mixed"):
        inner -= kind.inner_low
    norm = (kind.norm_compiled if job.compiled else kind.norm_rms) if shape.rms_norm else kind.norm_layer
    held, shared = activation_bytes(
        shape,
        sequence_length=job.sequence_length,
        flash=job.flash or job.recompute == "selective",
        norm=norm,
        inner_bytes=inner,
        dropout=kind.dropout,
        frozen=job.adapter == "lora" and job.adapter_products == "qv",
    )
    if job.precision == "fp32":  # all of it but the norms' fp32 and scores' sums is twice as wide
        held, shared = 2 * held - norm * hidden, 2 * shared
    element = 4 if job.precision == "fp32" else 2
    whole = tokens * (held / cut + shared / t)
    kept = element * hidden * tokens / cut
    rows = element * hidden * tokens if layout.sequence_parallel and t > 1 else 0.0
    backward = (kind.working - 1) * whole + kind.gathers * rows
    if job.recompute == "full":
        return kept, whole + backward
    if job.recompute == "half":
        return (whole + kept) / 2, whole + backward
    if job.recompute == "selective" and kind.saves_products:
        width, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        inner = shape.ffn_size * (shape.experts_per_token or 1)
        return kept + tokens * 2 * (2 * width + kv + inner + hidden) / t, whole + backward
    return whole, backward
