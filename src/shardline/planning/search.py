"""Which layouts fit on this machine, which one to take, and why not the others.

    plan = make_plan(model, run, num_processes=2, machine=probe())
    plan.chosen          # a Candidate with its reason; None when nothing fits
    plan.configured      # the candidate that the config itself asks for
    plan.require()       # raises InfeasibleError when the configured layout does not fit

Candidates are all ways to share out the processes over data, tensor and pipeline axes, each with ZeRO 0 to 3, every
kind of recomputation and several micro-batches. One fits when the high end of its prediction is within a process's
share of the memory that is available now; of those that fit, the one whose step should be shortest is chosen.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from shardline.config import InfeasibleError
from shardline.planning.layouts import Option, Zero, configured_option, options, require_layout, with_option
from shardline.planning.memory import MemoryPrediction, Predictor
from shardline.planning.parameters import count_parameters
from shardline.planning.timing import Sent, Speed, StepTime, Timing

if TYPE_CHECKING:
    from shardline.config import RunConfig
    from shardline.hardware.probe import Machine
    from shardline.models.config import DecoderConfig
    from shardline.parallel.grid import Layout

__all__ = ["Candidate", "Plan", "make_plan"]

GIB = 1 << 30
# Steps that differ by less take the same time: the simpler layout is better.
_SAME_TIME = 1.02
_RECOMPUTE_ORDER = ("none", "selective", "full")
_WHERE_TIME_GOES = {
    "compute_s": "its busiest rank computes more",
    "recompute_s": "it computes activations again",
    "bubble_s": "pipeline ranks wait for each other",
    "tensor_s": "tensor ranks send {tensor} a step",
    "pipeline_s": "pipeline ranks send {pipeline} a step",
    "data_s": "data ranks send {data} a step",
    "optimizer_s": "each rank steps more of the optimizer",
}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to lay the run out, what it takes, and a reason: why it is chosen, or why not."""

    option: Option
    num_micro_batches: int  # of one step on one data rank
    prediction: MemoryPrediction
    sent: Sent
    step: StepTime
    fits: bool
    reason: str = ""

    @property
    def layout(self) -> Layout:
        return self.option.layout

    @property
    def micro_batch(self) -> int:
        return self.option.micro_batch

    @property
    def zero(self) -> Zero:
        return cast(Zero, self.layout.zero)

    @property
    def sent_bytes(self) -> int:
        """By one process in one step."""
        return self.sent.total_bytes

    @property
    def name(self) -> str:
        layout, again = self.layout, self.option.recompute
        text = f"ZeRO-{self.zero}"
        if layout.tensor > 1 or layout.pipeline > 1 or layout.zero_group:
            text = str(layout)
        return f"{text}, micro-batch {self.micro_batch}" + (f", {again} recomputation" if again != "none" else "")

    @property
    def effort(self) -> tuple[int, int, int, int]:
        """Simpler layouts have smaller ones."""
        axes = (self.layout.tensor > 1) + (self.layout.pipeline > 1)
        return _RECOMPUTE_ORDER.index(self.option.recompute), axes, self.zero, -self.micro_batch


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All candidates, the one chosen and the one that the config asks for."""

    model: DecoderConfig
    run: RunConfig
    machine: Machine
    num_processes: int
    processes_here: int
    budget_bytes: int  # for one process
    layouts: tuple[Candidate, ...]
    chosen: Candidate | None
    configured: Candidate

    @property
    def num_parameters(self) -> int:
        return count_parameters(self.model).total

    @property
    def chosen_config(self) -> RunConfig:
        """The config with the chosen layout, or as it is when nothing fits."""
        return self.run if self.chosen is None else with_option(self.run, self.chosen.option)

    def require(self) -> None:
        """Raises `InfeasibleError`, with the numbers and what to change, unless the configured layout fits."""
        if self.configured.fits:
            return
        from shardline.planning.fixes import fixes, flags

        needed = self.configured.prediction
        text = (
            f"{self.configured.name} needs {_gib(needed.total_bytes)} (up to {_gib(needed.high_bytes)}) in each of "
            f"{self.num_processes} processes, and {_gib(self.budget_bytes)} is there for each "
            f"({_gib(self.machine.memory_available_bytes)} available / {self.processes_here}). "
        )
        if self.chosen is not None:
            raise InfeasibleError(f"{text}This fits: {flags(self.run, self.chosen.option)}.")
        raise InfeasibleError(text + "No layout fits. " + " ".join(fixes(self)))

    def to_json(self) -> dict[str, object]:
        """Returns what RUN/plan.json holds."""
        from shardline.planning.explain import plan_to_json

        return plan_to_json(self)


def make_plan(
    model: DecoderConfig,
    run: RunConfig,
    *,
    num_processes: int,
    machine: Machine,
    processes_here: int | None = None,
) -> Plan:
    """Returns the plan of `run` over `num_processes` processes, `processes_here` of them (all, if not given) on
    `machine`; the other machines are taken to be like it.

    Raises `InfeasibleError`, with the violated equation and the nearest layout that works, when the config's layout is
    impossible. A plan in which nothing fits is returned: `require` raises.
    """
    layout = require_layout(model, run, num_processes=num_processes)
    here = processes_here or num_processes
    search = _Search(model, run, machine, processes=here)
    asked = configured_option(run, layout)
    configured = search.candidate(asked)
    found = [configured]
    for option in options(model, run, num_processes=num_processes):
        if option != asked and not (layout.data == 1 and option.axes == asked.axes and _same_but_zero(option, asked)):
            found.append(search.candidate(option))
    chosen = _choose(found, run.train.micro_batch)
    explained = tuple(
        dataclasses.replace(each, reason=_reason(each, chosen, run.train.micro_batch, search.budget_bytes))
        for each in found
    )
    return Plan(
        model=model,
        run=run,
        machine=machine,
        num_processes=num_processes,
        processes_here=here,
        budget_bytes=search.budget_bytes,
        layouts=explained,
        chosen=None if chosen is None else explained[found.index(chosen)],
        configured=explained[0],
    )


class _Search:
    def __init__(self, model: DecoderConfig, run: RunConfig, machine: Machine, *, processes: int) -> None:
        self._run = run
        self._predictor = Predictor(model, run)
        self._timing = Timing(model, run, Speed.of(machine, num_processes=processes, precision=run.train.precision))
        self.budget_bytes = machine.memory_available_bytes // processes

    def candidate(self, option: Option) -> Candidate:
        prediction = self._predictor.predict(option.layout, micro_batch=option.micro_batch, recompute=option.recompute)
        return Candidate(
            option=option,
            num_micro_batches=self._run.train.global_batch // (option.micro_batch * option.layout.data),
            prediction=prediction,
            sent=self._timing.sent(option),
            step=self._timing.step(option),
            fits=prediction.high_bytes <= self.budget_bytes,
        )


def _same_but_zero(one: Option, other: Option) -> bool:
    """With one data rank all stages are the same."""
    return dataclasses.replace(one, layout=dataclasses.replace(one.layout, zero=other.layout.zero)) == other


def _choose(found: list[Candidate], wanted: int) -> Candidate | None:
    """The shortest step of those that fit, with micro-batches no larger than the config asks for."""
    fitting = [each for each in found if each.fits and each.micro_batch <= wanted]
    if not fitting:
        return None
    least = min(each.step.total_s for each in fitting)
    rivals = [each for each in fitting if each.step.total_s <= _SAME_TIME * least]
    return min(rivals, key=lambda each: (each.effort, each.prediction.total_bytes))


def _reason(each: Candidate, chosen: Candidate | None, wanted: int, budget_bytes: int) -> str:
    total, high = each.prediction.total_bytes, each.prediction.high_bytes
    if not each.fits:
        if total <= budget_bytes:
            return f"too close: {_gib(total)} expected, up to {_gib(high)}, of {_gib(budget_bytes)} per process"
        return f"does not fit: {_gib(total)} of {_gib(budget_bytes)} per process"
    if each.micro_batch > wanted:
        return "fits, with a larger micro-batch than the config asks for"
    assert chosen is not None, "a layout that fits could be chosen"
    if each is chosen:
        return (
            f"fits ({_gib(total)} of {_gib(budget_bytes)} per process), and no layout that fits should have a clearly "
            f"shorter step ({each.step.total_s:.3g} s by the model of docs/planning.md)"
        )
    ratio = each.step.total_s / chosen.step.total_s
    if ratio > _SAME_TIME:
        return f"fits, but its step should take {ratio:.3g} times as long: {_slower_by(each, chosen)}"
    return f"fits, but is hardly faster, if at all, than {chosen.name}, which is simpler"


def _slower_by(each: Candidate, chosen: Candidate) -> str:
    """The part of the step that costs most more."""
    mine, theirs = each.step.parts(), chosen.step.parts()
    part = max(mine, key=lambda name: mine[name] - theirs[name])
    return _WHERE_TIME_GOES[part].format(
        tensor=_gib(each.sent.tensor_bytes), pipeline=_gib(each.sent.pipeline_bytes), data=_gib(each.sent.data_bytes)
    )


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB // 10 else f"{count / (1 << 20):.0f} MiB"
