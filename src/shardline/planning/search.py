"""Which layouts fit on this machine, which one to take, and why not the others.

    plan = make_plan(model, run, num_processes=2, machine=probe())
    plan.chosen          # a Candidate with its reason; None when nothing fits
    plan.configured      # the candidate that the config itself asks for
    plan.require()       # raises InfeasibleError when the configured layout does not fit

Candidates are ZeRO 0 to 3 over the given processes, each with every micro-batch that divides a rank's rows. One
fits when the high end of its prediction is within a process's share of the memory that is available now.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from shardline.config import InfeasibleError, RunConfig
from shardline.parallel.grid import Layout
from shardline.planning.memory import MemoryPrediction, predict
from shardline.planning.parameters import count_parameters

if TYPE_CHECKING:
    from shardline.hardware.probe import Machine
    from shardline.models.config import DecoderConfig

__all__ = ["Candidate", "Plan", "make_plan"]

_FP32 = 4
GIB = 1 << 30
Zero = Literal[0, 1, 2, 3]
_STAGES: tuple[Zero, ...] = (0, 1, 2, 3)
# Memory that differs by less is the same: the lower ZeRO stage is simpler.
_SAME_MEMORY = 1.02


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to lay the run out, what it takes, and a reason: why it is chosen, or why not."""

    layout: Layout
    micro_batch: int
    num_micro_batches: int  # of one step on one rank
    prediction: MemoryPrediction
    sent_bytes: int  # by one process in one step
    fits: bool
    reason: str = ""

    @property
    def zero(self) -> Zero:
        return cast(Zero, self.layout.zero)

    @property
    def name(self) -> str:
        return f"ZeRO-{self.zero}, micro-batch {self.micro_batch}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All candidates, the one chosen and the one that the config asks for."""

    model: DecoderConfig
    run: RunConfig
    machine: Machine
    num_processes: int
    budget_bytes: int  # for one process
    layouts: tuple[Candidate, ...]
    chosen: Candidate | None
    configured: Candidate

    @property
    def num_parameters(self) -> int:
        return count_parameters(self.model).total

    def require(self) -> None:
        """Raises `InfeasibleError`, with the numbers and what to change, unless the configured layout fits."""
        if self.configured.fits:
            return
        needed = self.configured.prediction
        text = (
            f"{self.configured.name} needs {_gib(needed.total_bytes)} (up to {_gib(needed.high_bytes)}) in each of "
            f"{self.num_processes} processes, and {_gib(self.budget_bytes)} is there for each "
            f"({_gib(self.machine.memory_available_bytes)} available / {self.num_processes}). "
        )
        if self.chosen is not None:
            raise InfeasibleError(
                f"{text}This fits: --parallel.zero {self.chosen.zero} --train.micro_batch {self.chosen.micro_batch}."
            )
        raise InfeasibleError(text + "No layout fits. " + " ".join(_fixes(self)))

    def to_json(self) -> dict[str, object]:
        """Returns what RUN/plan.json holds."""
        from shardline.planning.explain import plan_to_json

        return plan_to_json(self)


def make_plan(model: DecoderConfig, run: RunConfig, *, num_processes: int, machine: Machine) -> Plan:
    """Returns the plan of `run` over `num_processes` processes of `machine`.

    Raises `InfeasibleError` when the batch does not divide or the processes are not as many as the layout needs. A
    plan in which nothing fits is returned: `require` raises.
    """
    layout = Layout.resolve(run.parallel, world_size=num_processes)
    rows = layout.accumulation(run.train) * run.train.micro_batch
    budget_bytes = machine.memory_available_bytes // num_processes
    wanted = run.train.micro_batch
    layouts = [
        _candidate(
            model,
            with_layout(run, zero=zero, micro_batch=micro_batch),
            dataclasses.replace(layout, zero=zero),
            budget_bytes,
        )
        for micro_batch in _divisors(rows)
        for zero in _STAGES
    ]
    chosen = _choose(layouts, wanted)
    explained = tuple(
        dataclasses.replace(layout, reason=_reason(layout, chosen, layouts, budget_bytes)) for layout in layouts
    )
    return Plan(
        model=model,
        run=run,
        machine=machine,
        num_processes=num_processes,
        budget_bytes=budget_bytes,
        layouts=explained,
        chosen=None if chosen is None else explained[layouts.index(chosen)],
        configured=next(x for x in explained if (x.zero, x.micro_batch) == (run.parallel.zero, wanted)),
    )


def _candidate(model: DecoderConfig, run: RunConfig, layout: Layout, budget_bytes: int) -> Candidate:
    prediction = predict(model, run, data_ranks=layout.data, zero=layout.zero)
    num_micro_batches = layout.accumulation(run.train)
    return Candidate(
        layout=layout,
        micro_batch=run.train.micro_batch,
        num_micro_batches=num_micro_batches,
        prediction=prediction,
        sent_bytes=sent_bytes(model, run, layout, num_micro_batches=num_micro_batches),
        fits=prediction.high_bytes <= budget_bytes,
    )


def with_layout(run: RunConfig, *, zero: Zero, micro_batch: int) -> RunConfig:
    """Returns `run` with another ZeRO stage and micro-batch."""
    return dataclasses.replace(
        run,
        train=dataclasses.replace(run.train, micro_batch=micro_batch),
        parallel=dataclasses.replace(run.parallel, zero=zero),
    )


def sent_bytes(model: DecoderConfig, run: RunConfig, layout: Layout, *, num_micro_batches: int) -> int:
    """Returns the bytes that one process sends in one step, by ring collectives, each (n - 1) / n of the tensor.

    DDP all-reduces gradients once (2 P). ZeroRedundancyOptimizer broadcasts the new parameters besides (P more).
    FSDP2 reduce-scatters the gradients of every micro-batch (P). ZeRO-2 gathers the parameters (P, in the compute
    dtype) once a step, ZeRO-3 for every forward and again for every backward.
    """
    gathers = {0: 0, 1: 0, 2: 1, 3: 2 * num_micro_batches}[layout.zero]
    reductions = {0: 2, 1: 3, 2: num_micro_batches, 3: num_micro_batches}[layout.zero]
    gathered_bytes = _FP32 if run.train.precision == "fp32" else _FP32 // 2
    total = (gathers * gathered_bytes + reductions * _FP32) * count_parameters(model).total
    return total * (layout.data - 1) // layout.data


def _choose(layouts: list[Candidate], wanted: int) -> Candidate | None:
    """The wanted micro-batch or the next smaller one that fits; then least sent, then clearly least memory."""
    fitting = [layout for layout in layouts if layout.fits and layout.micro_batch <= wanted]
    if not fitting:
        return None
    largest = max(layout.micro_batch for layout in fitting)
    rivals = [layout for layout in fitting if layout.micro_batch == largest]
    rivals = [layout for layout in rivals if layout.sent_bytes == min(rival.sent_bytes for rival in rivals)]
    least = min(layout.prediction.total_bytes for layout in rivals)
    return next(layout for layout in rivals if layout.prediction.total_bytes <= _SAME_MEMORY * least)


def _reason(layout: Candidate, chosen: Candidate | None, layouts: list[Candidate], budget_bytes: int) -> str:
    total, high = layout.prediction.total_bytes, layout.prediction.high_bytes
    if not layout.fits:
        if total <= budget_bytes:
            return f"too close: {_gib(total)} expected, up to {_gib(high)}, of {_gib(budget_bytes)} per process"
        return f"does not fit: {_gib(total)} of {_gib(budget_bytes)} per process"
    assert chosen is not None or layout.micro_batch > 1, "a layout that fits with micro-batch 1 could be chosen"
    if chosen is None or layout.micro_batch > chosen.micro_batch:
        return "fits, with a larger micro-batch than the config asks for"
    if layout is chosen:
        return _why_chosen(layout, layouts, budget_bytes)
    if layout.micro_batch < chosen.micro_batch:
        return f"fits, but micro-batch {chosen.micro_batch} does too and keeps matrix products larger"
    if layout.sent_bytes > chosen.sent_bytes:
        more = layout.sent_bytes / chosen.sent_bytes
        return f"fits, but sends {more:.2g} times as much ({_gib(layout.sent_bytes)} a step)"
    spare = total - chosen.prediction.total_bytes
    if total > _SAME_MEMORY * chosen.prediction.total_bytes:
        return f"fits and sends as much, but takes {_gib(spare)} more per process"
    return f"fits, and is no better here than {chosen.name}"


def _why_chosen(chosen: Candidate, layouts: list[Candidate], budget_bytes: int) -> str:
    total = chosen.prediction.total_bytes
    fit = f"fits ({_gib(total)} of {_gib(budget_bytes)} per process)"
    if chosen.layout.data == 1:
        return f"{fit}; one process has nothing to share"
    rivals = [x for x in layouts if x.fits and x.micro_batch == chosen.micro_batch and x is not chosen]
    if not rivals:
        return f"{fit}; it is the only one with micro-batch {chosen.micro_batch} that does"
    if any(x.sent_bytes == chosen.sent_bytes for x in rivals):
        return f"{fit}; none sends less, and none that sends as little takes clearly less memory"
    return f"{fit} and sends the least ({_gib(chosen.sent_bytes)} a step)"


def _fixes(plan: Plan) -> list[str]:
    """Concrete changes, the cheapest first, each with its number; at least three."""
    run, model = plan.run, plan.model
    least = min(plan.layouts, key=lambda layout: layout.prediction.high_bytes)
    fixes = []
    length = run.data.sequence_length
    while length > 64:
        length //= 2
        shorter = dataclasses.replace(run, data=dataclasses.replace(run.data, sequence_length=length))
        shorter = with_layout(shorter, zero=least.zero, micro_batch=1)
        if predict(model, shorter, data_ranks=plan.num_processes).high_bytes <= plan.budget_bytes:
            fixes.append(
                f"--data.sequence_length {length} --train.micro_batch 1 --parallel.zero {least.zero} would fit."
            )
            break
    for processes in range(plan.num_processes - 1, 0, -1):
        if run.train.global_batch % processes:
            continue
        alone = with_layout(run, zero=least.zero, micro_batch=1)
        if predict(model, alone, data_ranks=processes).high_bytes * processes <= plan.machine.memory_available_bytes:
            fixes.append(f"--nproc {processes} --train.micro_batch 1 --parallel.zero {least.zero} would fit.")
            break
    smaller = _largest_preset(plan, with_layout(run, zero=least.zero, micro_batch=least.micro_batch))
    if smaller:
        fixes.append(f"--model.preset {smaller} --parallel.zero {least.zero} would fit.")
    short = dataclasses.replace(run, data=dataclasses.replace(run.data, sequence_length=128))
    smallest = _largest_preset(plan, with_layout(short, zero=least.zero, micro_batch=1))
    if smallest and smallest != smaller:
        fixes.append(f"--model.preset {smallest} --data.sequence_length 128 --train.micro_batch 1 would fit too.")
    fixes += _more_machines(plan)
    alone = predict(model, with_layout(short, zero=0, micro_batch=1), data_ranks=1).high_bytes
    fixes.append(
        f"The least that this model trains in is {_gib(alone)}: --nproc 1 --data.sequence_length 128 "
        "--train.micro_batch 1."
    )
    needed = least.prediction.high_bytes * plan.num_processes
    fixes.append(f"A machine with {_gib(needed)} available would run {least.name} in {plan.num_processes} processes.")
    return fixes


def _more_machines(plan: Plan) -> list[str]:
    """The fewest machines like this one over which ZeRO-3 fits, with shorter rows where it must be."""
    length = plan.run.data.sequence_length
    while length >= 64:
        data = dataclasses.replace(plan.run.data, sequence_length=length)
        run = with_layout(dataclasses.replace(plan.run, data=data), zero=3, micro_batch=1)
        machines = 2
        while machines <= 1024:
            ranks = machines * plan.num_processes
            if predict(plan.model, run, data_ranks=ranks).high_bytes <= plan.budget_bytes:
                rows = "" if length == plan.run.data.sequence_length else f" and --data.sequence_length {length}"
                return [
                    f"{machines} machines like this one ({ranks} processes) with --parallel.zero 3{rows} would fit."
                ]
            machines *= 2
        length //= 2
    return []


def _largest_preset(plan: Plan, run: RunConfig) -> str | None:
    from shardline.models.presets import preset, preset_names

    models = {name: preset(name) for name in preset_names()}
    fitting = {
        name: count_parameters(model).total
        for name, model in models.items()
        if predict(model, run, data_ranks=plan.num_processes).high_bytes <= plan.budget_bytes
    }
    return max(fitting, key=lambda name: fitting[name]) if fitting else None


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB // 10 else f"{count / (1 << 20):.0f} MiB"
