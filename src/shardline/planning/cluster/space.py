"""The layouts that a search tries: what an engine has, a model divides into and a number of devices makes.

    for job in jobs(asked): ...
    parse_layout("tp=2,pp=4,zero=1")

ZeRO x tensor x pipeline (with its schedules) x context x expert x micro-batch x recomputation x offload; what is given
is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from shardline.config.errors import InfeasibleError, UsageError, nearest
from shardline.planning.cluster.engines import engine
from shardline.planning.cluster.job import ClusterLayout, Job, Precision, Recompute

if TYPE_CHECKING:
    from shardline.hardware.catalogue import Device
    from shardline.planning.cluster.shape import ModelShape

__all__ = ["RECOMPUTE", "SCHEDULES", "Asked", "jobs", "outside", "parse_layout", "per_node", "why_none"]

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble_v")
_MICRO = (1, 2, 4, 8, 16)
_MOST_TENSOR = 16
_SHORTEST = 2048  # tokens of a row that a context rank is worth its communication for
_AXES = ("data", "tensor", "pipeline", "context")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be trained and on what.

    fixed       fields of `ClusterLayout` that are given
    offload     what is kept in the host's memory; None: nothing, unless nothing fits otherwise
    tokens      that are to be trained on in all; price: of one device's hour
    """

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
    num_micro_batches: int | None = None
    recompute: Recompute | None = None
    offload: frozenset[str] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    tokens: float | None = None
    price: float | None = None


def jobs(asked: Asked, offload: frozenset[str] = frozenset()) -> Iterator[Job]:
    """Yields every layout that is possible, with `offload` where none is asked for."""
    for layout in _layouts(asked):
        for micro in _micro_batches(asked, layout):
            for recompute in (asked.recompute,) if asked.recompute else _recompute(asked):
                job = Job(
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
                    offload=offload if asked.offload is None else asked.offload,
                )
                try:
                    job.check()
                except InfeasibleError:
                    continue
                yield job


def per_node(asked: Asked) -> int:
    """Returns how many of the devices are in one node."""
    if asked.num_nodes:
        return max(1, -(-asked.num_devices // asked.num_nodes))
    return asked.device.devices_per_node


def _recompute(asked: Asked) -> tuple[Recompute, ...]:
    # Where "selective" means attention's scores, fused attention leaves it nothing to do.
    return RECOMPUTE if engine(asked.engine).saves_products else ("none", "full")


def _micro_batches(asked: Asked, layout: ClusterLayout) -> Iterator[int]:
    for micro in (asked.micro_batch,) if asked.micro_batch else _MICRO:
        count, rest = divmod(asked.global_batch, micro * layout.data)
        if rest or count != (asked.num_micro_batches or count):
            continue
        if layout.schedule == "interleaved" and layout.pipeline > 1 and count % layout.pipeline:
            continue  # its groups of micro-batches are as many as there are ranks
        yield micro


def _layouts(asked: Asked) -> Iterator[ClusterLayout]:
    fixed, count = dict(asked.fixed), asked.num_devices
    space, shape = engine(asked.engine).space, asked.shape

    def sizes(axis: str, rest: int, most: int) -> list[int]:
        if axis in fixed:
            return [fixed[axis]] if rest % fixed[axis] == 0 else []
        if axis not in space.axes:
            return [1]
        return [size for size in range(1, min(rest, most) + 1) if rest % size == 0]

    for tensor in sizes("tensor", count, min(per_node(asked), _MOST_TENSOR)):
        if shape.num_heads % tensor:
            continue
        for pipeline in sizes("pipeline", count // tensor, shape.num_layers):
            rest = count // tensor // pipeline
            for context in sizes("context", rest, max(1, asked.sequence_length // _SHORTEST)):
                data = rest // context
                if context & (context - 1) and "context" not in fixed:
                    continue
                if tensor * pipeline * context * data != count or fixed.get("data", data) != data:
                    continue
                for zero in _stages(asked, data * context, pipeline):
                    for expert in _experts(asked, data, tensor):
                        for schedule, virtual in _schedules(asked, pipeline):
                            yield ClusterLayout(
                                data=data,
                                tensor=tensor,
                                pipeline=pipeline,
                                context=context,
                                expert=expert,
                                zero=zero,
                                schedule=schedule,
                                virtual_stages=virtual,
                                sequence_parallel=tensor > 1,
                            )


def _stages(asked: Asked, ranks: int, pipeline: int) -> tuple[int, ...]:
    if "zero" in asked.fixed:
        return (asked.fixed["zero"],)
    space = engine(asked.engine).space
    return (space.piped if pipeline > 1 else space.zero) if ranks > 1 else (0,)


def _experts(asked: Asked, data: int, tensor: int) -> list[int]:
    given, shape = asked.fixed.get("expert"), asked.shape
    if given is not None:
        return [given] if data % given == 0 and shape.num_experts % given == 0 else []
    if "expert" not in engine(asked.engine).space.axes or not shape.num_experts:
        return [1]
    most = max(1, per_node(asked) // tensor)  # within a node: exchanging tokens between nodes costs more than it saves
    return [size for size in range(1, most + 1) if data % size == 0 and shape.num_experts % size == 0]


def _schedules(asked: Asked, pipeline: int) -> Iterator[tuple[Any, int]]:
    given, virtual = asked.fixed.get("schedule"), asked.fixed.get("virtual_stages")
    if pipeline == 1:
        yield "1f1b", 1
        return
    for schedule in (given,) if given else engine(asked.engine).space.schedules:
        if virtual is not None:
            yield schedule, virtual
        elif schedule == "interleaved":
            yield schedule, 2
            yield schedule, 4
        else:
            yield schedule, 2 if schedule == "zero_bubble_v" else 1


def outside(asked: Asked) -> list[str]:
    """Returns what is given that the engine itself does not have: it is calculated all the same."""
    space, fixed = engine(asked.engine).space, asked.fixed
    found = [f"{name} = {fixed[name]}" for name in _AXES[1:] if fixed.get(name, 1) > 1 and name not in space.axes]
    if fixed.get("expert", 1) > 1 and "expert" not in space.axes:
        found.append(f"expert = {fixed['expert']}")
    piped = fixed.get("pipeline", 1) > 1
    if fixed.get("zero", 0) not in (space.piped if piped else space.zero):
        found.append(f"ZeRO-{fixed['zero']}{' with a pipeline' if piped else ''}")
    if piped and fixed.get("schedule", "1f1b") not in space.schedules:
        found.append(f"schedule = {fixed.get('schedule', '1f1b')}")
    if asked.engine == "shardline":
        names = {"precision": ("fp32", "bf16_mixed", "fp16_mixed", "bf16_pure"),
                 "optimizer": ("adamw", "adamw_8bit", "adafactor", "muon")}  # fmt: skip
        found += [f"{name} {getattr(asked, name)}" for name in names if getattr(asked, name) not in names[name]]
        if "activations" in (asked.offload or ()):
            found.append("activations in the host's memory")
    return found


def why_none(asked: Asked) -> str:
    """Returns the equation that leaves no possible layout."""
    fixed, count, shape = asked.fixed, asked.num_devices, asked.shape
    product = 1
    for name in _AXES:
        product *= fixed.get(name, 1)
    given = " x ".join(f"{name} {size}" for name, size in fixed.items() if name in _AXES)
    if product > 1 and (count % product or ("data" in fixed and product != count)):
        return f"{given} = {product}, which does not make {count} devices; choose sizes whose product divides {count}."
    tensor, pipeline = fixed.get("tensor", 1), fixed.get("pipeline", 1)
    stages = pipeline * fixed.get("virtual_stages", 1)
    expert = fixed.get("expert", 1)
    if shape.num_heads % tensor:
        return f"{shape.num_heads} heads are not a multiple of tensor = {tensor}; choose a divisor."
    if stages > shape.num_layers:
        return f"pipeline = {stages} stages are more than the {shape.num_layers} layers; choose fewer."
    if expert > 1 and (not shape.num_experts or shape.num_experts % expert):
        return f"{shape.num_experts} experts are not a multiple of expert = {expert}; choose a divisor."
    if asked.sequence_length % fixed.get("context", 1):
        return f"{asked.sequence_length} tokens a row are not a multiple of context = {fixed['context']}."
    data = fixed.get("data") or count // product
    if expert > 1 and data % expert:
        return f"data = {data} ranks are not a multiple of expert = {expert}; experts are shared out over data ranks."
    micro, passes = asked.micro_batch or 1, asked.num_micro_batches or 1
    if fixed.get("schedule") == "interleaved":
        passes = max(passes, pipeline)
    return (
        f"No layout divides global_batch {asked.global_batch}: micro_batch {micro} x up to {data} data ranks x "
        f"{passes} micro-batches; make it a multiple of {micro * data * passes}."
    )


def parse_layout(text: str) -> dict[str, Any]:
    """Returns the fields of "tp=2,pp=4,zero=1,schedule=interleaved,vpp=2"; raises `UsageError` for others."""
    names = {"tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert", "zero": "zero"}
    names |= {"vpp": "virtual_stages", "schedule": "schedule"}
    known = {**names, **{name: name for name in names.values()}}
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        if key not in known:
            raise UsageError(f"--layout: {key!r} is not an axis; use {', '.join(names)}.")
        if key == "schedule":
            if value not in SCHEDULES:
                raise UsageError(f"--layout: schedule={value!r} is not known{nearest(value, SCHEDULES)}")
            found[key] = value
            continue
        if not value.isdigit() or int(value) > 1_000_000 or (key != "zero" and int(value) < 1):
            raise UsageError(f"--layout: {key}={value!r} must be a whole number of at least {int(key != 'zero')}.")
        found[known[key]] = int(value)
    if found.get("zero", 0) > 3:
        raise UsageError(f"--layout: zero={found['zero']} is not a stage of ZeRO; use 0 to 3.")
    if found.get("virtual_stages", 1) > 1:
        found.setdefault("schedule", "interleaved")
    return found
