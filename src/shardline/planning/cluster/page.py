"""A plan as one self-contained HTML page: no script, no network, light and dark, for screens, telephones and paper.

    write_page("plan.html", search(asked), command="shardline plan llama-3.1-8b --devices 8xH100 --html plan.html")

It says what `found_lines` says, and shows it: memory of every layout against the device's limit, where a step's time
goes, and what the pipeline's ranks do meanwhile. A section is a function of what was found that returns HTML; one that
has nothing to say returns "".
"""

from __future__ import annotations

import os
import string
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from shardline import __version__
from shardline.config.errors import UsageError
from shardline.planning.cluster.bars import verdict
from shardline.planning.cluster.explain import config_lines, found_to_json, has_config
from shardline.planning.cluster.figures import GIB, gib, seconds, share
from shardline.planning.cluster.sections import all_tokens, card, memory_section, ranked_section, step_section

if TYPE_CHECKING:
    from shardline.planning.cluster.search import Candidate, Found

__all__ = [
    "count_words", "defined", "fill", "foot", "header", "listed", "make_page", "show_tiles", "write_html", "write_page",
]  # fmt: skip

_CAN = {"fits": "It fits", "tight": "It is tight", "does not fit": "It does not fit"}


def write_page(path: str | Path, found: Found, *, command: str | None = None) -> None:
    """Writes the page whole or not at all; raises `UsageError` where it can't be written."""
    write_html(path, make_page(found, command=command))


def write_html(path: str | Path, text: str) -> None:
    """Writes a page whole or not at all; raises `UsageError` where it can't be written."""
    target = Path(os.path.realpath(path))  # a link stays one
    try:
        if target.is_dir():
            raise UsageError(f"--html {path} is a folder; name a file in it, for example {Path(path) / 'plan.html'}.")
        if target.exists() and not target.is_file():
            raise UsageError(f"--html {path} is not a plain file; choose another name.")
        _replace(target, text)
    except FileNotFoundError as error:
        raise UsageError(f"--html {path}: there is no folder {target.parent}; make it, or choose another.") from error
    except OSError as error:
        raise UsageError(f"--html {path} can't be written ({error.strerror}); choose another place.") from error


def _replace(target: Path, text: str) -> None:
    scratch = target.with_name(f".plan-{os.getpid()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


def make_page(found: Found, *, command: str | None = None) -> str:
    """Returns the page's HTML."""
    sections = [
        _header(found),
        _tiles(found),
        memory_section(found),
        step_section(found),
        ranked_section(found),
        _words_of(found),
        _foot(found, command),
    ]
    return fill(f"{_what(found)} - plan", sections)


def fill(title: str, sections: Sequence[str]) -> str:
    """Returns a whole page of these sections."""
    template = resources.files("shardline.planning.cluster").joinpath("page.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(title=escape(title), body="\n".join(sections))


def _what(found: Found) -> str:
    return f"{found.asked.shape.name} on {found.asked.num_devices} x {found.asked.device.name}"


def _header(found: Found) -> str:
    asked, best = found.asked, found.best
    facts = (
        f"{count_words(asked.shape.parameters)} parameters",
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
            f"{gib(best.memory.capacity_bytes)} on the fullest device, {all_tokens(best):,.0f} tokens/s, "
            f"{seconds(time.step_s)} a step{used}."
        )
    return header("training", title=_what(found), badge=badge, sentence=sentence, facts=facts)


def header(purpose: str, *, title: str, badge: str, sentence: str, facts: Sequence[str]) -> str:
    """Returns a page's head: what is planned, the answer in a sentence, and what was asked."""
    return (
        f'<header><p class="kicker">Shardline plan: {purpose}</p><h1>{escape(title)}</h1>'
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
        tiles.append(("tokens per second", f"{all_tokens(best):,.0f}", f"{best.speed:,.0f} on each device"))
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
    return show_tiles(tiles)


def show_tiles(tiles: Sequence[tuple[str, str, str]]) -> str:
    """Returns the key figures: (label, value, what is under it)."""
    body = "".join(
        f'<div class="tile"><p class="soft">{label}</p><p class="value">{value}</p><p class="soft">{under}</p></div>'
        for label, value, under in tiles
    )
    return f'<section class="tiles" aria-label="Key figures">{body}</section>'


def _words_of(found: Found) -> str:
    """Reasons and config on one side, the alternatives on the other."""
    left = _changes(found) if found.best is None else _reasons(found) + _config(found)
    return f'<div class="columns"><div>{left}</div><div>{_why_not(found)}</div></div>'


def _reasons(found: Found) -> str:
    return card("Why this one", "", listed(found_to_json(found)["reasons"]))


def _changes(found: Found) -> str:
    nothing = "Nothing that was tried: offload, shorter rows, up to 64 times as many devices."
    lead = "Each of these alone would, the cheapest first." if len(found.changes) > 1 else ""
    return card("What would make it fit", lead, listed(found.changes or [nothing]))


def _why_not(found: Found) -> str:
    if not found.alternatives:
        return ""
    return card("Why not the others", "", defined([(name, why) for name, _, why in found.alternatives]))


def _config(found: Found) -> str:
    if found.best is not None and has_config(found.asked):
        text = "\n".join(config_lines(found.best))
        return card(
            "As a config", "shardline train takes it, with a model and data added.", f"<pre>{escape(text)}</pre>"
        )
    settings = found_to_json(found)["layout"]
    text = "\n".join(f"{name}: {_plain(value)}" for name, value in settings.items() if value not in (None, []))
    return card("Its settings", f"In Shardline's words, for {found.asked.engine}.", f"<pre>{escape(text)}</pre>")


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
        *([] if time.mfu is None else [f"MFU: {time.convention}, over the data sheet's peak of the device."]),
        f"{device.name}: {device.source}. Product rate: {device.measured_source}.",
    ]
    return foot(notes, command)


def foot(notes: Sequence[str], command: str | None) -> str:
    """Returns how to read a page, and how it was made."""
    made = f"Shardline {__version__}, {datetime.now(UTC):%Y-%m-%d}"
    again = "" if command is None else f"<p>Made by</p><pre>{escape(command)}</pre>"
    return f"<footer><h2>How to read this</h2>{listed(notes)}{again}<p>{made}</p></footer>"


def _words(best: Candidate) -> str:
    layout = best.job.layout
    axes = ("data", "tensor", "pipeline", "context")
    sizes = [f"{getattr(layout, axis)} {axis}" for axis in axes if getattr(layout, axis) > 1]
    ranks = f"{' x '.join(sizes)} ranks" if sizes else "one rank"
    if layout.expert > 1:
        ranks += f", experts over {layout.expert} of them"
    zero = f" with ZeRO-{layout.zero}" if layout.zero else ""
    again = "" if best.job.recompute == "none" else f", {best.job.recompute} recomputation"
    kept = f", {' and '.join(sorted(best.job.offload))} in the host's memory" if best.job.offload else ""
    return f"{ranks}{zero}{again}{kept}"


def count_words(number: float) -> str:
    size, unit = next(
        (each for each in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million")) if number >= each[0]), (1, "")
    )
    return f"{number / size:,.3g}{unit}" if unit else f"{number:,.0f}"


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(value) if isinstance(value, list) else str(value)


def defined(items: Sequence[tuple[str, str]]) -> str:
    """Returns names, each with what is said of it."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(text)}</dd>' for name, text in items)}</dl>"


def listed(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"
