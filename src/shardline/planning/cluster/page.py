"""A plan as one self-contained HTML page: no script, no network, light and dark, for screens, telephones and paper.

    write_page("plan.html", search(asked), command="shardline plan llama-3.1-8b --devices 8xH100 --html plan.html")

It says what `found_lines` says, and shows it: memory of every layout against the device's limit, where a step's time
goes, and what the pipeline's ranks do meanwhile. A section is a function of what was found that returns HTML; one that
has nothing to say returns "".
"""

from __future__ import annotations

import os
import string
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from shardline import __version__
from shardline.config.errors import UsageError
from shardline.planning.cluster.bars import Row, memory_chart, memory_table, step_bar, step_table, verdict
from shardline.planning.cluster.explain import found_lines, found_to_json
from shardline.planning.cluster.figures import GIB, gib, seconds, share
from shardline.planning.cluster.timeline import KINDS, Timeline, pipeline_timeline, timeline_svg

if TYPE_CHECKING:
    from shardline.planning.cluster.search import Candidate, Found

__all__ = ["make_page", "write_page"]

_MOST_BARS = 6  # of the ranked layouts
_AXES = {"data": "data", "tensor": "tensor", "pipeline": "pipeline", "context": "context", "expert": "expert"}
_CAN = {"fits": "It fits", "tight": "It is tight", "does not fit": "It does not fit"}


def write_page(path: str | Path, found: Found, *, command: str | None = None) -> None:
    """Writes the page whole or not at all; raises `UsageError` where it can't be written."""
    text = make_page(found, command=command)
    target = Path(path).expanduser()
    target = target.resolve() if target.is_symlink() else target
    if target.exists() and not target.is_file():
        raise UsageError(f"--html {path} is not a file; name one, for example {target / 'plan.html'}.")
    if not target.parent.is_dir():
        raise UsageError(f"--html {path}: there is no folder {target.parent}; make it, or choose another place.")
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, target)
    except OSError as error:
        raise UsageError(f"--html {path} can't be written ({error.strerror}); choose another place.") from error
    finally:
        scratch.unlink(missing_ok=True)


def make_page(found: Found, *, command: str | None = None) -> str:
    """Returns the page's HTML."""
    sections = [
        _header(found),
        _tiles(found),
        _memory(found),
        _step(found),
        _ranked(found),
        _words_of(found),
        _foot(found, command),
    ]
    template = resources.files("shardline.planning.cluster").joinpath("page.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(title=escape(f"{_what(found)} - plan"), body="\n".join(sections))


def _what(found: Found) -> str:
    return f"{found.asked.shape.name} on {found.asked.num_devices} x {found.asked.device.name}"


def _header(found: Found) -> str:
    asked, best = found.asked, found.best
    facts = (
        f"{asked.shape.parameters / 1e9:.3g} billion parameters",
        f"{asked.sequence_length:,} tokens a row",
        f"{asked.global_batch:,} rows a step",
        asked.precision.replace("_", " "),
        asked.optimizer.replace("_", " "),
        f"trained by {asked.engine}",
    )
    if best is None:
        badge, sentence = verdict(found.ranked[0].memory), str(found_to_json(found)["reasons"][0])
        if found.changes:
            sentence += f" The cheapest change that would do: {found.changes[0]}."
    else:
        time = best.time
        used = "" if time.mfu is None else f", {share(time.mfu)} MFU"
        badge = verdict(best.memory)
        sentence = (
            f"{_CAN[best.memory.verdict]} as {_words(best)}: {gib(best.memory.expected_bytes)} of "
            f"{gib(best.memory.capacity_bytes)} on the fullest device, {_all_tokens(best):,.0f} tokens/s, "
            f"{seconds(time.step_s)} a step{used}."
        )
    return (
        f'<header><p class="kicker">Shardline plan: training</p><h1>{escape(_what(found))}</h1>'
        f'<p class="lead">{badge} {escape(sentence)}</p>'
        f'<ul class="facts">{"".join(f"<li>{escape(fact)}</li>" for fact in facts)}</ul></header>'
    )


def _tiles(found: Found) -> str:
    best = found.best
    tiles: list[tuple[str, str, str]] = []
    shown = best or found.ranked[0]
    memory = shown.memory
    band = (
        f"of {memory.capacity_bytes / GIB:,.1f}, band {memory.low_bytes / GIB:,.1f} to {memory.high_bytes / GIB:,.1f}"
    )
    tiles.append(("memory, fullest device", gib(memory.expected_bytes), band))
    if best is not None:
        time = best.time
        tiles.append(("tokens per second", f"{_all_tokens(best):,.0f}", f"{best.speed:,.0f} on each device"))
        tiles.append(("a step", seconds(time.step_s), f"of {best.job.tokens:,} tokens"))
        if time.mfu is not None:
            peak = best.job.device.nominal(time.peak_dtype) or 0.0
            under = f"of {peak / 1e12:,.0f} TFLOP/s in {time.peak_dtype}, attention not halved"
            tiles.append(("MFU", share(time.mfu), under))
    else:
        over = memory.expected_bytes - memory.capacity_bytes
        if over > 0:
            times = memory.expected_bytes / memory.capacity_bytes
            tiles.append(("too much by", gib(over), f"{times:.1f} times what the device has"))
        if memory.host_bytes:
            tiles.append(("memory of a host", gib(memory.host_bytes), f"it has {gib(memory.host_capacity_bytes)}"))
    tiles.append(("layouts compared", f"{found.num_tried:,}", "ranks, ZeRO, micro-batches"))
    body = "".join(
        f'<div class="tile"><p class="soft">{label}</p><p class="value">{value}</p><p class="soft">{under}</p></div>'
        for label, value, under in tiles
    )
    return f'<section class="tiles" aria-label="Key figures">{body}</section>'


def _memory(found: Found) -> str:
    rows = list(_rows(found))
    return _card(
        "Memory against the device's limit",
        "Each bar is the fullest device of a layout. It should fit with its whole band: what ends beyond the line runs "
        "out of memory, and what only reaches across it with the band may.",
        memory_chart(rows) + f"<details><summary>The numbers behind the bars</summary>{memory_table(rows)}</details>",
    )


def _step(found: Found) -> str:
    best = found.best
    if best is None:
        return ""
    parts, step_s = best.time.parts, best.time.step_s
    groups = {
        "computing": ("compute", "attention"),
        "computing again": ("recompute",),
        "waiting for other devices": ("tensor", "context", "data", "pipeline"),
        "idle in the pipeline's bubble": ("bubble",),
        "updating weights": ("optimizer", "offload"),
    }
    shares = {words: sum(parts.get(name, 0.0) for name in names) / step_s for words, names in groups.items()}
    said = ", ".join(f"{share(value)} {words}" for words, value in shares.items() if value > 0)
    body = f'{step_bar(best.time)}<div class="columns"><div>{step_table(best.time)}</div>{_speed(best)}</div>'
    timeline = pipeline_timeline(best.job, best.time)
    if timeline is not None:
        body += _pipeline(best, timeline)
    return _card(f"Where the {seconds(step_s)} of a step go", f"{best.job.layout.text()}: {said}.", body)


def _speed(best: Candidate) -> str:
    """What the speed comes to, in numbers that people compare and pay for."""
    time, tokens = best.time, _all_tokens(best)
    rows = [
        ("tokens a day", f"{tokens * 86400 / 1e9:,.3g} billion"),
        ("a billion tokens take", seconds(1e9 / tokens)),
        ("device-hours for a billion tokens", f"{1e9 / best.speed / 3600:,.3g}"),
        ("model TFLOP/s of a device", f"{time.flops_per_device / 1e12:,.0f}"),
    ]
    if time.mfu is not None and time.mfu_causal is not None:
        rows += [("MFU, attention not halved", share(time.mfu)), ("MFU, attention halved", share(time.mfu_causal))]
    body = "".join(f'<tr><th scope="row">{name}</th><td>{value}</td></tr>' for name, value in rows)
    return (
        '<table class="times"><thead><tr><th scope="col">what that comes to</th><th scope="col">'
        f"{best.job.num_devices} devices</th></tr></thead><tbody>{body}</tbody></table>"
    )


def _pipeline(best: Candidate, timeline: Timeline) -> str:
    names = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "interleaved", "zero_bubble_v": "zero-bubble (V)"}
    drawn, total = timeline.drawn, timeline.num_micro_batches
    real = best.time.parts.get("bubble", 0.0) / best.time.step_s
    if drawn < total:
        extent = (
            f"{drawn} of the step's {total} micro-batches are drawn, because the middle repeats; so ranks wait "
            f"{share(timeline.idle)} of the picture, but {share(real)} of the step."
        )
    else:
        extent = f"All {total} micro-batches of a step; ranks wait {share(timeline.idle)} of the time."
    keys = "".join(f'<li><span class="swatch {kind.lower()}"></span>{KINDS[kind]}</li>' for kind in timeline.kinds)
    if len(timeline.stages_of(0)) > 1:
        later = "".join(f'<span class="swatch {kind.lower()} later"></span>' for kind in timeline.kinds)
        keys += f"<li>{later}the same on a rank's other stages</li>"
    lanes = "".join(f"<li>{_lane(timeline, rank)}</li>" for rank in range(len(timeline.passes)))
    small = " small" if len(timeline.passes) > 8 else ""
    return (
        f"<h3>What the {len(timeline.passes)} pipeline ranks do: {names[timeline.schedule]}</h3>"
        f'<p class="soft">Numbers are micro-batches. {extent}</p>'
        f'<ul class="legend">{keys}<li><span class="swatch bubble"></span>waiting (the bubble)</li></ul>'
        f'<div class="lanes{small}"><ol aria-hidden="true">{lanes}</ol>'
        f"{timeline_svg(timeline, title='Passes of the pipeline ranks')}</div>"
    )


def _lane(timeline: Timeline, rank: int) -> str:
    stages = timeline.stages_of(rank)
    if len(stages) == 1:
        return f"stage {stages[0]}"
    return f"stages {', '.join(map(str, stages))}" if len(stages) == 2 else f"rank {rank}"


def _ranked(found: Found) -> str:
    head = "".join(
        f'<th scope="col"{"" if number else " class=text"}>{name}</th>'
        for name, number in (
            ("", True), ("layout", False), ("micro-batches", True), ("recompute", False), ("GiB", True),
            ("band", True), ("", False), ("step", True), ("tokens/s each", True), ("MFU", True),
        )
    )  # fmt: skip
    body = "".join(_ranked_row(index, each, each is found.best) for index, each in enumerate(found.ranked, start=1))
    if found.best is None:
        title, lead = "What needs least", "Nothing fits; these layouts come nearest, the least memory first."
    else:
        title, lead = "The layouts that fit, ranked", "Fastest first; of those within 1% of it, the simplest is taken."
    return _card(
        title,
        lead,
        f'<div class="scroll" role="region" tabindex="0" aria-label="{title}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
        '<p class="soft">dp, tp, pp, cp, ep: data, tensor, pipeline, context, expert ranks. zero1 to zero3: data ranks '
        "share out optimizer states, gradients, weights.</p>",
    )


def _ranked_row(index: int, each: Candidate, chosen: bool) -> str:
    job, memory, time = each.job, each.memory, each.time
    return (
        f"<tr{' class=chosen' if chosen else ''}><td>{index}</td>"
        f'<th scope="row">{escape(job.layout.text())}{_schedule(each)}</th>'
        f"<td>{job.num_micro_batches} x {job.micro_batch}</td><td class=text>{job.recompute}{_offload(each)}</td>"
        f"<td>{memory.expected_bytes / GIB:,.1f}</td>"
        f"<td>{memory.low_bytes / GIB:,.1f} to {memory.high_bytes / GIB:,.1f}</td>"
        f"<td class=text>{verdict(memory)}</td><td>{seconds(time.step_s)}</td><td>{each.speed:,.0f}</td>"
        f"<td>{'' if time.mfu is None else share(time.mfu)}</td></tr>"
    )


def _words_of(found: Found) -> str:
    """Reasons and config on one side, the alternatives on the other."""
    left = _changes(found) if found.best is None else _reasons(found) + _config(found)
    return f'<div class="columns"><div>{left}</div><div>{_why_not(found)}</div></div>'


def _reasons(found: Found) -> str:
    return _card("Why this one", "", _list(found_to_json(found)["reasons"]))


def _changes(found: Found) -> str:
    nothing = "Nothing that was tried: offload, shorter rows, up to 64 times as many devices."
    lead = "Each of these alone would, the cheapest first." if len(found.changes) > 1 else ""
    return _card("What would make it fit", lead, _list(found.changes or [nothing]))


def _why_not(found: Found) -> str:
    if not found.alternatives:
        return ""
    body = "".join(f"<dt>{escape(name)}</dt><dd>{escape(why)}</dd>" for name, _, why in found.alternatives)
    return _card("Why not the others", "", f"<dl>{body}</dl>")


def _config(found: Found) -> str:
    lines = list(found_lines(found))
    if "As a config:" in lines:
        start = lines.index("As a config:") + 1
        text = "\n".join(line[2:] for line in lines[start:] if line.startswith("  "))
        return _card(
            "As a config", "shardline train takes it, with a model and data added.", f"<pre>{escape(text)}</pre>"
        )
    settings = found_to_json(found)["layout"]
    text = "\n".join(f"{name}: {_plain(value)}" for name, value in settings.items() if value not in (None, []))
    return _card("Its settings", f"In Shardline's words, for {found.asked.engine}.", f"<pre>{escape(text)}</pre>")


def _foot(found: Found, command: str | None) -> str:
    shown = found.best or found.ranked[0]
    memory, time, device = shown.memory, shown.time, found.asked.device
    below, above = 1 - memory.low_bytes / memory.expected_bytes, memory.high_bytes / memory.expected_bytes - 1
    notes = [
        "Predicted in closed form, not measured on these devices. docs/plan-accuracy.md of Shardline holds such "
        "predictions against published runs.",
        f"Band: {below:.0%} below what is expected to {above:.0%} above. A layout fits when its high end does, and is "
        "tight when only what is expected does.",
        "Memory is the peak of the fullest device, in GiB of 2^30 bytes. Communication is what is not hidden behind "
        "computing.",
        f"MFU: {time.convention}, over the data sheet's peak of the device.",
        f"{device.name}: {device.source}. Product rate: {device.measured_source}.",
    ]
    made = f"Shardline {__version__}, {datetime.now(UTC):%Y-%m-%d}"
    again = "" if command is None else f"<p>Made by</p><pre>{escape(command)}</pre>"
    return f"<footer><h2>How to read this</h2>{_list(notes)}{again}<p>{made}</p></footer>"


def _rows(found: Found) -> Iterator[Row]:
    """Yields the ranked layouts that are drawn, then the alternatives that are not among them."""
    shown = found.ranked[:_MOST_BARS]
    for index, each in enumerate(shown):
        group = "" if index else "What needs least" if found.best is None else "The best of what fits"
        yield Row(
            name=each.job.layout.text(),
            settings=_settings(each),
            memory=each.memory,
            chosen=each is found.best,
            group=group,
        )
    first = True
    for name, each, _ in found.alternatives:
        if each is None or any(each.job == other.job for other in shown):
            continue
        settings = f"{each.job.layout.text()}, {_settings(each)}"
        yield Row(name=name, settings=settings, memory=each.memory, group="What people try first" if first else "")
        first = False


def _words(best: Candidate) -> str:
    layout = best.job.layout
    sizes = [f"{getattr(layout, axis)} {word}" for axis, word in _AXES.items() if getattr(layout, axis) > 1]
    ranks = f"{' x '.join(sizes)} ranks" if sizes else "one rank"
    zero = f" with ZeRO-{layout.zero}" if layout.zero else ""
    again = "" if best.job.recompute == "none" else f", {best.job.recompute} recomputation"
    kept = f", {' and '.join(sorted(best.job.offload))} in the host's memory" if best.job.offload else ""
    return f"{ranks}{zero}{again}{kept}"


def _settings(each: Candidate) -> str:
    job = each.job
    again = "" if job.recompute == "none" else f", {job.recompute} recompute"
    return f"{job.num_micro_batches} x micro-batch {job.micro_batch}{again}{_schedule(each)}{_offload(each)}"


def _schedule(each: Candidate) -> str:
    layout = each.job.layout
    return f", {layout.schedule.replace('_', ' ')}" if layout.pipeline > 1 else ""


def _offload(each: Candidate) -> str:
    return f", offload {' + '.join(sorted(each.job.offload))}" if each.job.offload else ""


def _all_tokens(each: Candidate) -> float:
    return each.speed * each.job.num_devices


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(value) if isinstance(value, list) else str(value)


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _card(title: str, lead: str, body: str) -> str:
    text = f'<p class="soft">{escape(lead)}</p>' if lead else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{text}{body}</section>'
