"""A plan for people (a table and sentences for `rich`) and for programs (what RUN/plan.json holds).

console.print(plan_table(plan))
for line in plan_lines(plan): console.print(line)
Path("plan.json").write_text(json.dumps(plan.to_json()))
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from shardline import __version__
from shardline.planning.memory import PARTS
from shardline.planning.parameters import count_parameters
from shardline.planning.search import GIB, Candidate, Plan
from shardline.planning.state import offload_notes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["plan_lines", "plan_table", "plan_to_json"]

_HEADINGS = {
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "communication": "comm",
    "checkpoint": "saves",
    "runtime": "base",
    "allocator": "malloc",
}


def plan_table(plan: Plan) -> Table:
    """Returns one row for each ZeRO stage at the configured micro-batch (and at the chosen one), GiB per process."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("layout", "total", *(_HEADINGS.get(part, part) for part in PARTS), "verdict"):
        table.add_column(name, justify="left" if name in ("layout", "verdict") else "right", no_wrap=True)
    shown = _shown(plan)
    one_size = len({layout.micro_batch for layout in shown}) == 1
    for layout in shown:
        name = f"ZeRO-{layout.zero}" if one_size else f"ZeRO-{layout.zero} mb {layout.micro_batch}"
        sizes = [layout.prediction.total_bytes, *layout.prediction.parts().values()]
        style = "bold green" if layout is plan.chosen else "" if layout.fits else "dim"
        table.add_row(name, *(f"{size / GIB:.2f}" for size in sizes), verdict(layout, plan), style=style)
    return table


def _shown(plan: Plan) -> list[Candidate]:
    sizes = {plan.configured.micro_batch, (plan.chosen or plan.configured).micro_batch}
    return [layout for layout in plan.layouts if layout.micro_batch in sizes]


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
    lines += offload_notes(plan.model, run, machine, data_ranks=plan.configured.layout.data)
    lines += [f"why not {layout.name}: {layout.reason}" for layout in _shown(plan) if layout is not plan.chosen]
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
        "alternatives": [_layout_json(layout) for layout in plan.layouts if layout is not main],
        "machine": plan.machine.to_json(),
    }


def _layout_json(layout: Candidate) -> dict[str, Any]:
    return {
        "layout": {
            "data": layout.layout.data,
            "tensor": layout.layout.tensor,
            "pipeline": layout.layout.pipeline,
            "zero": layout.zero,
            "micro_batch": layout.micro_batch,
            "num_micro_batches": layout.num_micro_batches,
        },
        "memory_gib": layout.prediction.to_json(),
        "sent_gib_per_step": layout.sent_bytes / GIB,
        "fits": layout.fits,
        "reason": layout.reason,
    }
