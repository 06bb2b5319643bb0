"""How long a training step takes, in closed form, for any engine, device and number of nodes (microseconds).

    time = estimate_time(job)
    time.step_s, time.tokens_per_s_per_device, time.parts["bubble"], time.mfu

A micro-batch on one pipeline rank is its matrix products at the rate that such shapes reach, fused attention, the
memory traffic of everything else, and what is sent and can't be hidden. A step is all micro-batches on the slowest
rank, the pipeline's bubble, what the data ranks send beyond what hides behind the backward pass, and the optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardline.planning.cluster.engines import Engine, engine
from shardline.planning.cluster.job import Job, Time
from shardline.planning.cluster.memory import has_head, stage_layers, stage_parameters
from shardline.planning.cluster.products import layer_efficiency, product_efficiency
from shardline.planning.moments import bubble

if TYPE_CHECKING:
    from shardline.planning.cluster.shape import ModelShape

__all__ = ["collective_rate", "estimate_time"]

_MESSAGE_S = 12e-6  # an all-reduce of little, within a node
_MOST = 0.95  # of the measured product rate: nobody does better in hours of training
_BANDWIDTH = 0.82  # of the data sheet's, reached by streaming kernels
_PEAK_OF = {
    "fp32": "fp32", "fp16_mixed": "fp16", "bf16_mixed": "bf16", "fp16_pure": "fp16", "bf16_pure": "bf16",
    "fp8_mixed": "fp8", "fp4_mixed": "fp4",
}  # fmt: skip


def estimate_time(job: Job) -> Time:
    """Returns one step's time by part, tokens/s of one device, and the utilisation of the data sheet's peak."""
    kind = engine(job.engine)
    layout, shape = job.layout, job.shape
    p, v, m = layout.pipeline, layout.virtual_stages, job.num_micro_batches
    tokens = max(1, job.micro_batch * job.sequence_length // layout.context)
    layer = _layer(job, kind, tokens)
    head = _head(job, kind, tokens)
    mean = shape.num_layers / p
    most = stage_layers(shape, layout, 0)
    ends = stage_layers(shape, layout, 0 if has_head(layout, 0) else p - 1)
    slowest = max(most, ends + head / max(1e-12, sum(layer.values())))
    parts = {
        "compute": m * (layer["products"] + layer["traffic"]) * slowest,
        "attention": m * layer["attention"] * slowest,
        "recompute": m * layer["recompute"] * slowest,
        "tensor": m * layer["tensor"] * slowest,
        "context": m * layer["context"] * slowest,
        "host": m * layer["host"] * slowest,
    }
    one = sum(layer.values()) * mean + head / p
    idle = (p - 1) / v
    if layout.schedule == "zero_bubble_v":
        idle = m * bubble("zero_bubble_v", num_ranks=p, num_micro_batches=m, stages_per_rank=2)
    parts["bubble"] = idle * one
    parts["pipeline"] = _pipeline(job, kind, tokens)
    backward = sum(layer.values()) * mean
    parts["data"] = _data(job, kind, backward)
    parts["optimizer"], parts["offload"] = _update(job, kind)
    step_s = sum(parts.values())
    rate = job.tokens / step_s / job.num_devices
    flops = shape.training_flops(job.sequence_length)
    causal = shape.training_flops(job.sequence_length, causal=True)
    dtype = _PEAK_OF[job.precision]
    peak = job.device.nominal(dtype)
    return Time(
        parts=parts,
        tokens_per_s_per_device=rate,
        model_flops_per_token=flops,
        mfu=rate * flops / peak if peak else None,
        mfu_causal=rate * causal / peak if peak else None,
        peak_dtype=dtype,
    )


def collective_rate(job: Job, kind: Engine, *, ranks: int, stride: int) -> float:
    """Returns bytes/s that each of `ranks` ranks, `stride` devices apart, sends in a ring.

    Those that share a node use its links; a ring over several nodes uses the network ports of all its ranks in a node.
    """
    per_node = job.devices_per_node
    within = job.within * kind.link
    if ranks * stride <= per_node:
        return within
    in_node = max(1, per_node // stride)
    return min(within, job.between * in_node * kind.link)


def _layer(job: Job, kind: Engine, tokens: int) -> dict[str, float]:
    """Returns seconds of one layer for one micro-batch, forward and backward, by part."""
    layout, shape, device = job.layout, job.shape, job.device
    t = layout.tensor
    dtype = _PEAK_OF[job.precision]
    hidden, width = shape.hidden_size, shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    inner = _inner(shape)
    efficiency = layer_efficiency(tokens, hidden, width, kv, inner, shape.gated, t, device.units)
    share = min(_MOST, kind.matmul * device.sustained) * efficiency
    if dtype in ("fp8", "fp4"):
        share *= kind.low_precision
    forward = 2 * shape.layer_parameters(active=True) / t * tokens / (device.flops(dtype) * share)
    exchange = extra_traffic = 0.0
    if shape.num_experts:
        forward, exchange, extra_traffic = _experts(job, kind, tokens, forward)
    frozen = bool(job.adapter)
    products = forward * (2 if frozen else 3)
    half = "bf16" if dtype in ("fp8", "fp4") else dtype
    context = shape.mean_context(job.sequence_length)
    attention_flops = 4 * width * context * tokens / t  # forward, causality not taken off
    bandwidth = device.bandwidth * _BANDWIDTH
    traffic_of = kind.traffic_compiled if job.compiled else kind.traffic_eager
    cut = t if layout.sequence_parallel else 1
    # Norms and residuals are on every tensor rank, unless the sequence is cut; what is inside of the two blocks is not.
    inside = 0.3 + 0.3 * inner / hidden / 4 * (1.5 if shape.gated else 1.0)
    traffic = (traffic_of * hidden * tokens * (0.4 / cut + inside / t) + extra_traffic) / bandwidth
    if job.flash:
        attention_forward = attention_flops / 2 / (device.flops(half) * kind.attention * device.attention)
        attention = 3.5 * attention_forward
    else:
        scores = 32 * shape.num_heads * context * tokens / t / bandwidth
        attention_forward = attention_flops / (device.flops(half) * 0.6) + scores / 3
        attention = 3 * attention_forward
    whole_forward = forward + attention_forward + traffic / 3
    recompute = {
        "full": whole_forward,
        "half": whole_forward / 2,
        "selective": 0.5 * forward + traffic / 3 if kind.saves_products else (0.0 if job.flash else attention_forward),
    }.get(job.recompute, 0.0)
    rows = 2 * hidden * tokens
    tensor = 0.0
    if t > 1:
        rate = collective_rate(job, kind, ranks=t, stride=1)
        passes = 6 if job.recompute == "full" else 4
        one = 2 * (t - 1) / t * rows / rate + _MESSAGE_S
        tensor = passes * one * (1 - (kind.tensor_overlap or (0.5 if layout.async_tensor else 0.0)))
    tensor += exchange
    ring = 0.0
    if layout.context > 1:
        rate = collective_rate(job, kind, ranks=layout.context, stride=t)
        blocks = 2 * 2 * kv / t * tokens * (layout.context - 1)
        sends = 3 * blocks / rate
        ring = max(0.0, sends - 0.7 * attention)
    if job.adapter == "qlora":
        unpacked = shape.layer_parameters() / t * 2.6 * (3 if job.recompute == "full" else 2)
        traffic += unpacked / bandwidth
    if job.num_micro_batches > 1 and not job.adapter:
        traffic += kind.accumulate * shape.layer_parameters() / t / layout.expert / bandwidth
    busy = products + attention + traffic + recompute
    passes = 1.4 if job.recompute == "full" else 1.0
    host = max(0.0, kind.host_s * passes * (0.6 if job.compiled else 1.0) - busy)
    return {
        "products": products,
        "traffic": traffic,
        "attention": attention,
        "recompute": recompute,
        "tensor": tensor,
        "context": ring,
        "host": host,
    }


def _experts(job: Job, kind: Engine, tokens: int, forward: float) -> tuple[float, float, float]:
    """Returns (seconds of a layer's products forward, seconds of exchanging tokens, bytes of sorting them)."""
    layout, shape, device = job.layout, job.shape, job.device
    hidden, inner = shape.hidden_size, shape.expert_size or shape.ffn_size
    routed = shape.experts_per_token * shape.expert_parameters / shape.layer_parameters(active=True)
    rows = max(1, tokens * shape.experts_per_token * layout.expert // shape.num_experts)
    width = max(1, inner // layout.tensor)
    whole = product_efficiency(tokens, hidden, hidden, device.units)
    one = product_efficiency(max(rows, 64), width, hidden, device.units) * rows / max(rows, 64)
    slower = max(1.0, whole / one)
    copies = 2.0 * shape.experts_per_token * hidden * tokens
    exchange = 0.0
    if layout.expert > 1:
        rate = collective_rate(job, kind, ranks=layout.expert, stride=layout.tensor)
        share = (layout.expert - 1) / layout.expert
        exchange = 4 * (copies * share / rate + 2 * _MESSAGE_S)
    return forward * (1 - routed + routed * slower), exchange, 24 * copies


def _inner(shape: ModelShape) -> int:
    if not shape.num_experts:
        return shape.ffn_size
    return (shape.expert_size or shape.ffn_size) * shape.experts_per_token + shape.shared_size


def _head(job: Job, kind: Engine, tokens: int) -> float:
    """Returns seconds of the head's product and the loss, for one micro-batch."""
    shape, device, t = job.shape, job.device, job.layout.tensor
    dtype = _PEAK_OF[job.precision]
    half = "bf16" if dtype in ("fp8", "fp4") else dtype
    rows = max(1, shape.vocab_size // t)
    share = min(_MOST, kind.matmul * device.sustained) * product_efficiency(
        tokens, rows // 64 * 64 or 64, shape.hidden_size, device.units
    )
    product = 6 * shape.head_parameters / t * tokens / (device.flops(half) * share)
    traffic = 2.5 * kind.logits * tokens * rows / (device.bandwidth * _BANDWIDTH)
    return product + traffic


def _pipeline(job: Job, kind: Engine, tokens: int) -> float:
    """Returns seconds a step of sending rows between pipeline ranks."""
    layout = job.layout
    if layout.pipeline == 1:
        return 0.0
    stride = layout.tensor * layout.context * layout.data
    rate = job.within if stride * 2 <= job.devices_per_node else job.between
    # Both Megatron and DeepSpeed send a part from each tensor rank, and gather it on the other side.
    rows = 2 * job.shape.hidden_size * tokens / layout.tensor
    one = rows / (rate * kind.link) + _MESSAGE_S
    return 2 * job.num_micro_batches * layout.virtual_stages * one * (0.3 if layout.virtual_stages > 1 else 1.0)


def _data(job: Job, kind: Engine, busy: float) -> float:
    """Returns seconds a step in which data ranks wait for each other's parameters or gradients.

    `busy` is the compute of a micro-batch on one rank, behind which most of it hides.
    """
    layout = job.layout
    ranks = layout.data * layout.context
    if ranks == 1:
        return 0.0
    layers, ends = stage_parameters(job.shape, layout, 0)
    elements = layers + ends
    m = job.num_micro_batches
    shard = layout.shard or ranks
    rate = collective_rate(job, kind, ranks=shard, stride=layout.tensor)
    ring = (shard - 1) / shard
    weight = 0.53 if job.adapter == "qlora" else 2.0
    if layout.zero < 3:
        trained = elements if not job.adapter else (job.adapter_parameters or 0.0)
        size = kind.reduce_bytes + (2.0 if layout.zero else kind.reduce_bytes)
        sent = size * trained * ring / rate
        return max(0.0, sent - kind.overlap * busy * (0.65 if layout.zero == 0 else 1.0))
    if layout.pipeline > 1 and kind.kept_weights:
        sent = (weight + kind.reduce_bytes) * elements * ring / rate
        return max(0.0, sent - kind.overlap * busy)
    reduce = 0.0 if job.adapter else kind.reduce_bytes
    one = (2 * weight + reduce) * elements * ring / rate
    if shard < ranks:
        copies = ranks // shard
        between = job.between * kind.link
        one += 2 * kind.reduce_bytes * elements / shard * (copies - 1) / copies / between / m
    unhidden = one / max(1, job.shape.num_layers)  # the first layer's weights wait for nobody's compute
    return m * (max(0.0, one - kind.overlap * busy) + unhidden)


def _update(job: Job, kind: Engine) -> tuple[float, float]:
    """Returns (seconds of the optimizer, seconds of traffic between host and device), a step."""
    layout = job.layout
    layers, ends = stage_parameters(job.shape, layout, 0)
    elements = layers + ends
    ranks = layout.data * layout.context
    trained = (job.adapter_parameters or 0.0) if job.adapter else elements
    trained /= ranks if layout.zero >= 1 else 1
    bandwidth = job.device.bandwidth * _BANDWIDTH
    copy = job.device.host_copy
    offload = 0.0
    if "optimizer" in job.offload:
        # Gradients go down, new weights come up; Adam reads and writes 28 bytes an element in the host's memory.
        per_node = min(job.num_devices, job.devices_per_node)
        offload += trained * 6 / copy + trained * 28 * per_node / 150e9
        optimizer = 0.0
    else:
        optimizer = trained * 30 / bandwidth
    if "parameters" in job.offload:
        size = 0.53 if job.adapter == "qlora" else 2.0
        offload += 2 * job.num_micro_batches * elements / ranks * size / copy
    if "activations" in job.offload:
        rows = 2 * job.shape.hidden_size * job.micro_batch * job.sequence_length / layout.context
        offload += 0.3 * job.num_micro_batches * 2 * rows * job.shape.num_layers / layout.pipeline / copy
    return optimizer, offload
