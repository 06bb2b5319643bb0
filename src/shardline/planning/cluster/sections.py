"""The sections of a plan's page that show figures: memory as bars, a step's time, the ranked table.

    memory_section(found), step_section(found), ranked_section(found)
    card("Title", "what it is", body)

Each returns HTML, or "" where it has nothing to show.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from shardline.planning.cluster.bars import Row, memory_chart, memory_table, step_bar, step_table, verdict
from shardline.planning.cluster.figures import GIB, scroll_table, seconds, share, three
from shardline.planning.cluster.timeline import pipeline_timeline, schedule_words, timeline_figure

if TYPE_CHECKING:
    from shardline.planning.cluster.search import Candidate, Found

__all__ = ["all_tokens", "card", "memory_section", "ranked_section", "step_section"]

_MOST_BARS = 6  # of the ranked layouts
_COLUMNS = (
    "no.", "layout", "schedule", "micro-batches", "recompute", "offload", "GiB", "band", "verdict", "step",
    "tokens/s each", "MFU",
)  # fmt: skip
_ALIGN = dict.fromkeys(("layout", "schedule", "recompute", "offload", "verdict"), " class=text")
_ALIGN["step"] = " class=whole"


def memory_section(found: Found) -> str:
    rows = list(_rows(found))
    return card(
        "Memory against the device's limit",
        "Each bar is the fullest device of a layout. It should fit with its whole band: what ends beyond the line runs "
        "out of memory, and what only reaches across it with the band may.",
        memory_chart(rows) + f"<details><summary>The numbers behind the bars</summary>{memory_table(rows)}</details>",
    )


def step_section(found: Found) -> str:
    best = found.best
    if best is None:
        return ""
    parts, step_s = best.time.parts, best.time.step_s
    groups = {
        "computing": ("compute", "attention"),
        "computing again": ("recompute",),
        "waiting for Python": ("host",),
        "waiting for other devices": ("tensor", "context", "data", "pipeline"),
        "idle in the pipeline's bubble": ("bubble",),
        "updating weights": ("optimizer", "offload"),
    }
    shares = {words: sum(parts.get(name, 0.0) for name in names) / step_s for words, names in groups.items()}
    said = ", ".join(f"{share(value)} {words}" for words, value in shares.items() if value > 0)
    body = f'{step_bar(best.time)}<div class="columns"><div>{step_table(best.time)}</div>{_speed(found, best)}</div>'
    timeline = pipeline_timeline(best.job, best.time)
    if timeline is not None:
        body += timeline_figure(timeline, bubble=parts.get("bubble", 0.0) / step_s)
    return card(f"Where the {seconds(step_s)} of a step go", f"{best.job.layout.ranks()}: {said}.", body)


def _speed(found: Found, best: Candidate) -> str:
    """What the speed comes to, in numbers that people compare and pay for."""
    time, tokens = best.time, all_tokens(best)
    rows = [
        ("tokens a day", f"{three(tokens * 86400 / 1e9)} billion"),
        ("a billion tokens take", seconds(1e9 / tokens)),
        ("device-hours for a billion tokens", three(1e9 / best.speed / 3600)),
        ("model TFLOP/s of a device", three(time.flops_per_device / 1e12)),
    ]
    if time.mfu is not None and time.mfu_causal is not None:
        rows += [("MFU, attention not halved", share(time.mfu)), ("MFU, attention halved", share(time.mfu_causal))]
    if found.days is not None and found.asked.tokens is not None:
        rows.append((f"days for {found.asked.tokens:.3g} tokens", f"{found.days:,.1f}"))
    if found.cost is not None and found.asked.price is not None:
        rows.append((f"cost at {found.asked.price:g} a device-hour", f"{found.cost:,.0f}"))
    body = "".join(f'<tr><th scope="row">{name}</th><td>{value}</td></tr>' for name, value in rows)
    return (
        '<table class="times"><thead><tr><th scope="col">what that comes to</th><th scope="col">'
        f"{best.job.num_devices} devices</th></tr></thead><tbody>{body}</tbody></table>"
    )


def ranked_section(found: Found) -> str:
    piped = any(each.job.layout.pipeline > 1 for each in found.ranked)
    kept = any(each.job.offload for each in found.ranked)
    left_out = {*([] if piped else ["schedule"]), *([] if kept else ["offload"])}
    head = "".join(f'<th scope="col"{_ALIGN.get(name, "")}>{name}</th>' for name in _COLUMNS if name not in left_out)
    body = "".join(
        f"<tr{' class=chosen' if each is found.best else ''}>{_cells(index, each, left_out)}</tr>"
        for index, each in enumerate(found.ranked, start=1)
    )
    if found.best is None:
        title, lead = "What needs least", "Nothing fits; these layouts come nearest, the least memory first."
    else:
        title, lead = "The layouts that fit, ranked", "Fastest first; of those within 1% of it, the simplest is taken."
    return card(
        title,
        lead,
        f"{scroll_table(title, head, body)}"
        '<p class="soft">dp, tp, pp, cp, ep: data, tensor, pipeline, context, expert ranks. zero1 to zero3: data ranks '
        "share out optimizer states, gradients, weights.</p>",
    )


def _cells(index: int, each: Candidate, left_out: set[str]) -> str:
    job, memory, time = each.job, each.memory, each.time
    cells = {
        "no.": str(index),
        "schedule": _schedule(each) or "none",
        "micro-batches": f"{job.num_micro_batches} x {job.micro_batch}",
        "recompute": job.recompute,
        "offload": " + ".join(sorted(job.offload)) or "none",
        "GiB": f"{memory.expected_bytes / GIB:,.1f}",
        "band": f"{memory.low_bytes / GIB:,.1f} to {memory.high_bytes / GIB:,.1f}",
        "verdict": verdict(memory),
        "step": seconds(time.step_s),
        "tokens/s each": f"{each.speed:,.0f}",
        "MFU": "-" if time.mfu is None else share(time.mfu),
    }
    texts = {name: f"<td{_ALIGN.get(name, '')}>{text}</td>" for name, text in cells.items()}
    texts["layout"] = f'<th scope="row">{escape(job.layout.ranks())}</th>'
    return "".join(texts[name] for name in _COLUMNS if name not in left_out)


def _rows(found: Found) -> Iterator[Row]:
    """Yields the ranked layouts that are drawn, then the alternatives that are not among them."""
    shown = found.ranked[:_MOST_BARS]
    for index, each in enumerate(shown):
        group = "" if index else "What needs least" if found.best is None else "The best of what fits"
        yield Row(
            name=each.job.layout.ranks(),
            settings=_settings(each),
            memory=each.memory,
            chosen=each is found.best,
            group=group,
        )
    first = True
    for name, each, _ in found.alternatives:
        if each is None or any(each.job == other.job for other in shown):
            continue
        settings = f"{each.job.layout.ranks()}, {_settings(each)}"
        yield Row(name=name, settings=settings, memory=each.memory, group="What people try first" if first else "")
        first = False


def _settings(each: Candidate) -> str:
    job = each.job
    again = () if job.recompute == "none" else (f"{job.recompute} recompute",)
    schedule = (_schedule(each),) if job.layout.pipeline > 1 else ()
    return ", ".join((f"{job.num_micro_batches} x micro-batch {job.micro_batch}", *again, *schedule, *_offload(each)))


def _schedule(each: Candidate) -> str:
    layout = each.job.layout
    return schedule_words(layout) if layout.pipeline > 1 else ""


def _offload(each: Candidate) -> list[str]:
    return [f"offload {' + '.join(sorted(each.job.offload))}"] if each.job.offload else []


def all_tokens(each: Candidate) -> float:
    return each.speed * each.job.num_devices


def card(title: str, lead: str, body: str) -> str:
    text = f'<p class="soft">{escape(lead)}</p>' if lead else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{text}{body}</section>'
