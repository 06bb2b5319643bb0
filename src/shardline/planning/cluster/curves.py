"""A quantity against another as a curve, and by size as columns.

    curve_chart([Point(x=1.0, y=0.3, words="1 request/s: 300 ms")], title="TTFT", desc="...", limit=2.0, mark=4.0)
    column_chart([Column(name="1k", value=172, text="172")], title="Requests at once", desc="...")

Both begin at 0. A limit is a line through the picture, and what is beyond it is drawn in the limit's colour.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from shardline.planning.cluster.figures import seconds, svg, ticks, time_ticks

__all__ = ["Column", "Point", "column_chart", "curve_chart"]

_HEAD, _HEIGHT, _AXIS = 20, 150, 38  # pixels: above the picture, of it, and below it
_UNITS = 1000  # of a curve's own width, which is stretched to that of its place
_FAR = 4.0  # times the curve's highest point: a limit above that is said and not drawn
_APART = 0.03  # of the width: a point nearer to the one that is asked for is not drawn
_COLUMN = 0.62  # of a column's place


@dataclass(frozen=True, kw_only=True)
class Point:
    """`words` are shown under the pointer; without them the curve only passes through."""

    x: float
    y: float
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class Column:
    name: str
    value: float
    text: str
    chosen: bool = False


def curve_chart(
    points: Sequence[Point],
    *,
    title: str,
    desc: str,
    under: str,
    limit: float | None = None,
    mark: Point | None = None,
) -> str:
    """Returns a curve of seconds over what `under` names; `mark` is the point that is asked for."""
    highest = max(point.y for point in points)
    is_near = limit is not None and limit <= _FAR * highest
    top = 1.15 * max(highest, limit if limit is not None and is_near else 0.0)
    right = max(point.x for point in points)
    body = "".join((*_grid(right, top, under), *_limit(limit, top, is_near), *_mark(mark, right)))
    body += "".join(_curve(points, right=right, top=top, limit=limit))
    for point in (*points, *([mark] if mark else [])):
        is_apart = mark is None or point is mark or abs(point.x - mark.x) > _APART * right
        if point.words and is_apart:
            beyond = "" if limit is None or point.y <= limit else " beyond"
            css, size = (f"dot chosen{beyond}", 5.5) if point is mark else (f"dot{beyond}", 3.5)
            place = f'cx="{100 * point.x / right:.3f}%" cy="{_y(point.y, top):.2f}" r="{size}"'
            body += f'<circle class="{css}" {place}><title>{escape(point.words)}</title></circle>'
    scale = "".join(
        f'<text class="tick end" x="100%" y="{_y(tick, top) + 4:.1f}">{text}</text>'
        for tick, text in time_ticks(top, most=5)
    )
    height = _HEAD + _HEIGHT + _AXIS
    return (
        f'<div class="plot"><svg width="100%" height="{height}" aria-hidden="true">{scale}</svg>'
        f"{svg(body, height=height, title=title, desc=desc, css='curves')}</div>"
    )


def column_chart(columns: Sequence[Column], *, title: str, desc: str, limit: float, limit_words: str) -> str:
    """Returns a column for each size, its text above it; `limit` is drawn where a column reaches it."""
    top = max(max(column.value for column in columns), 1e-9)
    wide, floor = 100 / len(columns), _HEAD + _HEIGHT + 16
    body = f'<line class="grid" x1="0%" x2="100%" y1="{floor}" y2="{floor}"/>'
    if top >= limit:
        y = floor - _HEIGHT * limit / top
        body += f'<line class="limit" x1="0%" x2="100%" y1="{y:.2f}" y2="{y:.2f}"/>'
        body += f'<text class="limit end" x="100%" y="12">{escape(limit_words)}</text>'
    for index, column in enumerate(columns):
        height, middle = _HEIGHT * column.value / top, wide * (index + 0.5)
        css = "asked" if column.chosen else "cache"
        body += (
            f'<rect class="part {css}" x="{middle - wide * _COLUMN / 2:.3f}%" y="{floor - height:.2f}" '
            f'width="{wide * _COLUMN:.3f}%" height="{height:.2f}"/>'
            f'<text class="count" x="{middle:.3f}%" y="{floor - height - 6:.2f}">{escape(column.text)}</text>'
            f'<text class="tick{" chosen" if column.chosen else ""}" x="{middle:.3f}%" y="{floor + 17}">'
            f"{escape(column.name)}</text>"
        )
    return svg(body, height=floor + 24, title=title, desc=desc, css="sizes")


def _y(value: float, top: float) -> float:
    return _HEAD + _HEIGHT * (1 - value / top)


def _grid(right: float, top: float, under: str) -> Iterator[str]:
    floor = _HEAD + _HEIGHT
    for tick, _ in time_ticks(top, most=5):
        yield f'<line class="grid" x1="0%" x2="100%" y1="{_y(tick, top):.2f}" y2="{_y(tick, top):.2f}"/>'
    for tick in ticks(right, most=5):
        x = 100 * tick / right
        side = "start" if tick == 0 else "end" if x > 92 else "middle"
        yield f'<line class="grid" x1="{x:.3f}%" x2="{x:.3f}%" y1="{floor}" y2="{floor + 4}"/>'
        yield f'<text class="tick {side}" x="{x:.3f}%" y="{floor + 17}">{tick:,.6g}</text>'
    yield f'<text class="tick" x="50%" y="{floor + 34}">{escape(under)}</text>'


def _limit(limit: float | None, top: float, is_near: bool) -> Iterator[str]:
    if limit is None:
        return
    if not is_near:
        yield f'<text class="limit start" x="0%" y="{_HEAD + 10}">limit {seconds(limit)}, far above</text>'
        return
    y = _y(limit, top)
    yield f'<line class="limit" x1="0%" x2="100%" y1="{y:.2f}" y2="{y:.2f}"/>'
    yield f'<text class="limit start" x="0%" y="{y - 5:.2f}">limit {seconds(limit)}</text>'


def _mark(mark: Point | None, right: float) -> Iterator[str]:
    if mark is None:
        return
    x = 100 * mark.x / right
    side = "end" if x > 75 else "start" if x < 25 else "middle"
    yield f'<line class="mark" x1="{x:.3f}%" x2="{x:.3f}%" y1="{_HEAD - 4}" y2="{_HEAD + _HEIGHT}"/>'
    yield f'<text class="mark {side}" x="{x:.3f}%" y="11">{mark.x:,.6g} asked</text>'


def _curve(points: Sequence[Point], *, right: float, top: float, limit: float | None) -> Iterator[str]:
    """Yields the curve within the limit and beyond it, in units that are stretched to the width."""
    crossing = _crossing(points, limit)
    within = [point for point in points if limit is None or point.y <= limit] + ([crossing] if crossing else [])
    beyond = ([crossing] if crossing else []) + [point for point in points if limit is not None and point.y > limit]
    drawn = ""
    for css, part in (("curve", within), ("curve beyond", beyond)):
        if len(part) > 1:
            path = " ".join(f"{_UNITS * point.x / right:.2f},{_y(point.y, top) - _HEAD:.2f}" for point in part)
            drawn += f'<path class="{css}" d="M{path}"/>'
    yield (
        f'<svg x="0" y="{_HEAD}" width="100%" height="{_HEIGHT}" viewBox="0 0 {_UNITS} {_HEIGHT}" '
        f'preserveAspectRatio="none">{drawn}</svg>'
    )


def _crossing(points: Sequence[Point], limit: float | None) -> Point | None:
    """Returns where a rising curve meets the limit."""
    for before, after in itertools.pairwise(points):
        if limit is not None and before.y <= limit < after.y:
            part = (limit - before.y) / (after.y - before.y)
            return Point(x=before.x + part * (after.x - before.x), y=limit)
    return None
