"""What to change when nothing fits: concrete flags, each checked by the same prediction.

plan.require()      # raises with the sentences of `fixes(plan)`
flags(run, option)  # "--parallel.zero 3 --train.micro_batch 1": how to ask for an option
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

from shardline.config import InfeasibleError
from shardline.parallel.grid import Layout
from shardline.planning.layouts import Option, Zero, check_layout, with_option
from shardline.planning.memory import Predictor
from shardline.planning.parameters import count_parameters

if TYPE_CHECKING:
    from shardline.config import RunConfig
    from shardline.models.config import DecoderConfig
    from shardline.planning.search import Plan

__all__ = ["fixes", "flags"]

_GIB = 1 << 30
_SHORT = 128  # tokens a row


def flags(run: RunConfig, option: Option) -> str:
    """Returns the flags that make `run` ask for an option: what differs, and always stage and micro-batch."""
    words = [f"--parallel.zero {option.layout.zero}", f"--train.micro_batch {option.micro_batch}"]
    before, after = run.parallel, with_option(run, option).parallel
    for field in dataclasses.fields(after):
        value = getattr(after, field.name)
        implied = field.name in ("zero", "offload") or (field.name == "data" and before.data == "auto")
        if not implied and value != getattr(before, field.name):
            words.append(f"--parallel.{field.name} {str(value).lower()}")
    return " ".join(words)


def fixes(plan: Plan) -> list[str]:
    """Returns changes, the cheapest first, each with its number; at least three."""
    run, model = plan.run, plan.model
    leanest = min(plan.layouts, key=lambda each: each.prediction.high_bytes)
    least = leanest.option
    found = []
    for length in _shorter(run):
        if _high(model, with_length(run, length), least) <= plan.budget_bytes:
            found.append(f"--data.sequence_length {length} {flags(run, least)} would fit.")
            break
    for processes in range(plan.processes_here - 1, 0, -1):
        alone = _over_data(least, processes)
        if run.train.global_batch % processes or not _asks(run, alone):
            continue
        if _high(model, run, alone) * processes <= plan.machine.memory_available_bytes:
            found.append(f"--nproc {processes} {flags(run, alone)} would fit.")
            break
    smaller = _largest_preset(plan, run, least)
    if smaller:
        found.append(f"--model.preset {smaller} {flags(run, least)} would fit.")
    short = with_length(run, _SHORT)
    smallest = _largest_preset(plan, short, least)
    if smallest and smallest != smaller:
        found.append(f"--model.preset {smallest} --data.sequence_length {_SHORT} {flags(run, least)} would fit too.")
    found += _more_machines(plan, least)
    alone = _over_data(least, 1)
    found.append(
        f"The least that this model trains in is {_gib(_high(model, short, alone))}: --nproc 1 --data.sequence_length "
        f"{_SHORT} {flags(run, alone)}."
    )
    needed = leanest.prediction.high_bytes * plan.processes_here
    found.append(
        f"A machine with {_gib(needed)} available would run {leanest.name} in {plan.processes_here} processes."
    )
    return found


def with_length(run: RunConfig, length: int) -> RunConfig:
    return dataclasses.replace(run, data=dataclasses.replace(run.data, sequence_length=length))


def _shorter(run: RunConfig) -> list[int]:
    lengths, length = [], run.data.sequence_length
    while length > 64:
        length //= 2
        lengths.append(length)
    return lengths


def _asks(run: RunConfig, option: Option) -> bool:
    return run.train.global_batch % (option.layout.data * option.micro_batch) == 0


def _over_data(option: Option, processes: int) -> Option:
    """The option's stage and recomputation, over data ranks only, a row at a time."""
    zero = cast(Zero, option.layout.zero if processes > 1 else 0)
    if processes > 1 and option.layout.data == 1:
        zero = 3
    return dataclasses.replace(option, layout=Layout(data=processes, zero=zero), micro_batch=1)


def _high(model: DecoderConfig, run: RunConfig, option: Option) -> int:
    predictor = Predictor(model, run)
    return predictor.predict(option.layout, micro_batch=option.micro_batch, recompute=option.recompute).high_bytes


def _more_machines(plan: Plan, least: Option) -> list[str]:
    """The fewest machines like this one over which ZeRO-3 fits, with shorter rows where it must be."""
    run = plan.run
    for length in (run.data.sequence_length, *_shorter(run)):
        shorter = with_length(run, length)
        machines = 2
        while machines <= 1024:
            ranks = machines * plan.num_processes
            option = dataclasses.replace(least, layout=Layout(data=ranks, zero=3), micro_batch=1)
            if _high(plan.model, shorter, option) <= plan.budget_bytes:
                rows = "" if length == run.data.sequence_length else f" and --data.sequence_length {length}"
                recompute = (
                    "" if least.recompute == "none" else f" --parallel.activation_checkpointing {least.recompute}"
                )
                return [
                    f"{machines} machines like this one ({ranks} processes) with --parallel.zero 3{recompute}{rows} "
                    "would fit."
                ]
            machines *= 2
    return []


def _largest_preset(plan: Plan, run: RunConfig, option: Option) -> str | None:
    from shardline.models.presets import preset, preset_names

    asked: Any = with_option(run, option)
    fitting = {}
    for name in preset_names():
        model = preset(name)
        try:
            check_layout(asked, model, option.layout)
        except InfeasibleError:
            continue
        if _high(model, run, option) <= plan.budget_bytes:
            fitting[name] = count_parameters(model).total
    return max(fitting, key=lambda name: fitting[name]) if fitting else None


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB // 10 else f"{count / (1 << 20):.0f} MiB"
