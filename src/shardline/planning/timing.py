"""How long a step takes in a layout, by a model that is made for ranking layouts, and what it sends.

    speed = Speed.of(machine, num_processes=2, precision="fp32")
    Timing(model, run, speed).step(option).total_s

The parts: the slowest pipeline rank's matrix products, what is recomputed, the pipeline's bubble, what tensor ranks,
pipeline neighbours and data ranks send (docs/decisions/0004 for ZeRO), and the optimizer. The speeds are those of a
kind of machine, not measured on this one: differences between layouts mean more than the seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardline.planning.flops import layer_costs
from shardline.planning.moments import bubble
from shardline.planning.parts import hold_part, stage_layers, stages_of
from shardline.planning.rank import is_sharded

if TYPE_CHECKING:
    from shardline.config import RunConfig
    from shardline.hardware.probe import Machine
    from shardline.models.config import DecoderConfig
    from shardline.parallel.grid import Layout
    from shardline.planning.layouts import Option

__all__ = ["Sent", "Speed", "StepTime", "Timing"]

_FP32, _BF16 = 4, 2
# fp32 matrix products of one core, in FLOP/s, by its widest vectors: about half of what clocks and units allow.
_CORE_FLOPS = (("avx512f", 70e9), ("avx2", 45e9), ("neon", 25e9))
_PLAIN_CORE_FLOPS = 10e9
# Of a layer's products: what selective recomputation adds (norms, rotations, activations), on a CPU and on a GPU.
_SELECTIVE_CPU, _SELECTIVE_GPU = 0.08, 0.05
_OPTIMIZER_BYTES = 28  # an element of AdamW: four read, three written, fp32
_HALF_SPEED_TOKENS = {"cpu": 32, "gpu": 512}  # of a micro-batch, at which matrix products run at half their speed


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of one process. `hidden`: the share of data-parallel traffic that can run beside backward."""

    flops_per_s: float
    link_bytes_per_s: float
    latency_s: float
    memory_bytes_per_s: float
    disk_bytes_per_s: float
    half_speed_tokens: int
    selective: float
    hidden: float

    @classmethod
    def of(cls, machine: Machine, *, num_processes: int, precision: str) -> Speed:
        if machine.accelerators:  # an A100's, and NVLink's; other devices shift all layouts alike
            return cls(
                flops_per_s=10e12 if precision == "fp32" else 150e12,
                link_bytes_per_s=100e9,
                latency_s=20e-6,
                memory_bytes_per_s=1e12,
                disk_bytes_per_s=2e9,
                half_speed_tokens=_HALF_SPEED_TOKENS["gpu"],
                selective=_SELECTIVE_GPU,
                hidden=0.8,
            )
        core = next((flops for name, flops in _CORE_FLOPS if name in machine.isa), _PLAIN_CORE_FLOPS)
        cores = machine.num_cores / num_processes  # fewer cores than processes: they take turns
        return cls(
            flops_per_s=core * cores,
            link_bytes_per_s=1e9 * min(1.0, cores),  # gloo through the loopback device; it needs a core too
            latency_s=200e-6 / min(1.0, cores),
            memory_bytes_per_s=min(10e9, 20e9 / num_processes),
            disk_bytes_per_s=500e6 / num_processes,
            half_speed_tokens=_HALF_SPEED_TOKENS["cpu"],
            selective=_SELECTIVE_CPU,
            hidden=0.0,  # sending takes the cores that compute
        )


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that one process sends in a step, and messages that it waits for, by axis."""

    data_bytes: int
    tensor_bytes: int
    pipeline_bytes: int
    data_messages: int
    tensor_messages: int
    pipeline_messages: int

    @property
    def total_bytes(self) -> int:
        return self.data_bytes + self.tensor_bytes + self.pipeline_bytes


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step's parts."""

    compute_s: float
    recompute_s: float
    bubble_s: float
    tensor_s: float
    pipeline_s: float
    data_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        return sum(vars(self).values())

    def parts(self) -> dict[str, float]:
        return dict(vars(self))


class Timing:
    """Times of one model and run in many layouts; what layouts share is worked out once."""

    def __init__(self, model: DecoderConfig, run: RunConfig, speed: Speed) -> None:
        self._model, self._run, self._speed = model, run, speed
        self._costs, self._head_cost = layer_costs(model, sequence_length=run.data.sequence_length)
        self._grids: dict[object, tuple[float, float, int, int]] = {}

    def sent(self, option: Option) -> Sent:
        """Returns what a process sends: ring collectives, each (n - 1) / n of the tensor.

        data      DDP all-reduces gradients once (2 P); ZeroRedundancyOptimizer broadcasts the new parameters besides
                  (P more). FSDP2 reduce-scatters the gradients of every micro-batch (P). ZeRO-2 gathers the parameters
                  (P, in the compute dtype) once a step, ZeRO-3 for every forward and again for every backward. P is
                  what a rank's stages hold.
        tensor    four all-reduces of B T D a layer and micro-batch, one more where all is recomputed
        pipeline  B T D forward and backward over each link
        """
        layout, run = option.layout, self._run
        count = run.train.global_batch // (option.micro_batch * layout.data)
        _, _, elements, depth = self._grid(layout)
        half = run.train.precision != "fp32"
        element = _BF16 if half else _FP32
        stream = option.micro_batch * run.data.sequence_length * self._model.hidden_size * element
        reductions = 4 + (option.recompute != "none")
        tensor_messages = (reductions * depth + 2) * count if layout.tensor > 1 else 0
        pipeline_messages = 2 * layout.virtual_stages * count if layout.pipeline > 1 else 0
        along = layout.tensor if layout.sequence_parallel else 1
        return Sent(
            data_bytes=self._data_bytes(layout, elements, count),
            tensor_bytes=tensor_messages * 2 * stream * (layout.tensor - 1) // layout.tensor,
            pipeline_bytes=pipeline_messages * stream // along,
            data_messages=self._data_messages(layout, depth, count),
            tensor_messages=tensor_messages,
            pipeline_messages=pipeline_messages,
        )

    def step(self, option: Option) -> StepTime:
        layout, run, speed = option.layout, self._run, self._speed
        sent = self.sent(option)
        busy, layers, elements, _ = self._grid(layout)
        tokens = option.micro_batch * run.data.sequence_length
        count = run.train.global_batch // (option.micro_batch * layout.data)
        # Narrow parts and few tokens make small products.
        slow = 1 + speed.half_speed_tokens / tokens
        a_token = slow * tokens * count / speed.flops_per_s / layout.tensor
        compute = busy * a_token
        recompute = {"none": 0.0, "selective": speed.selective, "full": 1 / 3}[option.recompute] * layers * a_token
        tensor = sent.tensor_bytes / speed.link_bytes_per_s + sent.tensor_messages * speed.latency_s
        pipeline = sent.pipeline_bytes / speed.link_bytes_per_s + sent.pipeline_messages * speed.latency_s
        idle = bubble(
            layout.schedule,
            num_ranks=layout.pipeline,
            num_micro_batches=count,
            stages_per_rank=layout.virtual_stages,
        )
        data = sent.data_bytes / speed.link_bytes_per_s + sent.data_messages * speed.latency_s
        return StepTime(
            compute_s=compute,
            recompute_s=recompute,
            bubble_s=idle * (compute + recompute + tensor),
            tensor_s=tensor,
            pipeline_s=pipeline,
            data_s=max(data * (1 - speed.hidden), data - speed.hidden * 2 / 3 * compute),
            optimizer_s=self._optimizer_s(layout, elements),
        )

    def _grid(self, layout: Layout) -> tuple[float, float, int, int]:
        """(FLOPs of a token on the busiest rank before the tensor ranks share them, those of layers alone, elements of
        the rank with most, layers of the busiest).
        """
        key = layout.tensor, layout.pipeline, layout.schedule, layout.virtual_stages
        if key not in self._grids:
            length = self._run.data.sequence_length
            ranges = stage_layers(self._model, num_stages=layout.num_stages, sequence_length=length)
            ranks = []
            for rank in range(layout.pipeline):
                stages = stages_of(layout, rank)
                indices = [index for stage in stages for index in ranges[stage]]
                layers = sum(self._costs[index] for index in indices)
                head = self._head_cost if layout.num_stages - 1 in stages else 0.0
                ranks.append((layers + head, layers, len(indices)))
            busy, layers, depth = max(ranks)
            some = {0, layout.pipeline // 2, layout.pipeline - 1}
            held = (hold_part(self._model, layout, rank=rank, sequence_length=length).total for rank in some)
            self._grids[key] = busy, layers, max(held), depth
        return self._grids[key]

    def _data_bytes(self, layout: Layout, elements: int, count: int) -> int:
        gathers = {0: 0, 1: 0, 2: 1, 3: 2 * count}[layout.zero]
        reductions = {0: 2, 1: 3, 2: count, 3: count}[layout.zero]
        element = _FP32 if self._run.train.precision == "fp32" else _BF16
        total = (gathers * element + reductions * _FP32) * elements
        if layout.zero_group is None:
            return total * (layout.data - 1) // layout.data
        copies = layout.data // layout.zero_group
        shared = 2 * count * _FP32 * elements // layout.zero_group * (copies - 1) // copies
        return total * (layout.zero_group - 1) // layout.zero_group + shared

    def _data_messages(self, layout: Layout, depth: int, count: int) -> int:
        if layout.data == 1:
            return 0
        rounds = {0: 1, 1: 2, 2: 1 + count, 3: 3 * count}[layout.zero]
        return rounds * (depth + 1) if layout.zero >= 2 else rounds * math.ceil(depth / 4)

    def _optimizer_s(self, layout: Layout, elements: int) -> float:
        run, speed = self._run, self._speed
        shards = layout.data if layout.zero else 1
        if layout.zero_group and is_sharded(run, layout):
            shards = layout.zero_group
        if run.optimizer.name != "adamw":  # whole matrices are dealt out
            shards = layout.data * layout.tensor
        stepped = elements / shards
        seconds = _OPTIMIZER_BYTES * stepped / speed.memory_bytes_per_s
        if run.parallel.offload.optimizer == "disk":
            seconds += 16 * run.parallel.offload.optimizer_fraction * stepped / speed.disk_bytes_per_s
        return seconds
