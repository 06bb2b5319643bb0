"""Memory and time as stacked bars.

    memory_chart([Row(name="dp4 tp2", settings="micro-batch 1", memory=memory)])
    step_bar(time), step_table(time)

Bars of one chart share a scale and begin at 0. What needs far more than the device has runs out of the picture, with a
torn edge, so that the others can be told apart; its number stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from shardline.planning.cluster.figures import GIB, gib, label, scroll_table, seconds, share, svg, ticks

if TYPE_CHECKING:
    from shardline.planning.cluster.job import Memory, Time

__all__ = [
    "MEMORY",
    "SERVING",
    "STEP",
    "VERDICTS",
    "Limit",
    "Row",
    "badge",
    "memory_chart",
    "memory_table",
    "step_bar",
    "step_table",
    "verdict",
]

# By part, in the order of the bars: what it is called, and for a narrow place.
Names = Mapping[str, tuple[str, str]]
MEMORY = {
    "weights": ("weights", "weights"),
    "gradients": ("gradients", "grads"),
    "optimizer": ("optimizer states", "optimizer"),
    "activations": ("activations", "activ."),
    "logits": ("logits and loss", "logits"),
    "communication": ("gathered weights and buffers", "buffers"),
    "runtime": ("driver and libraries", "runtime"),
    "fragmentation": ("held unused by the allocator", "unused"),
}
SERVING = {
    "weights": ("weights", "weights"),
    "activations": ("activations of a step", "activ."),
    "runtime": ("driver, libraries, recorded graphs", "runtime"),
    "cache": ("key and value cache", "cache"),
}
STEP = {
    "compute": ("matrix products, other kernels", "compute"),
    "attention": ("attention", "attention"),
    "recompute": ("activations computed again", "recompute"),
    "host": ("waiting for Python to launch kernels", "host"),
    "tensor": ("waiting for tensor ranks", "tensor"),
    "context": ("waiting for context ranks", "context"),
    "data": ("waiting for data ranks", "data"),
    "pipeline": ("sending between pipeline ranks", "pipeline"),
    "bubble": ("the pipeline's bubble: nothing to do", "bubble"),
    "optimizer": ("the optimizer's step", "optimizer"),
    "offload": ("states on the way to the host and back", "offload"),
}
# Class and mark of a verdict; the mark says it without colour.
VERDICTS = {"fits": ("good", "&#10003;"), "tight": ("fair", "!"), "does not fit": ("bad", "&#10005;")}

_BAR, _TOP, _MIDDLE = 24, 7, -16  # a bar's height; where it begins in a step's picture, and above a row's middle
_CUT = 1.5  # times the device's memory: what needs more runs out of the picture
_TORN = "M1 -2 L-5 2 L1 6 L-5 10 L1 14 L-5 18 L1 22 L-5 26 L3 26 L3 -2 Z"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One bar. `group` begins a new heading above it; `words` are the verdict where memory alone does not say it."""

    name: str
    settings: str
    memory: Memory
    chosen: bool = False
    group: str = ""
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What the line through all bars is: `more` is said beside its size where there is room, `what` in the legend."""

    more: str = ""
    what: str = "what the device has"


def verdict(memory: Memory) -> str:
    return badge(memory.verdict)


def badge(words: str) -> str:
    css, mark = VERDICTS.get(words, VERDICTS["does not fit"])
    return f'<span class="verdict {css}"><span aria-hidden="true">{mark}</span> {words}</span>'


def memory_chart(rows: Sequence[Row], names: Names = MEMORY, *, line: Limit = Limit()) -> str:
    """Returns a legend and one bar a row, with the device's limit through all of them."""
    top, capacity = _scale(rows), rows[0].memory.capacity_bytes
    limit = 100 * capacity / top
    room = 30 if line.more else 20  # percent that half of its text takes
    side = "end" if limit > 100 - room else "start" if limit < room else "middle"
    axis = "".join(
        f'<text class="tick {"start" if not tick else "end" if tick * GIB > 0.94 * top else "middle"}" '
        f'x="{100 * tick * GIB / top:.3f}%" y="13">{tick:,g}{"" if tick else " GiB"}</text>'
        for tick in ticks(top / GIB)
    )
    through = f'<svg width="100%" height="26" aria-hidden="true">{_limit(limit)}</svg>'
    texts = {f"{side} wide": line.more, f"{side} narrow": ""} if line.more else {side: ""}
    said = "".join(
        f'<text class="limit {css}" x="{limit:.3f}%" y="12">limit {gib(capacity)}{escape(more)}</text>'
        for css, more in texts.items()
    )
    items = []
    for row in rows:
        if row.group:
            items.append(f'<li class="row group"><div>{escape(row.group)}</div>{through}<div></div></li>')
        items.append(_row(row, top, names))
    return (
        f"{_legend(names, rows, line)}"
        '<div class="row head" aria-hidden="true"><div></div>'
        f'<svg width="100%" height="18">{said}</svg><div></div></div>'
        f'<ul class="rows">{"".join(items)}</ul>'
        '<div class="row head" aria-hidden="true"><div></div>'
        f'<svg width="100%" height="18">{axis}</svg><div></div></div>'
    )


def memory_table(rows: Sequence[Row], names: Names = MEMORY) -> str:
    """Returns the numbers behind the bars, GiB by part."""
    used = [name for name in names if any(row.memory.parts.get(name) for row in rows)]
    banded = _is_banded(rows)
    head = "".join(f'<th scope="col">{words}</th>' for words in (*(names[name][0] for name in used), "all"))
    body = "".join(
        f'<tr><th scope="row">{escape(row.name)}<span class="soft">{escape(row.settings)}</span></th>'
        + "".join(f"<td>{row.memory.parts.get(name, 0.0) / GIB:,.2f}</td>" for name in used)
        + f"<td>{row.memory.expected_bytes / GIB:,.2f}</td>"
        + (f"<td>{row.memory.low_bytes / GIB:,.1f} to {row.memory.high_bytes / GIB:,.1f}</td>" if banded else "")
        + "</tr>"
        for row in rows
    )
    head = f'<th scope="col">GiB of the fattest device</th>{head}' + ('<th scope="col">band</th>' if banded else "")
    return scroll_table("Memory by part", head, body, css="parts")


def step_bar(time: Time) -> str:
    """Returns one bar of a step's parts."""
    body, x = "", 0.0
    for name, value in _used(time):
        width, percent = 100 * value / time.step_s, f"{value / time.step_s:.0%}"
        words, short = STEP[name]
        body += _segment(name, x, width, _TOP, f"{words}: {seconds(value)}, {share(value / time.step_s)}")
        texts = [f"{short} {percent}", short, percent]
        body += label(texts, x=x + width / 2, width=width, y=_TOP + 16, css=name, wide=900)
        x += width
    desc = ", ".join(f"{STEP[name][0]} {share(value / time.step_s)}" for name, value in _used(time))
    title = f"A step of {seconds(time.step_s)}"
    return svg(body, height=_BAR + 2 * _TOP, title=title, desc=desc, css="step")


def step_table(time: Time) -> str:
    """Returns the numbers behind it."""
    rows = "".join(
        f'<tr><th scope="row"><span class="swatch {name}"></span>{STEP[name][0]}</th>'
        f"<td>{seconds(value)}</td><td>{share(value / time.step_s)}</td></tr>"
        for name, value in _used(time)
    )
    return (
        '<table class="times"><thead><tr><th scope="col">on the slowest device</th><th scope="col">time</th>'
        f'<th scope="col">share</th></tr></thead><tbody>{rows}</tbody><tfoot><tr><th scope="row">one step</th>'
        f"<td>{seconds(time.step_s)}</td><td>100%</td></tr></tfoot></table>"
    )


def _used(time: Time) -> list[tuple[str, float]]:
    return [(name, time.parts[name]) for name in STEP if time.parts.get(name, 0.0) > 0]


def _is_banded(rows: Sequence[Row]) -> bool:
    return any(row.memory.low_bytes < row.memory.high_bytes for row in rows)


def _legend(names: Names, rows: Sequence[Row], line: Limit) -> str:
    keys = "".join(f'<li><span class="swatch {name}"></span>{words}</li>' for name, (words, _) in names.items())
    hosts = any(row.memory.host_bytes for row in rows)
    host = '<li><span class="swatch kept"></span>memory of a host, whose limit is the same line</li>' if hosts else ""
    band = '<li><span class="swatch band"></span>low to high</li>' if _is_banded(rows) else ""
    return (
        f'<ul class="legend">{keys}<li><span class="swatch limit"></span>{escape(line.what)}</li>'
        '<li><span class="swatch over"></span>beyond it</li>'
        f"{band}{host}</ul>"
    )


def _scale(rows: Sequence[Row]) -> float:
    """Returns the bytes at the right edge: all of the least, and the others if they are not far too much."""
    capacity = rows[0].memory.capacity_bytes
    highs = [row.memory.high_bytes for row in rows]
    return 1.03 * max(min(max(highs), _CUT * capacity), min(highs), capacity)


def _row(row: Row, top: float, names: Names) -> str:
    memory = row.memory
    parts = ", ".join(f"{names[name][0]} {gib(memory.parts[name])}" for name in names if memory.parts.get(name))
    band = f" ({gib(memory.low_bytes)} to {gib(memory.high_bytes)})" if _is_banded([row]) else ""
    desc = f"{gib(memory.expected_bytes)}{band} of {gib(memory.capacity_bytes)}: {parts}."
    host = ""
    if memory.host_bytes:
        amount = f"host {memory.host_bytes / GIB:,.0f} of {memory.host_capacity_bytes / GIB:,.0f}"
        host = f'<span class="soft">{amount}</span>'
        desc += f" Of the host {gib(memory.host_bytes)} of {gib(memory.host_capacity_bytes)}."
    said = badge(row.words or memory.verdict)
    css, height = ("memory tall", 56) if host else ("memory", 44)
    picture = svg(_bar(memory, top, names), height=height, title=f"Memory of {row.name}", desc=desc, css=css)
    return (
        f'<li class="row{" chosen" if row.chosen else ""}"><div class="who">'
        f'<span class="name">{escape(row.name)}</span><span class="soft">{escape(row.settings)}</span></div>{picture}'
        f'<div class="much"><span class="name">{gib(memory.expected_bytes)}</span>{said}{host}</div></li>'
    )


def _bar(memory: Memory, top: float, names: Names) -> str:
    grid = "".join(
        f'<line class="grid" x1="{x:.3f}%" x2="{x:.3f}%" y1="0" y2="100%"/>'
        for x in (100 * tick * GIB / top for tick in ticks(top / GIB))
    )
    limit = 100 * memory.capacity_bytes / top
    body = "".join((*_parts(memory, top, names), *_band(memory, top), *_host(memory, limit)))
    torn = ""
    if memory.expected_bytes > top:
        torn = f'<svg x="100%" y="50%"><path class="torn" transform="translate(0 {_MIDDLE})" d="{_TORN}"/></svg>'
    # The row may be higher than its picture needs, where names are long: the bar stays in its middle.
    return f'{grid}<svg y="50%">{body}</svg>{_limit(limit)}{torn}'


def _limit(x: float) -> str:
    return f'<line class="limit" x1="{x:.3f}%" x2="{x:.3f}%" y1="0" y2="100%"/>'


def _parts(memory: Memory, top: float, names: Names) -> Iterator[str]:
    scale, at = 100 / top, 0.0
    limit, total = memory.capacity_bytes * scale, memory.expected_bytes * scale
    labels = []
    for name, (words, short) in names.items():
        count = memory.parts.get(name, 0.0)
        if not count:
            continue
        width = count * scale
        yield _segment(name, at, width, _MIDDLE, f"{words}: {gib(count)}, {share(count / memory.expected_bytes)}")
        begin, end = _free(at, at + width, limit)
        if end > begin:
            number = f"{count / GIB:,.1f}"
            texts = [f"{words} {number}", f"{short} {number}", short, number]
            labels.append(label(texts, x=(begin + end) / 2, width=end - begin, y=_MIDDLE + 16, css=name))
        at += width
    if total > limit * (1 + 1e-9):  # what fills it exactly is not beyond it
        yield f'<rect class="over" x="{limit:.3f}%" y="{_MIDDLE - 6}" width="{total - limit:.3f}%" height="4"/>'
    yield from labels


def _free(begin: float, end: float, limit: float) -> tuple[float, float]:
    """Returns the larger piece of what is seen of a part on one side of the limit's line."""
    end = min(end, 98.5)
    if begin < limit < end:
        return (begin, limit) if limit - begin >= end - limit else (limit, end)
    return begin, end


def _band(memory: Memory, top: float) -> Iterator[str]:
    scale = 100 / top
    low, high, y = memory.low_bytes * scale, memory.high_bytes * scale, _MIDDLE + _BAR + 6
    if low < min(high, 100):
        yield f'<line class="band" x1="{low:.3f}%" x2="{high:.3f}%" y1="{y}" y2="{y}"/>'
        for x in (low, high):
            yield f'<line class="band" x1="{x:.3f}%" x2="{x:.3f}%" y1="{y - 3}" y2="{y + 3}"/>'


def _host(memory: Memory, limit: float) -> Iterator[str]:
    """What is kept in the host's memory, drawn so that the limit's line is the host's too."""
    if not memory.host_bytes or not memory.host_capacity_bytes:
        return
    width, y = limit * memory.host_bytes / memory.host_capacity_bytes, _MIDDLE + _BAR + 12
    yield f'<rect class="kept" x="0%" y="{y}" width="{width:.3f}%" height="5"/>'
    if width > limit:
        yield f'<rect class="over" x="{limit:.3f}%" y="{y}" width="{width - limit:.3f}%" height="5"/>'


def _segment(name: str, x: float, width: float, y: int, title: str) -> str:
    return (
        f'<rect class="part {name}" x="{x:.3f}%" y="{y}" width="{width:.3f}%" height="{_BAR}">'
        f"<title>{escape(title)}</title></rect>"
    )
