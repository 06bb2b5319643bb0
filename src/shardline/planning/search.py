"""Which layouts fit on this machine, which one to take, and why not the others.

    plan = make_plan(model, run, num_processes=2, machine=probe())
    plan.chosen          # a Layout with its reason; None when nothing fits
    plan.configured      # the layout that the config itself asks for
    plan.require()       # raises InfeasibleError when the configured layout does not fit

Candidates are ZeRO 0 to 3 over the given processes, each with every micro-batch that divides a rank's rows. One
fits when the high end of its prediction is within a process's share of the memory that is available now.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardline.config import InfeasibleError, RunConfig, UsageError
from shardline.planning.memory import MemoryPrediction, predict
from shardline.planning.parameters import count_parameters

if TYPE_CHECKING:
    from shardline.hardware.probe import Machine
    from shardline.models.config import DecoderConfig

__all__ = ["Layout", "Plan", "data_ranks", "make_plan"]

_FP32 = 4
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to lay the run out, what it takes, and a reason: why it is chosen, or why not."""

    data: int
    tensor: int
    pipeline: int
    zero: int
    micro_batch: int
    num_micro_batches: int  # of one step on one rank
    prediction: MemoryPrediction
    sent_bytes: int  # by one process in one step
    fits: bool
    reason: str = ""

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
    layouts: tuple[Layout, ...]
    chosen: Layout | None
    configured: Layout

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

    Raises `UsageError` when the config's batch does not divide, `InfeasibleError` when the processes are not as many
    as the layout needs. A plan in which nothing fits is returned: `require` raises.
    """
    ranks = data_ranks(run, num_processes=num_processes)
    rows = _rows_per_rank(run, ranks)
    budget_bytes = machine.memory_available_bytes // num_processes
    wanted = run.train.micro_batch
    layouts = [
        _layout(model, run, ranks, rows, zero=zero, micro_batch=micro_batch, budget_bytes=budget_bytes)
        for micro_batch in _divisors(rows)
        for zero in (0, 1, 2, 3)
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


def data_ranks(run: RunConfig, *, num_processes: int) -> int:
    """Returns the number of data ranks, or raises `InfeasibleError` with the equation filled in."""
    parallel = run.parallel
    others = parallel.tensor * parallel.pipeline
    if others > 1:
        raise InfeasibleError(
            f"parallel.tensor x parallel.pipeline = {parallel.tensor} x {parallel.pipeline}, and training is laid out "
            f"over data ranks alone; set both to 1 and use parallel.zero to share memory."
        )
    if parallel.data == "auto":
        return num_processes
    if parallel.data != num_processes:
        raise InfeasibleError(
            f"parallel.data x tensor x pipeline = {parallel.data} x {parallel.tensor} x {parallel.pipeline} = "
            f"{parallel.data * others} processes, but there {_are(num_processes)}; start "
            f"{parallel.data * others} (--nproc {parallel.data * others}) or set parallel.data: auto."
        )
    return parallel.data


def _rows_per_rank(run: RunConfig, ranks: int) -> int:
    batch, micro = run.train.global_batch, run.train.micro_batch
    if batch % (ranks * micro):
        fitting = [str(size) for size in _divisors(batch // ranks)] if batch % ranks == 0 else []
        advice = (
            f"set train.micro_batch to {' or '.join(fitting)}"
            if fitting
            else f"set train.global_batch to a multiple of {ranks * micro}, such as {_round_up(batch, ranks * micro)}"
        )
        raise UsageError(
            f"train.global_batch = {batch} is not a multiple of data ranks x train.micro_batch = {ranks} x {micro} = "
            f"{ranks * micro}; {advice}."
        )
    return batch // ranks


def _layout(
    model: DecoderConfig, run: RunConfig, ranks: int, rows: int, *, zero: int, micro_batch: int, budget_bytes: int
) -> Layout:
    candidate = with_layout(run, zero=zero, micro_batch=micro_batch)
    prediction = predict(model, candidate, data_ranks=ranks)
    num_micro_batches = rows // micro_batch
    return Layout(
        data=ranks,
        tensor=1,
        pipeline=1,
        zero=zero,
        micro_batch=micro_batch,
        num_micro_batches=num_micro_batches,
        prediction=prediction,
        sent_bytes=sent_bytes(count_parameters(model).total, ranks, zero=zero, num_micro_batches=num_micro_batches),
        fits=prediction.high_bytes <= budget_bytes,
    )


def with_layout(run: RunConfig, *, zero: int, micro_batch: int) -> RunConfig:
    """Returns `run` with another ZeRO stage and micro-batch."""
    return dataclasses.replace(
        run,
        train=dataclasses.replace(run.train, micro_batch=micro_batch),
        parallel=dataclasses.replace(run.parallel, zero=zero),
    )


def sent_bytes(num_parameters: int, ranks: int, *, zero: int, num_micro_batches: int) -> int:
    """Returns the bytes that one process sends in one step, by ring collectives, each (n - 1) / n of the tensor.

    DDP all-reduces gradients once (2 P). ZeroRedundancyOptimizer broadcasts the new parameters besides (P more).
    FSDP2 gathers parameters and reduce-scatters gradients; ZeRO-3 gathers again for each backward.
    """
    volume = {0: 2, 1: 3, 2: 1 + 1, 3: 2 * num_micro_batches + 1}[zero]
    return volume * _FP32 * num_parameters * (ranks - 1) // ranks


def _choose(layouts: list[Layout], wanted: int) -> Layout | None:
    """The wanted micro-batch or the next smaller one that fits; then least sent, then least memory, then ZeRO stage."""
    fitting = [layout for layout in layouts if layout.fits and layout.micro_batch <= wanted]
    if not fitting:
        return None
    largest = max(layout.micro_batch for layout in fitting)
    return min(
        (layout for layout in fitting if layout.micro_batch == largest),
        key=lambda layout: (layout.sent_bytes, layout.prediction.total_bytes, layout.zero),
    )


def _reason(layout: Layout, chosen: Layout | None, layouts: list[Layout], budget_bytes: int) -> str:
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
    if spare:
        return f"fits and sends as much, but takes {_gib(spare)} more per process"
    return "fits, and with one process it is the same as ZeRO-0"


def _why_chosen(chosen: Layout, layouts: list[Layout], budget_bytes: int) -> str:
    total = chosen.prediction.total_bytes
    fit = f"fits ({_gib(total)} of {_gib(budget_bytes)} per process)"
    if chosen.data == 1:
        return f"{fit}; one process has nothing to share"
    rivals = [x for x in layouts if x.fits and x.micro_batch == chosen.micro_batch and x is not chosen]
    if not rivals:
        return f"{fit}; it is the only one with micro-batch {chosen.micro_batch} that does"
    equal = [x for x in rivals if x.sent_bytes == chosen.sent_bytes]
    if equal:
        return f"{fit}; none sends less, and of those that send as little it takes the least memory"
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
    smaller = _largest_preset(plan, least)
    if smaller:
        fixes.append(f"--model.preset {smaller} would fit.")
    processes = 2 * plan.num_processes
    while processes <= 4096:
        shared = with_layout(run, zero=3, micro_batch=1)
        if predict(model, shared, data_ranks=processes).high_bytes <= plan.budget_bytes:
            machines = processes // plan.num_processes
            fixes.append(f"{machines} machines like this one ({processes} processes, --parallel.zero 3) would fit.")
            break
        processes *= 2
    needed = least.prediction.high_bytes * plan.num_processes
    fixes.append(f"A machine with {_gib(needed)} available would run {least.name} in {plan.num_processes} processes.")
    return fixes


def _largest_preset(plan: Plan, least: Layout) -> str | None:
    from shardline.models.presets import PRESETS, preset

    fitting = {}
    for name in PRESETS:
        run = with_layout(plan.run, zero=least.zero, micro_batch=least.micro_batch)
        model = preset(name)
        if predict(model, run, data_ranks=plan.num_processes).high_bytes <= plan.budget_bytes:
            fitting[name] = count_parameters(model).total
    return max(fitting, key=lambda name: fitting[name]) if fitting else None


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB // 10 else f"{count / (1 << 20):.0f} MiB"
