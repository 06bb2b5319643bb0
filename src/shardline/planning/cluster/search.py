"""Every layout of a model on a cluster, the best of those that fit, and why not the obvious others.

    found = search(Asked(shape=shape, device=device("h100"), num_devices=64, sequence_length=8192, global_batch=512))
    found.best                  # a Candidate; None when nothing fits
    found.alternatives          # [(name, Candidate or None, why not)]
    found.changes               # when nothing fits: the cheapest change that would, in words

One fits when the high end of its band does; where none does, one whose expected memory fits is taken and called tight.
Where nothing fits on the devices alone, states are kept in the host's memory, as few as will do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from shardline.config.errors import InfeasibleError
from shardline.planning.cluster.engines import engine
from shardline.planning.cluster.job import ClusterLayout, Job, Memory, Time
from shardline.planning.cluster.memory import closed_form, estimate_memory
from shardline.planning.cluster.space import RECOMPUTE, SCHEDULES, Asked, jobs, per_node, why_none
from shardline.planning.cluster.time import estimate_time

__all__ = ["Asked", "Candidate", "Found", "search"]

GIB = 1 << 30
_HOPELESS = 2.0
_LEAST = 12  # that are looked at closely for the one that needs least
_SAME = 1.01  # layouts whose speed differs by less are alike: the simpler is better
_COMMUNICATION = ("data", "tensor", "pipeline", "context")
_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout with what it takes."""

    job: Job
    time: Time

    @classmethod
    def of(cls, job: Job) -> Candidate:
        return cls(job=job, time=estimate_time(job))

    @cached_property
    def memory(self) -> Memory:
        return estimate_memory(self.job)

    @cached_property
    def roughly(self) -> float:
        """Bytes, quickly."""
        return closed_form(self.job).needed_bytes

    @property
    def is_hopeless(self) -> bool:
        """Whether it needs so much that a closer look is not worth its time."""
        return self.roughly > _HOPELESS * self.job.device.memory_bytes

    @property
    def speed(self) -> float:
        return self.time.tokens_per_s_per_device

    @property
    def effort(self) -> tuple[int, ...]:
        """Simpler layouts have smaller ones."""
        layout = self.job.layout
        axes = sum(size > 1 for size in (layout.tensor, layout.pipeline, layout.context, layout.expert))
        order = (SCHEDULES.index(layout.schedule), layout.virtual_stages)
        return RECOMPUTE.index(cast(Any, self.job.recompute)), axes, layout.zero, *order, -self.job.micro_batch

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

    @property
    def days(self) -> float | None:
        """How long the best layout takes for the tokens that were asked for."""
        if self.best is None or self.asked.tokens is None:
            return None
        return self.asked.tokens / (self.best.speed * self.asked.num_devices) / 86400

    @property
    def cost(self) -> float | None:
        """Of those days, in what the price of a device's hour is in."""
        if self.days is None or self.asked.price is None:
            return None
        return self.days * 24 * self.asked.num_devices * self.asked.price


def search(asked: Asked, *, top: int = 5) -> Found:
    """Returns the best layout and its rivals.

    Raises `InfeasibleError`, with the equation, when what is given leaves no possible layout.
    """
    tried = [Candidate.of(job) for job in jobs(asked)]
    if not tried:
        raise InfeasibleError(why_none(asked))
    num_tried, fitting = len(tried), _fitting(tried, top)
    for offload in engine(asked.engine).space.offload if asked.offload is None and not fitting else ():
        offloaded = [Candidate.of(job) for job in jobs(asked, offload)]
        num_tried += len(offloaded)
        fitting = _fitting(offloaded, top)
        if fitting:
            break
    best = None
    if fitting:
        fastest = max(each.speed for each in fitting)
        best = min((each for each in fitting if each.speed * _SAME >= fastest), key=lambda each: each.effort)
        ranked = sorted(fitting, key=lambda each: (each is not best, -each.speed))
    else:
        ranked = _least(tried, top)
    return Found(
        asked=asked,
        best=best,
        ranked=ranked[:top],
        alternatives=[] if asked.fixed else list(_alternatives(asked, tried, best)),
        changes=[] if best is not None else list(_changes(asked)),
        num_tried=num_tried,
    )


def _fitting(tried: list[Candidate], top: int = 1) -> list[Candidate]:
    """Returns the fastest `top` that fit, and all that are as fast as the first of them."""
    safe: list[Candidate] = []
    tight: list[Candidate] = []
    for each in sorted(tried, key=lambda each: -each.speed):
        if len(safe) >= top and each.speed * _SAME < safe[0].speed:
            break
        if not each.is_hopeless and each.memory.fits:
            (safe if each.memory.verdict == "fits" else tight).append(each)
    return safe or tight


def _least(tried: list[Candidate], top: int = 1) -> list[Candidate]:
    """Returns those that need least memory."""
    likely = sorted(tried, key=lambda each: each.roughly)[: max(_LEAST, 2 * top)]
    return sorted(likely, key=lambda each: each.memory.expected_bytes)[:top]


def _thrifty(asked: Asked) -> Asked:
    """What needs least memory of what is open: no need to look at the rest to know whether anything fits."""
    return dataclasses.replace(asked, recompute=asked.recompute or "full", micro_batch=asked.micro_batch or 1)


def _fits(job: Job) -> bool:
    each = Candidate.of(job)
    return not each.is_hopeless and each.memory.fits


def _alternatives(
    asked: Asked, tried: list[Candidate], best: Candidate | None
) -> Iterator[tuple[str, Candidate | None, str]]:
    """Yields (name, its best layout, why not) of what people try first."""
    space = engine(asked.engine).space

    def only(name: str, wanted: Any, more: Any = None) -> Iterator[tuple[str, Candidate | None, str]]:
        group = [each for each in tried if wanted(each)]
        if not group or (best is not None and any(each is best for each in group)):
            return
        fitting = _fitting(group)
        if fitting:
            chosen = max(fitting, key=lambda each: each.speed)
            yield name, chosen, _why_not(chosen, best)
        else:
            chosen = _least(group)[0]
            yield name, chosen, _why_not(chosen, best) + (more() if more else "")

    def alone(layout: ClusterLayout, *axes: str) -> bool:
        sizes = {name: getattr(layout, name) for name in ("tensor", "pipeline", "context", "expert")}
        return all(size == 1 or name in axes for name, size in sizes.items())

    def any_number() -> str:
        return ", on any number of devices"

    def cards(axis: str) -> Any:
        return lambda: _cards(asked, axis)

    yield from only("plain data parallelism", lambda x: x.job.layout.zero == 0 and alone(x.job.layout), any_number)
    for zero in (1, 2, 3):
        yield from only(f"ZeRO-{zero} alone", lambda x, zero=zero: x.job.layout.zero == zero and alone(x.job.layout))
    in_node = min(per_node(asked), 8)
    yield from only(
        "tensor parallelism in the node",
        lambda x: x.job.layout.tensor == in_node and alone(x.job.layout, "tensor"),
        cards("tensor"),
    )
    yield from only(
        "a pipeline without tensor parallelism",
        lambda x: x.job.layout.pipeline > 1 and alone(x.job.layout, "pipeline"),
        cards("pipeline"),
    )
    if best is not None and best.job.recompute != "none":
        yield from only("without recomputation", lambda x: x.job.recompute == "none")
    if best is not None and best.job.layout.schedule != "1f1b":
        yield from only("1F1B", lambda x: x.job.layout.pipeline > 1 and x.job.layout.schedule == "1f1b")
    across = 2 * per_node(asked)
    if asked.num_devices % across == 0 and asked.shape.num_heads % across == 0 and "tensor" in space.axes:
        yield from _given("tensor", across, "crosses nodes: ", asked, best)
    if best is not None and not best.job.offload and asked.offload is None and space.offload:
        plain = dataclasses.replace(asked, fixed={"tensor": 1, "pipeline": 1})
        group = _fitting([Candidate.of(job) for job in jobs(plain, space.offload[0])])
        if group:
            chosen = max(group, key=lambda each: each.speed)
            yield f"the {' and '.join(sorted(space.offload[0]))} in the host's memory", chosen, _why_not(chosen, best)


def _given(axis: str, size: int, text: str, asked: Asked, best: Candidate | None) -> Iterator[Any]:
    group = [Candidate.of(job) for job in jobs(dataclasses.replace(asked, fixed={axis: size, "pipeline": 1}))]
    if group:
        chosen = max(_fitting(group) or group, key=lambda each: each.speed)
        yield f"{axis} {size}", chosen, f"{text}{_why_not(chosen, best)}"


def _cards(asked: Asked, axis: str) -> str:
    """Returns in words how many devices an axis alone would need; the others are not used, ZeRO neither."""
    others = {name: 1 for name in ("tensor", "pipeline", "context", "expert", "data") if name != axis}
    most = asked.shape.num_heads if axis == "tensor" else asked.shape.num_layers
    for size in range(2, most + 1):
        changed = dataclasses.replace(asked, num_devices=size, num_nodes=None, fixed={**others, "zero": 0, axis: size})
        if any(_fits(job) for job in jobs(_thrifty(changed))):
            nodes = f", which crosses nodes of {per_node(asked)}" if axis == "tensor" and size > per_node(asked) else ""
            return f"; alone it takes {size} devices{nodes}"
    return f"; alone it fits on no number of them (up to {axis} = {most})"


def _why_not(each: Candidate, best: Candidate | None) -> str:
    memory = each.memory
    if memory.host_bytes > memory.host_capacity_bytes and memory.needed_bytes <= memory.capacity_bytes:
        return f"{memory.host_bytes / GIB:.0f} GiB of the host's {memory.host_capacity_bytes / GIB:.0f}"
    if not memory.fits:
        return f"{memory.expected_bytes / GIB:.1f} GiB of {memory.capacity_bytes / GIB:.1f}"
    if best is None:
        return "fits"
    text = f"{each.speed / best.speed:.0%} of the speed, {each.exposed:.0%} of a step is exposed communication"
    if each.job.recompute not in ("none", best.job.recompute):
        text += f", with {each.job.recompute} recomputation"
    bubble = each.time.parts.get("bubble", 0.0) / each.time.step_s
    if bubble > 0.05:
        text += f", {bubble:.0%} the pipeline's bubble"
    if memory.verdict == "tight":
        text += f", and {memory.high_bytes / GIB:.1f} GiB at worst of {memory.capacity_bytes / GIB:.1f}"
    return text


def _changes(asked: Asked) -> Iterator[str]:
    """Yields the changes that would make something fit, cheapest first."""

    def works(**changes: Any) -> frozenset[str] | None:
        """What has to be kept in the host's memory for it; None where it does not fit."""
        changed = _thrifty(dataclasses.replace(asked, **changes))
        sets = (_NOTHING, *engine(asked.engine).space.offload) if changed.offload is None else (changed.offload,)
        return next((offload for offload in sets if any(_fits(job) for job in jobs(changed, offload))), None)

    if asked.recompute not in (None, "full") and works(recompute="full") is not None:
        yield "recompute activations (--recompute full)"
    if asked.micro_batch not in (None, 1) and works(micro_batch=1) is not None:
        yield "micro-batches of one row (--micro-batch 1)"
    given = frozenset() if asked.offload is None else asked.offload
    for offload in engine(asked.engine).space.offload if asked.offload is not None else ():
        if not offload <= given and works(offload=offload) is not None:
            names = sorted(offload)
            yield f"keep the {' and '.join(names)} in the host's memory (--offload {','.join(names)})"
            break
    length = asked.sequence_length // 2
    while length >= 128 and works(sequence_length=length) is None:
        length //= 2
    if length >= 128:
        yield f"rows of {length} tokens (--sequence-length {length})"
    freer = {"recompute": None, "micro_batch": None}
    for also, changes in (("", {}), (", recomputing what has to be", freer)):
        found = _enough(asked, works, changes)
        if found:
            count, kept = found
            host = f", with the {' and '.join(sorted(kept))} in the host's memory" if kept and not asked.offload else ""
            yield f"{count} devices{also}{host}"
            break


def _enough(asked: Asked, works: Any, changes: dict[str, Any]) -> tuple[int, frozenset[str]] | None:
    """Returns how many devices suffice, up to 64 times as many, and what is in the host's memory then."""
    count = 2 * asked.num_devices
    while count <= 64 * asked.num_devices:
        batch = -(-asked.global_batch // count) * count
        nodes = None if asked.num_nodes is None else asked.num_nodes * count // asked.num_devices
        kept = works(**changes, num_devices=count, global_batch=batch, num_nodes=nodes, fixed={})
        if kept is not None:
            return count, kept
        count *= 2
    return None
