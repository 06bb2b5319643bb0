"""What is asked of the planner, and what it answers.

    job = Job(shape=shape, device=device("a100-80gb"), num_devices=8, sequence_length=2048, global_batch=64,
              micro_batch=2, precision="bf16_mixed", engine="megatron", layout=ClusterLayout(data=1, tensor=8))
    estimate_memory(job).expected_bytes, estimate_time(job).tokens_per_s_per_device

A job is one layout of one model on one kind of device, trained by one engine. All sizes are bytes, all times seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from shardline.config.errors import InfeasibleError, UsageError, nearest

if TYPE_CHECKING:
    from shardline.hardware.catalogue import Device
    from shardline.planning.cluster.shape import ModelShape

__all__ = [
    "MEMORY_PARTS",
    "OPTIMIZERS",
    "PRECISIONS",
    "TIME_PARTS",
    "ClusterLayout",
    "Job",
    "Measure",
    "Memory",
    "Precision",
    "Recompute",
    "Schedule",
    "Time",
]

GIB = 1 << 30
Measure = Literal["allocated", "reserved", "device"]

Precision = Literal["fp32", "fp16_mixed", "bf16_mixed", "fp16_pure", "bf16_pure", "fp8_mixed", "fp4_mixed"]
Recompute = Literal["none", "selective", "half", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble_v"]
Optimizer = Literal["adamw", "adamw_8bit", "sgd", "adafactor", "muon", "none"]
OPTIMIZERS = ("adamw", "adamw_8bit", "sgd", "adafactor", "muon", "none")
Adapter = Literal["", "lora", "qlora"]
PRECISIONS: tuple[str, ...] = (
    "fp32", "fp16_mixed", "bf16_mixed", "fp16_pure", "bf16_pure", "fp8_mixed", "fp4_mixed",
)  # fmt: skip

MEMORY_PARTS = (
    "weights", "gradients", "optimizer", "activations", "logits", "communication", "runtime", "fragmentation",
)  # fmt: skip
TIME_PARTS = (
    "compute", "recompute", "attention", "data", "tensor", "pipeline", "context", "bubble", "optimizer", "offload",
    "host",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ClusterLayout:
    """How devices are shared out; data x tensor x pipeline x context of them.

    shard            data ranks that ZeRO shards over (hybrid sharding); None for all of them
    virtual_stages   stages on one pipeline rank (interleaved; 2 for zero_bubble_v)
    expert           of the data ranks, how many share out the experts
    sequence_parallel  the tensor ranks also cut what lies between their products
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    zero: int = 0
    shard: int | None = None
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1
    sequence_parallel: bool = False
    async_tensor: bool = False

    @property
    def num_devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    def text(self) -> str:
        """In short: dp4 tp2 pp2 interleaved x2 zero1."""
        return self.ranks(schedule=self.schedule)

    def ranks(self, schedule: str = "1f1b") -> str:
        """Returns the same, naming a schedule other than 1f1b."""
        parts = {"dp": self.data, "tp": self.tensor, "pp": self.pipeline, "cp": self.context, "ep": self.expert}
        sizes = " ".join(f"{name}{size}" for name, size in parts.items() if size > 1 or name == "dp")
        if self.pipeline > 1 and schedule != "1f1b":
            stages = f" x{self.virtual_stages}" if schedule == "interleaved" else ""
            sizes += f" {schedule}{stages}"
        return f"{sizes} zero{self.zero}" if self.zero else sizes


@dataclass(frozen=True, kw_only=True)
class Job:
    """One layout of one model on one kind of device.

    micro_batch   rows of one pass; of a data rank's global_batch / data rows, so many passes a step
    offload       any of "optimizer", "parameters", "activations": kept in the host's memory
    loss          "chunked" never holds all logits at once
    trainable     parameters that are trained: all (None), or an adapter's
    compiled      kernels are fused by a compiler
    """

    shape: ModelShape
    device: Device
    num_devices: int
    sequence_length: int
    global_batch: int
    micro_batch: int
    layout: ClusterLayout = ClusterLayout()
    precision: Precision = "bf16_mixed"
    optimizer: Optimizer = "adamw"
    engine: str = "shardline"
    recompute: Recompute = "none"
    offload: frozenset[str] = frozenset()
    loss: Literal["whole", "chunked"] = "whole"
    flash: bool = True
    compiled: bool = False
    adapter: Adapter = ""
    adapter_parameters: float | None = None
    adapter_products: Literal["qv", "all"] = "qv"
    fused_backward: bool = False  # each gradient is applied as soon as it is there
    num_nodes: int | None = None
    link_within: float | None = None  # bytes/s to another device of the node, where it isn't the catalogue's
    link_between: float | None = None  # bytes/s of one device to another node, where it isn't the catalogue's

    def __post_init__(self) -> None:
        for name in ("num_devices", "sequence_length", "global_batch", "micro_batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} = {value!r} must be a whole number of at least 1.")
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision {self.precision!r} is not known{nearest(self.precision, PRECISIONS)}")
        unknown = sorted(self.offload - {"optimizer", "parameters", "activations"})
        if unknown:
            choices = "optimizer, parameters, activations, or none"
            raise UsageError(f"offload {unknown[0]!r} is not known; choose of {choices}.")

    def check(self) -> None:
        """Raises `InfeasibleError` with the equation that the layout violates."""
        layout, shape = self.layout, self.shape
        if layout.num_devices != self.num_devices:
            raise InfeasibleError(
                f"data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} "
                f"= {layout.num_devices} devices, but there are {self.num_devices}."
            )
        if shape.num_heads % layout.tensor:
            raise InfeasibleError(f"{shape.num_heads} heads are not a multiple of tensor = {layout.tensor}.")
        if layout.pipeline * layout.virtual_stages > shape.num_layers:
            raise InfeasibleError(
                f"pipeline {layout.pipeline} x virtual stages {layout.virtual_stages} = "
                f"{layout.pipeline * layout.virtual_stages} stages, but there are {shape.num_layers} layers."
            )
        rows = self.micro_batch * layout.data
        if self.global_batch % rows:
            raise InfeasibleError(
                f"global_batch {self.global_batch} is not a multiple of micro_batch {self.micro_batch} x data "
                f"{layout.data} = {rows}."
            )
        if self.sequence_length % layout.context:
            raise InfeasibleError(
                f"{self.sequence_length} tokens a row are not a multiple of context {layout.context}."
            )

    @cached_property
    def num_micro_batches(self) -> int:
        return max(1, round(self.global_batch / (self.layout.data * self.micro_batch)))

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.global_batch * self.sequence_length

    @property
    def within(self) -> float:
        """Bytes/s of one device to another of its node."""
        return self.link_within or self.device.link_within

    @property
    def between(self) -> float:
        """Bytes/s of one device to another node."""
        return self.link_between or self.device.link_between

    @property
    def devices_per_node(self) -> int:
        if self.num_nodes:
            return max(1, -(-self.num_devices // self.num_nodes))
        return self.device.devices_per_node


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The fattest rank's peak.

    pipeline_rank   where on the pipeline axis that rank is
    host_bytes      of one node's host, for what is offloaded
    """

    parts: dict[str, float]  # bytes by MEMORY_PARTS
    low_bytes: float
    high_bytes: float
    capacity_bytes: float
    pipeline_rank: int
    host_bytes: float = 0.0
    host_capacity_bytes: float = 0.0

    @property
    def expected_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def needed_bytes(self) -> float:
        """Without half of what the allocator holds unused: it gives that back before it gives up."""
        return self.expected_bytes - 0.5 * self.parts.get("fragmentation", 0.0)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.capacity_bytes and self.host_bytes <= self.host_capacity_bytes

    @property
    def verdict(self) -> str:
        """ "fits", "tight" (the high end of the band does not), or "does not fit"."""
        if not self.fits:
            return "does not fit"
        return "fits" if self.high_bytes <= self.capacity_bytes else "tight"

    def to_json(self) -> dict[str, Any]:
        return {
            "total": self.expected_bytes / GIB,
            "low": self.low_bytes / GIB,
            "high": self.high_bytes / GIB,
            "capacity": self.capacity_bytes / GIB,
            "pipeline_rank": self.pipeline_rank,
            "host": self.host_bytes / GIB,
            "parts": {name: count / GIB for name, count in self.parts.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Time:
    """One step.

    parts        seconds by TIME_PARTS; communication is what is not hidden behind compute
    mfu          model FLOPs (6 N + 12 L h s, causality not taken off, recomputation not counted) over the data sheet's
                 peak of the precision; None where there is no such peak
    mfu_causal   the same with attention halved
    """

    parts: dict[str, float]
    tokens_per_s_per_device: float
    model_flops_per_token: float
    mfu: float | None
    mfu_causal: float | None
    peak_dtype: str
    convention: str = "6 N + 12 L h s, attention not halved, recomputation not counted"

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())

    @property
    def flops_per_device(self) -> float:
        """Model FLOP/s of one device."""
        return self.tokens_per_s_per_device * self.model_flops_per_token

    def to_json(self) -> dict[str, Any]:
        return {
            "step_s": self.step_s,
            "parts_s": dict(self.parts),
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "tflops_per_device": self.flops_per_device / 1e12,
            "mfu": self.mfu,
            "mfu_causal": self.mfu_causal,
            "peak_dtype": self.peak_dtype,
            "mfu_convention": self.convention,
        }
