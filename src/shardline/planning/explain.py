"""A plan for people (a table and sentences for `rich`) and for programs (what RUN/plan.json holds).

console.print(plan_table(plan))
for line in plan_lines(plan): console.print(line)
Path("plan.json").write_text(json.dumps(plan.to_json()))
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from shardline import __version__
from shardline.planning.fixes import flags
from shardline.planning.memory import PARTS
from shardline.planning.parameters import count_parameters
from shardline.planning.search import GIB, Candidate, Plan
from shardline.planning.state import offload_notes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["plan_lines", "plan_table", "plan_to_json", "short_name", "shown"]

_HEADINGS = {
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "communication": "comm",
    "checkpoint": "saves",
    "runtime": "base",
    "allocator": "malloc",
}
_OTHER_AXES = 6  # rows for other ways to share out the processes


def plan_table(plan: Plan) -> Table:
    """Returns a row for each layout that is worth showing, GiB per process; parts that none of them has are left out.

    `time` is a step's, in units of the chosen layout's.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    layouts = shown(plan)
    parts = [part for part in PARTS if any(_size(each.prediction.parts()[part]) != _size(0) for each in layouts)]
    for name in ("layout", "time", "total", *(_HEADINGS.get(part, part) for part in parts), "verdict"):
        table.add_column(name, justify="left" if name in ("layout", "verdict") else "right", no_wrap=True)
    unit = (plan.chosen or plan.configured).step.total_s
    one_size = len({each.micro_batch for each in layouts}) == 1
    for each in layouts:
        name = short_name(each) if one_size else f"{short_name(each)} b{each.micro_batch}"
        sizes = [each.prediction.total_bytes, *(each.prediction.parts()[part] for part in parts)]
        style = "bold green" if each is plan.chosen else "" if each.fits else "dim"
        table.add_row(name, f"{each.step.total_s / unit:.2f}", *map(_size, sizes), verdict(each, plan), style=style)
    return table


def short_name(candidate: Candidate) -> str:
    """Returns a name for a narrow column: `ZeRO-1`, `d4 t2 Z1`, `d2 p4 Z3 full`."""
    layout, again = candidate.layout, candidate.option.recompute
    axes = [f"{letter}{size}" for letter, size in (("t", layout.tensor), ("p", layout.pipeline)) if size > 1]
    text = f"ZeRO-{candidate.zero}"
    if axes:
        data = [f"d{layout.data}"] if layout.data > 1 else []
        text = " ".join([*data, *axes, *([f"Z{candidate.zero}"] if layout.data > 1 else [])])
    return text + {"none": "", "selective": " sel", "full": " full"}[again]


def shown(plan: Plan) -> list[Candidate]:
    """Returns the configured layout's ZeRO stages, the chosen one, and the best of every other way to share out the
    processes: the fastest that fits, or else the one that needs least.
    """
    wanted = plan.run.train.micro_batch
    own = plan.configured.option
    rows = [
        each
        for each in plan.layouts
        if each is plan.configured
        or (each.option.axes == own.axes and (each.micro_batch, each.option.recompute) == (wanted, own.recompute))
    ]
    rows.sort(key=lambda each: each.zero)
    if plan.chosen is not None and plan.chosen not in rows:
        rows.append(plan.chosen)
    rest: dict[tuple[int, int, int], list[Candidate]] = {}
    for each in plan.layouts:
        if each.option.axes not in {row.option.axes for row in rows} and each.micro_batch <= wanted:
            rest.setdefault(each.option.axes, []).append(each)
    best = [min(group, key=_rank) for group in rest.values()]
    return rows + sorted(best, key=_rank)[:_OTHER_AXES]


def _rank(candidate: Candidate) -> tuple[bool, float]:
    return not candidate.fits, candidate.step.total_s if candidate.fits else candidate.prediction.total_bytes


def _size(count: int) -> str:
    return f"{count / GIB:.2f}" if count < 100 * GIB else f"{count / GIB:.0f}"


def verdict(layout: Candidate, plan: Plan) -> str:
    """Returns one word: chosen, fits, close (its high end does not fit) or no."""
    if layout is plan.chosen:
        return "chosen"
    if layout.fits:
        return "fits"
    return "close" if layout.prediction.total_bytes <= plan.budget_bytes else "no"


def plan_lines(plan: Plan) -> list[str]:
    """Returns sentences: what is planned, and why the choice and not each other one."""
    run, machine = plan.run, plan.machine
    lines = [
        f"{_parameters(plan)}, {run.train.precision}, {_processes(plan.num_processes)}, "
        f"{run.train.global_batch} rows of {run.data.sequence_length} tokens a step; "
        f"{machine.memory_available_bytes / GIB:.1f} GiB available = {plan.budget_bytes / GIB:.1f} GiB per process"
    ]
    if plan.chosen is not None:
        lines.append(f"chosen: {plan.chosen.name}: {plan.chosen.reason}")
        if plan.chosen is not plan.configured:
            lines.append(f"to take it: {flags(run, plan.chosen.option)}")
    lines += offload_notes(plan.model, run, machine, data_ranks=plan.configured.layout.data)
    lines += [f"why not {layout.name}: {layout.reason}" for layout in shown(plan) if layout is not plan.chosen]
    return lines


def _parameters(plan: Plan) -> str:
    count = count_parameters(plan.model)
    text = f"{count.total / 1e6:,.1f} M parameters"
    return text if count.active == count.total else f"{text} ({count.active / 1e6:,.1f} M active)"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Returns the plan as JSON values. Memory is in GiB per process; the top level describes the chosen layout
    (the configured one when nothing fits), `configured` the layout that the config asks for.
    """
    main = plan.chosen or plan.configured
    return {
        "shardline": __version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "fits": plan.chosen is not None,
        "verdict": f"{main.name}: {main.reason}",
        "num_parameters": plan.num_parameters,
        "num_active_parameters": count_parameters(plan.model).active,
        "num_processes": plan.num_processes,
        "budget_gib": plan.budget_bytes / GIB,
        **_layout_json(main),
        "reasons": plan_lines(plan),
        "configured": _layout_json(plan.configured),
        "num_candidates": len(plan.layouts),
        "alternatives": [_layout_json(layout) for layout in shown(plan) if layout is not main],
        "machine": plan.machine.to_json(),
    }


def _layout_json(candidate: Candidate) -> dict[str, Any]:
    layout, step = candidate.layout, candidate.step
    more = {
        "zero_group": layout.zero_group,
        "sequence_parallel": layout.sequence_parallel or None,
        "schedule": layout.schedule if layout.pipeline > 1 else None,
        "virtual_stages": layout.virtual_stages if layout.virtual_stages > 1 else None,
        "activation_checkpointing": candidate.option.recompute if candidate.option.recompute != "none" else None,
    }
    return {
        "layout": {
            "data": layout.data,
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "zero": candidate.zero,
            "micro_batch": candidate.micro_batch,
            "num_micro_batches": candidate.num_micro_batches,
            **{key: value for key, value in more.items() if value is not None},
        },
        "memory_gib": candidate.prediction.to_json(),
        "sent_gib_per_step": candidate.sent_bytes / GIB,
        "step_s": {
            "total": step.total_s,
            **{name.removesuffix("_s"): seconds for name, seconds in step.parts().items()},
        },
        "fits": candidate.fits,
        "reason": candidate.reason,
    }
