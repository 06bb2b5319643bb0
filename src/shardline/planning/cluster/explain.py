"""What a search found, in words, as a table and as JSON.

for line in found_lines(found): print(line)
found_table(found)              # for rich
found_to_json(found)            # the keys of `shardline plan --devices ... --json`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardline.planning.cluster.space import outside

if TYPE_CHECKING:
    from rich.table import Table

    from shardline.planning.cluster.search import Candidate, Found
    from shardline.planning.cluster.space import Asked

__all__ = ["config_lines", "found_lines", "found_table", "found_to_json", "has_config"]

GIB = 1 << 30
# Under a tenth of a step is not worth a sentence.
_WORTH = 0.1
_PARTS = {
    "recompute": "activations are computed again",
    "data": "data ranks wait for gradients or weights",
    "tensor": "tensor ranks wait for each other's parts of products",
    "pipeline": "stages wait for activations on the way",
    "bubble": "stages have nothing to do (the pipeline's bubble)",
    "optimizer": "the optimizer steps",
    "offload": "states travel to the host and back",
    "host": "Python launches kernels that are done sooner",
}


def found_lines(found: Found) -> Iterator[str]:
    """Yields the answer, its reasons, why not the others, and what would help where nothing fits."""
    asked, best = found.asked, found.best
    size = f"{asked.shape.parameters / 1e9:.3g} billion parameters"
    what = f"{asked.shape.name} ({size}) on {asked.num_devices} x {asked.device.name}"
    if best is None:
        yield f"{what}: nothing fits. {_least(found)}"
        nothing = "nothing that was tried (offload, shorter rows, up to 64 times as many devices)"
        yield f"What would fit: {'; or '.join(found.changes) or nothing}."
    else:
        recompute = "no" if best.job.recompute == "none" else best.job.recompute
        chosen = f"{best.job.layout.text()}, micro-batch {best.job.micro_batch}, {recompute} recomputation"
        yield f"{what}: {chosen}. {'; '.join(_reasons(found, best))}."
        if best.time.mfu is not None:
            peak = best.job.device.nominal(best.time.peak_dtype) or 0.0
            yield (
                f"MFU {best.time.mfu:.1%} of the data sheet's {peak / 1e12:,.0f} TFLOP/s in {best.time.peak_dtype} "
                f"({best.time.convention}); {best.time.mfu_causal:.1%} with attention halved."
            )
        if found.days is not None:
            yield _budget(found)
        if asked.engine == "shardline" and not has_config(asked):
            yield f"Shardline does not train with {', '.join(outside(asked))}: there is no config for it."
        elif outside(asked):
            yield f"{asked.engine} is not known to have {', '.join(outside(asked))}; it is calculated all the same."
        if has_config(asked):
            yield "As a config:"
            yield from (f"  {line}" for line in config_lines(best))
    for name, _, why in found.alternatives:
        yield f"Why not {name}: {why}."


def has_config(asked: Asked) -> bool:
    """Whether Shardline's own trainer can run what is asked."""
    return asked.engine == "shardline" and not outside(asked)


def _budget(found: Found) -> str:
    asked, days = found.asked, found.days
    assert days is not None
    hours = days * 24 * asked.num_devices
    cost = "" if found.cost is None else f", {found.cost:,.0f} at {asked.price:g} a device-hour"
    return f"{asked.tokens:.3g} tokens take {days:,.1f} days: {hours:,.0f} device-hours{cost}; no pauses are counted."


def found_table(found: Found) -> Table:
    """Returns the ranked layouts; the first is the answer. Tokens are those of one device, mb a micro-batch's rows."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("layout", "mb", "recompute", "GiB", "verdict", "step s", "tokens/s", "MFU"):
        is_text = name in ("layout", "recompute", "verdict")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for each in found.ranked:
        memory = each.memory
        table.add_row(
            each.job.layout.text(),
            str(each.job.micro_batch),
            each.job.recompute,
            f"{memory.expected_bytes / GIB:.1f}",
            memory.verdict,
            f"{each.time.step_s:.3g}",
            f"{each.speed:,.0f}",
            "" if each.time.mfu is None else f"{each.time.mfu:.0%}",
        )
    return table


def found_to_json(found: Found) -> dict[str, Any]:
    """Returns the answer; where nothing fits, the figures are those of the layout that needs least."""
    best = found.best or found.ranked[0]
    memory = best.memory.to_json()
    time = best.time.to_json()
    return {
        "fits": found.best is not None,
        "verdict": best.memory.verdict,
        "memory_gib": {name: memory[name] for name in ("total", "low", "high", "capacity", "host", "parts")},
        "step_s": time["step_s"],
        "step_parts_s": time["parts_s"],
        "tokens_per_s_per_device": time["tokens_per_s_per_device"],
        "mfu": time["mfu"],
        "mfu_convention": time["mfu_convention"],
        "layout": _layout(best),
        "reasons": _reasons(found, best) if found.best is not None else [_least(found), *found.changes],
        "alternatives": [
            {
                "name": name,
                "why_not": why,
                **({} if each is None else {"memory_gib": each.memory.expected_bytes / GIB, "layout": _layout(each)}),
                **({} if each is None else {"tokens_per_s_per_device": each.speed, "fits": each.memory.fits}),
            }
            for name, each, why in found.alternatives
        ],
        "ranked": [
            {
                "layout": _layout(each),
                "memory_gib": each.memory.expected_bytes / GIB,
                "verdict": each.memory.verdict,
                "tokens_per_s_per_device": each.speed,
            }
            for each in found.ranked
        ],
        "num_tried": found.num_tried,
        "days": found.days,
        "device_hours": None if found.days is None else found.days * 24 * found.asked.num_devices,
        "cost": found.cost,
    }


def _layout(each: Candidate) -> dict[str, Any]:
    job, layout = each.job, each.job.layout
    return {
        "data": layout.data,
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "expert": layout.expert,
        "zero": layout.zero,
        "micro_batch": job.micro_batch,
        "num_micro_batches": job.num_micro_batches,
        "schedule": layout.schedule if layout.pipeline > 1 else None,
        "virtual_stages": layout.virtual_stages,
        "sequence_parallel": layout.sequence_parallel,
        "recompute": job.recompute,
        "offload": sorted(job.offload),
    }


def _reasons(found: Found, best: Candidate) -> list[str]:
    memory = best.memory
    largest = max(memory.parts, key=lambda name: memory.parts[name])
    reasons = [
        f"{memory.expected_bytes / GIB:.1f} GiB of {memory.capacity_bytes / GIB:.1f} "
        f"({memory.low_bytes / GIB:.1f} to {memory.high_bytes / GIB:.1f}), most of it {largest}",
        f"{best.speed:,.0f} tokens/s on each device, the most of what fits of {found.num_tried} layouts",
    ]
    if memory.verdict == "tight":
        reasons.append("tight: its high end does not fit, and nothing safer does")
    if best.job.offload and found.asked.offload is None:
        reasons.append(f"without the {' and '.join(sorted(best.job.offload))} in the host's memory nothing fits")
    step_s = best.time.step_s
    for name, text in _PARTS.items():
        share = best.time.parts.get(name, 0.0) / step_s
        if share >= _WORTH:
            reasons.append(f"{share:.0%} of a step {text}")
    return reasons


def _least(found: Found) -> str:
    least = found.ranked[0]
    memory = least.memory
    if memory.needed_bytes <= memory.capacity_bytes:
        return (
            f"What needs least ({least.job.layout.text()}) takes {memory.host_bytes / GIB:.0f} GiB of the host's "
            f"{memory.host_capacity_bytes / GIB:.0f}."
        )
    return (
        f"What needs least ({least.job.layout.text()}, {least.job.recompute} recomputation) takes "
        f"{memory.expected_bytes / GIB:.1f} GiB of {memory.capacity_bytes / GIB:.1f}."
    )


def config_lines(best: Candidate) -> Iterator[str]:
    """Yields a layout as lines of a run's YAML config, without the model and the data."""
    job, layout = best.job, best.job.layout
    precision = {"fp32": "fp32", "bf16_mixed": "bf16", "fp16_mixed": "fp16", "bf16_pure": "bf16_pure"}
    yield f"data: {{sequence_length: {job.sequence_length}}}"
    yield (
        f"train: {{global_batch: {job.global_batch}, micro_batch: {job.micro_batch}, "
        f"precision: {precision.get(job.precision, 'bf16')}}}"
    )
    yield f"optimizer: {{name: {job.optimizer}}}"
    yield "parallel:"
    yield f"  data: {layout.data}"
    yield f"  zero: {layout.zero}"
    for name in ("tensor", "pipeline"):
        if getattr(layout, name) > 1:
            yield f"  {name}: {getattr(layout, name)}"
    if layout.pipeline > 1:
        yield f"  schedule: {layout.schedule}"
    if layout.virtual_stages > 1:
        yield f"  virtual_stages: {layout.virtual_stages}"
    if layout.sequence_parallel:
        yield "  sequence_parallel: true"
    if job.recompute != "none":
        yield f"  activation_checkpointing: {job.recompute}"
    if job.offload:
        names = {"optimizer": "optimizer", "parameters": "params"}
        moved = ", ".join(f"{names[name]}: cpu" for name in sorted(job.offload & set(names)))
        yield f"  offload: {{{moved}}}"
