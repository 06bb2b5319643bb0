"""Memory of Shardline's own trainer on any device: what its tensors take is known to a few percent, see
docs/planning.md, and needs no constants of an engine.

    memory = own_memory(job)         # None for what Shardline does not run; then the engines' closed form is taken

The tensors are those of `planning.memory`; what a process takes beside them on an accelerator (context, libraries, what
the allocator holds unused) is from engines.yaml, as for every engine.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from shardline.config import DataConfig, OffloadConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from shardline.models.config import DecoderConfig
from shardline.parallel.grid import Layout
from shardline.planning.cluster.engines import engine
from shardline.planning.cluster.job import Measure, Memory
from shardline.planning.memory import Predictor

if TYPE_CHECKING:
    from shardline.planning.cluster.job import Job
    from shardline.planning.cluster.shape import ModelShape

__all__ = ["OPTIMIZERS", "PRECISIONS", "is_own", "own_memory"]

GIB = 1 << 30
# The planner's precisions and optimizers in a run config's words.
PRECISIONS: dict[str, Literal["fp32", "bf16", "bf16_pure", "fp16"]] = {
    "fp32": "fp32", "bf16_mixed": "bf16", "fp16_mixed": "fp16", "bf16_pure": "bf16_pure",
}  # fmt: skip
OPTIMIZERS = ("adamw", "adafactor", "muon", "adamw_8bit")
_LOW, _HIGH = 0.9, 1.1


def is_own(job: Job) -> bool:
    """Whether a job is one that Shardline's trainer runs."""
    layout = job.layout
    return (
        job.engine == "shardline"
        and _decoder(job.shape) is not None
        and job.precision in PRECISIONS
        and job.optimizer in OPTIMIZERS
        and job.recompute != "half"
        and layout.context == layout.expert == 1
        and not (job.adapter or job.fused_backward or "activations" in job.offload)
        and not (job.optimizer == "adamw_8bit" and job.offload)
    )


def own_memory(job: Job, measure: Measure = "device") -> Memory | None:
    """Returns the peak of the fattest rank on the device, and the host's memory for what is offloaded."""
    decoder = _decoder(job.shape)
    if decoder is None or not is_own(job):
        return None
    found = _predictor(decoder, _run(job), job.device.kind == "cpu").predict(
        _layout(job),
        micro_batch=job.micro_batch,
        recompute=job.recompute,  # pyrefly: ignore
    )
    kind = engine("shardline")
    parts: dict[str, float] = {name: float(count) for name, count in found.parts().items()}
    host = 0.0
    for name, part in (("optimizer", "optimizer"), ("parameters", "weights")):
        if name in job.offload:
            host, parts[part] = host + parts[part], 0.0
    unused, checkpoint = parts.pop("allocator"), parts.pop("checkpoint")
    if job.device.kind == "cpu":  # the process and the C library's allocator, as `shardline plan` counts them there
        parts["communication"] += checkpoint
    else:
        unused = kind.fragments * (parts["activations"] + parts["logits"] + parts["communication"])
        parts["runtime"] = kind.context_gib * GIB
    if job.num_devices > 1 and measure == "device" and job.device.kind != "cpu":
        parts["communication"] += kind.buffers_gib * GIB * (1.0 if job.num_devices > job.devices_per_node else 0.5)
    if measure != "device":
        parts["runtime"] = 0.0
    parts["fragmentation"] = 0.0 if measure == "allocated" else unused
    total = sum(parts.values())
    return Memory(
        parts=parts,
        low_bytes=_LOW * total,
        high_bytes=_HIGH * total,
        capacity_bytes=float(job.device.memory_bytes),
        pipeline_rank=found.pipeline_rank,
        host_bytes=host * min(job.num_devices, job.devices_per_node),
        host_capacity_bytes=float(job.device.host_bytes),
    )


@lru_cache(maxsize=256)
def _decoder(shape: ModelShape) -> DecoderConfig | None:
    """The model's own config, or for one that is known by its dimensions a decoder that has them."""
    if shape.decoder is not None:
        return shape.decoder
    if shape.kv_lora or shape.shared_size or shape.head_dim % 2:
        return None
    return DecoderConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.learned_positions or 2048,
        position="learned" if shape.learned_positions else "rope",
        norm="rms" if shape.rms_norm else "layer",
        activation="silu" if shape.gated else "gelu",
        gated=shape.gated,
        qkv_bias=shape.biases,
        o_bias=shape.biases,
        mlp_bias=shape.biases,
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        expert_size=shape.expert_size or (shape.ffn_size if shape.num_experts else 0),
        dense_layers=tuple(range(shape.dense_layers)),
        sliding_windows=tuple(window for window, count in shape.windows for _ in range(count)),
        tie_word_embeddings=shape.tied,
    )


def _layout(job: Job) -> Layout:
    layout = job.layout
    named: Any = layout.schedule
    return Layout(
        data=layout.data,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        zero=layout.zero,
        zero_group=layout.shard if layout.shard != layout.data else None,
        sequence_parallel=layout.sequence_parallel,
        schedule=named,
        virtual_stages=layout.virtual_stages,
    )


def _run(job: Job) -> RunConfig:
    """The part of a run's config that its memory depends on, beside the layout."""
    precision = PRECISIONS[job.precision]
    return RunConfig(
        data=DataConfig(sequence_length=job.sequence_length),
        train=TrainConfig(global_batch=job.global_batch, micro_batch=1, precision=precision),
        optimizer=OptimizerConfig(name=job.optimizer),  # pyrefly: ignore
        parallel=ParallelConfig(offload=OffloadConfig(params="cpu" if "parameters" in job.offload else "none")),
    )


@lru_cache(maxsize=64)
def _predictor(decoder: DecoderConfig, run: RunConfig, copies: bool) -> Predictor:
    return Predictor(decoder, run, copies=copies)
