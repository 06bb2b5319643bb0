"""Every layout of a model on a cluster, the best of those that fit, and why not the obvious others.

    found = search(Asked(shape=shape, device=device("h100"), num_devices=64, sequence_length=8192, global_batch=512))
    found.best                  # a Candidate; None when nothing fits
    found.alternatives          # [(name, Candidate or None, why not)]
    found.changes               # when nothing fits: the cheapest change that would, in words

The space is ZeRO x tensor x pipeline x micro-batch x recomputation; what is given is kept. One fits when the high end
of its band does; where none does, one whose expected memory fits is taken and called tight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from shardline.config.errors import InfeasibleError, UsageError
from shardline.planning.cluster.job import ClusterLayout, Job, Memory, Precision, Recompute, Time
from shardline.planning.cluster.memory import estimate_memory
from shardline.planning.cluster.time import estimate_time

if TYPE_CHECKING:
    from shardline.hardware.catalogue import Device
    from shardline.planning.cluster.shape import ModelShape

__all__ = ["Asked", "Candidate", "Found", "parse_layout", "search"]

GIB = 1 << 30
_MICRO = (1, 2, 4, 8, 16)
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_SAME = 1.01  # layouts whose speed differs by less are alike: the simpler is better
# Stages of ZeRO that an engine has, alone and with a pipeline.
_ZERO = {"megatron": ((0, 1), (0, 1)), "deepspeed": ((0, 1, 2, 3), (0, 1))}
_ZERO_ELSE = ((0, 1, 2, 3), (0, 1, 2, 3))
_COMMUNICATION = ("data", "tensor", "pipeline", "context")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be trained and on what. `fixed` holds fields of `ClusterLayout` that are given; None: any will do."""

    shape: ModelShape
    device: Device
    num_devices: int
    sequence_length: int
    global_batch: int
    num_nodes: int | None = None
    precision: Precision = "bf16_mixed"
    optimizer: str = "adamw"
    engine: str = "shardline"
    micro_batch: int | None = None
    recompute: Recompute | None = None
    offload: frozenset[str] = frozenset()
    fixed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout with what it takes."""

    job: Job
    memory: Memory
    time: Time

    @classmethod
    def of(cls, job: Job) -> Candidate:
        return cls(job=job, memory=estimate_memory(job), time=estimate_time(job))

    @property
    def speed(self) -> float:
        return self.time.tokens_per_s_per_device

    @property
    def effort(self) -> tuple[int, int, int, int]:
        """Simpler layouts have smaller ones."""
        layout = self.job.layout
        axes = sum(size > 1 for size in (layout.tensor, layout.pipeline, layout.context))
        return _RECOMPUTE.index(cast(Any, self.job.recompute)), axes, layout.zero, -self.job.micro_batch

    @property
    def exposed(self) -> float:
        """Share of a step in which devices wait for each other's data."""
        return sum(self.time.parts.get(name, 0.0) for name in _COMMUNICATION) / self.time.step_s


@dataclass(frozen=True, kw_only=True)
class Found:
    """The answer. `ranked` holds what fits, fastest first, or what needs least where nothing does."""

    asked: Asked
    best: Candidate | None
    ranked: list[Candidate]
    alternatives: list[tuple[str, Candidate | None, str]]
    changes: list[str]
    num_tried: int


def search(asked: Asked, *, top: int = 5) -> Found:
    """Returns the best layout and its rivals.

    Raises `InfeasibleError`, with the equation, when what is given leaves no possible layout.
    """
    tried = [Candidate.of(job) for job in _jobs(asked)]
    if not tried:
        raise InfeasibleError(_why_none(asked))
    fitting = [each for each in tried if each.memory.verdict == "fits"] or [each for each in tried if each.memory.fits]
    best = None
    if fitting:
        fastest = max(each.speed for each in fitting)
        best = min((each for each in fitting if each.speed * _SAME >= fastest), key=lambda each: each.effort)
        ranked = sorted(fitting, key=lambda each: (each is not best, -each.speed))
    else:
        ranked = sorted(tried, key=lambda each: each.memory.expected_bytes)
    return Found(
        asked=asked,
        best=best,
        ranked=ranked[:top],
        alternatives=[] if asked.fixed else list(_alternatives(asked, tried, best)),
        changes=[] if best is not None else list(_changes(asked)),
        num_tried=len(tried),
    )


def _jobs(asked: Asked) -> Iterator[Job]:
    for layout in _layouts(asked):
        for micro in (asked.micro_batch,) if asked.micro_batch else _MICRO:
            if asked.global_batch % (micro * layout.data):
                continue
            for recompute in (asked.recompute,) if asked.recompute else _RECOMPUTE:
                job = _job(asked, layout, micro, recompute)
                try:
                    job.check()
                except InfeasibleError:
                    continue
                yield job


def _job(asked: Asked, layout: ClusterLayout, micro: int, recompute: Recompute) -> Job:
    return Job(
        shape=asked.shape,
        device=asked.device,
        num_devices=asked.num_devices,
        num_nodes=asked.num_nodes,
        sequence_length=asked.sequence_length,
        global_batch=asked.global_batch,
        micro_batch=micro,
        layout=layout,
        precision=asked.precision,
        optimizer=cast(Any, asked.optimizer),
        engine=asked.engine,
        recompute=recompute,
        offload=asked.offload,
    )


def _layouts(asked: Asked) -> Iterator[ClusterLayout]:
    fixed, count = dict(asked.fixed), asked.num_devices
    most_tensor = fixed.get("tensor") or min(_per_node(asked), 16)
    context = fixed.get("context", 1)
    alone, piped = _ZERO.get(asked.engine, _ZERO_ELSE)
    for tensor in _sizes(count, most_tensor, fixed.get("tensor")):
        if asked.shape.num_heads % tensor:
            continue
        for pipeline in _sizes(count // tensor, asked.shape.num_layers, fixed.get("pipeline")):
            data = count // (tensor * pipeline * context)
            if data * tensor * pipeline * context != count or fixed.get("data", data) != data:
                continue
            stages = (fixed["zero"],) if "zero" in fixed else piped if pipeline > 1 else alone
            for zero in stages if data > 1 or "zero" in fixed else (0,):
                fields: dict[str, Any] = {"sequence_parallel": tensor > 1, **fixed}
                fields |= {"data": data, "tensor": tensor, "pipeline": pipeline, "zero": zero}
                yield ClusterLayout(**fields)


def _sizes(count: int, most: int, fixed: int | None) -> list[int]:
    if fixed is not None:
        return [fixed] if count % fixed == 0 else []
    return [size for size in range(1, min(count, most) + 1) if count % size == 0]


def _per_node(asked: Asked) -> int:
    if asked.num_nodes:
        return max(1, -(-asked.num_devices // asked.num_nodes))
    return asked.device.devices_per_node


def _why_none(asked: Asked) -> str:
    fixed, count = asked.fixed, asked.num_devices
    product = 1
    for name in ("data", "tensor", "pipeline", "context"):
        product *= fixed.get(name, 1)
    given = " x ".join(
        f"{name} {size}" for name, size in fixed.items() if name in ("data", "tensor", "pipeline", "context")
    )
    if product > 1 and (count % product or ("data" in fixed and product != count)):
        return f"{given} = {product}, which does not make {count} devices; choose sizes whose product divides {count}."
    tensor = fixed.get("tensor", 1)
    if asked.shape.num_heads % tensor:
        return f"{asked.shape.num_heads} heads are not a multiple of tensor = {tensor}; choose a divisor."
    pipeline = fixed.get("pipeline", 1)
    if pipeline > asked.shape.num_layers:
        return f"pipeline = {pipeline} stages are more than the {asked.shape.num_layers} layers; choose fewer."
    data = fixed.get("data") or count // product
    micro = asked.micro_batch or 1
    return (
        f"No layout divides global_batch {asked.global_batch}: with micro_batch {micro} and up to {data} data ranks it "
        f"must be a multiple of micro_batch x data, for example {micro * data}."
    )


def _alternatives(
    asked: Asked, tried: list[Candidate], best: Candidate | None
) -> Iterator[tuple[str, Candidate | None, str]]:
    """Yields (name, its best layout, why not) of what people try first."""

    def only(name: str, wanted: Any) -> tuple[str, Candidate | None, str] | None:
        group = [each for each in tried if wanted(each.job.layout)]
        if not group or (best is not None and any(each is best for each in group)):
            return None
        safe = [each for each in group if each.memory.verdict == "fits"]
        fitting = safe or [each for each in group if each.memory.fits]
        chosen = (
            max(fitting, key=lambda each: each.speed)
            if fitting
            else min(group, key=lambda each: each.memory.expected_bytes)
        )
        return name, chosen, _why_not(chosen, best)

    plain = [
        only("plain data parallelism", lambda x: x.zero == 0 and x.tensor == x.pipeline == 1),
        *(
            only(f"ZeRO-{zero} alone", lambda x, zero=zero: x.zero == zero and x.tensor == x.pipeline == 1)
            for zero in (1, 2, 3)
        ),
        only("tensor parallelism in the node", lambda x: x.tensor == min(_per_node(asked), 8) and x.pipeline == 1),
        only("a pipeline without tensor parallelism", lambda x: x.pipeline > 1 and x.tensor == 1),
    ]
    yield from (each for each in plain if each is not None)
    across = 2 * _per_node(asked)
    if asked.num_devices % across == 0 and asked.shape.num_heads % across == 0:
        jobs = _jobs(dataclasses.replace(asked, fixed={"tensor": across, "pipeline": 1}))
        group = [Candidate.of(job) for job in jobs]
        if group:
            fitting = [each for each in group if each.memory.fits] or group
            chosen = max(fitting, key=lambda each: each.speed)
            yield f"tensor {across}", chosen, f"crosses nodes: {_why_not(chosen, best)}"


def _why_not(each: Candidate, best: Candidate | None) -> str:
    memory = each.memory
    if memory.host_bytes > memory.host_capacity_bytes and memory.needed_bytes <= memory.capacity_bytes:
        return f"{memory.host_bytes / GIB:.0f} GiB of the host's {memory.host_capacity_bytes / GIB:.0f}"
    if not memory.fits:
        return f"{memory.expected_bytes / GIB:.1f} GiB of {memory.capacity_bytes / GIB:.1f}"
    if best is None:
        return "fits"
    text = f"{each.speed / best.speed:.0%} of the speed, {each.exposed:.0%} of a step is exposed communication"
    bubble = each.time.parts.get("bubble", 0.0) / each.time.step_s
    if bubble > 0.05:
        text += f", {bubble:.0%} the pipeline's bubble"
    if memory.verdict == "tight":
        text += f", and {memory.high_bytes / GIB:.1f} GiB at worst of {memory.capacity_bytes / GIB:.1f}"
    return text


def _changes(asked: Asked) -> Iterator[str]:
    """Yields the changes that would make something fit, cheapest first."""

    def works(**changes: Any) -> bool:
        return any(estimate_memory(job).fits for job in _jobs(dataclasses.replace(asked, **changes)))

    if asked.recompute not in (None, "full") and works(recompute="full"):
        yield "recompute activations (--recompute full)"
    if asked.micro_batch not in (None, 1) and works(micro_batch=1):
        yield "micro-batches of one row (--micro-batch 1)"
    for offload in (frozenset({"optimizer"}), frozenset({"optimizer", "parameters"})):
        if not offload <= asked.offload and works(offload=offload):
            names = sorted(offload)
            yield f"keep the {' and '.join(names)} in the host's memory (--offload {','.join(names)})"
            break
    length = asked.sequence_length // 2
    while length >= 128 and not works(sequence_length=length):
        length //= 2
    if length >= 128:
        yield f"rows of {length} tokens (--sequence-length {length})"
    freer = {"recompute": None, "micro_batch": None}
    for also, changes in (("", {}), (", recomputing what has to be", freer)):
        count = _enough(asked, works, changes)
        if count:
            yield f"{count} devices{also}"
            break


def _enough(asked: Asked, works: Any, changes: dict[str, Any]) -> int | None:
    """Returns how many devices suffice, up to 64 times as many."""
    count = 2 * asked.num_devices
    while count <= 64 * asked.num_devices:
        batch = -(-asked.global_batch // count) * count
        nodes = None if asked.num_nodes is None else asked.num_nodes * count // asked.num_devices
        if works(**changes, num_devices=count, global_batch=batch, num_nodes=nodes, fixed={}):
            return count
        count *= 2
    return None


def parse_layout(text: str) -> dict[str, Any]:
    """Returns the fields of "tp=2,pp=4,zero=1"; raises `UsageError` for others."""
    names = {"tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert", "zero": "zero"}
    known = {**names, **{name: name for name in names.values()}}
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        if key not in known:
            raise UsageError(f"--layout: {key!r} is not an axis; use {', '.join(names)}.")
        if not value.isdigit() or int(value) > 1_000_000 or (key != "zero" and int(value) < 1):
            raise UsageError(f"--layout: {key}={value!r} must be a whole number of at least {int(key != 'zero')}.")
        found[known[key]] = int(value)
    if found.get("zero", 0) > 3:
        raise UsageError(f"--layout: zero={found['zero']} is not a stage of ZeRO; use 0 to 3.")
    return found
