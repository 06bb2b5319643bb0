"""Line charts as inline SVG: axes with ticks and units, no script, colours from the page's CSS.

    svg = line_chart(
        title="Loss",
        x_label="step",
        y_label="nats per token",
        lines=[Line(name="train", xs=steps, ys=losses, style="a")],
    )

A value that is missing (None) or not finite leaves a gap. Long series are thinned to what the width can show, keeping
the lowest and highest value of each bucket, so that a spike stays visible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Band", "Line", "format_number", "line_chart", "nice_ticks"]

# The drawing's own units; the page scales it. Small enough that 12-unit text can be read on a telephone.
_WIDTH, _HEIGHT = 440, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 12, 40
_MAX_POINTS = 300

Value = float | int | None


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series. `style` is a CSS class that the page defines; `dots` marks every point."""

    name: str
    xs: Sequence[Value]
    ys: Sequence[Value]
    style: str
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Band:
    """A level over the whole width, with its uncertainty."""

    name: str
    low: float
    value: float
    high: float


def line_chart(
    *, title: str, x_label: str, y_label: str, lines: Sequence[Line], band: Band | None = None, from_zero: bool = False
) -> str:
    """Returns one `<svg>` element; a chart without any finite point says so in words."""
    points = [(line, list(_finite(line))) for line in lines]
    xs = [x for _, pairs in points for x, _ in _flat(pairs)]
    ys = [y for _, pairs in points for _, y in _flat(pairs)]
    if not ys:
        return (
            f'<svg viewBox="0 0 {_WIDTH} 90" role="img" aria-label="{escape(title)}: no data">'
            f'<text class="empty" x="{_WIDTH / 2}" y="48" text-anchor="middle">no data yet</text></svg>'
        )
    if band is not None:
        ys += [band.low, band.high]
    if from_zero:
        ys.append(0.0)
    y_ticks = nice_ticks(min(ys), max(ys), count=5)
    low, high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)
    x_low, x_high = min(xs), max(xs)
    if x_high == x_low:
        x_low, x_high = x_low - 1, x_high + 1
    place = _Place(x_low=x_low, x_high=x_high, y_low=low, y_high=high)
    whole = all(float(x).is_integer() for x in xs)
    x_ticks = [tick for tick in nice_ticks(x_low, x_high, count=5, whole=whole) if x_low <= tick <= x_high]
    body = [
        *_grid(place, x_ticks, y_ticks),
        *([] if band is None else _band(place, band)),
        *(_line(place, line, pairs) for line, pairs in points),
        f'<text class="axis" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">'
        f"{escape(x_label)}</text>",
        f'<text class="axis" transform="translate(12 {(_TOP + _HEIGHT - _BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_label)}</text>',
    ]
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'


def nice_ticks(low: float, high: float, *, count: int, whole: bool = False) -> list[float]:
    """Returns about `count` multiples of 1, 2, 2.5 or 5 x 10^k that cover [low, high], lowest first."""
    if high <= low:
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    raw = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    if whole:
        step = float(max(1, math.ceil(step)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def format_number(value: float, *, step: float | None = None) -> str:
    """Returns a short number: enough digits to tell ticks `step` apart, k and M for large ones, 3e-4 for small."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:g}M"
    if size >= 1e4:
        return f"{value / 1e3:g}k"
    if size < 1e-2:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if step is None:
        return f"{value:.4g}"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if not math.isclose(step, round(step, decimals), rel_tol=1e-6):  # 0.25 needs one digit more than 0.2
        decimals += 1
    return f"{value:.{decimals}f}"


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Data coordinates to drawing coordinates."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _grid(place: _Place, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> Iterator[str]:
    left, right, bottom = _LEFT, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    step = y_ticks[1] - y_ticks[0]
    for tick in y_ticks:
        y = place.y(tick)
        yield f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        yield (
            f'<text class="tick" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{format_number(tick, step=step)}</text>"
        )
    for tick in x_ticks:
        x = place.x(tick)
        yield f'<line class="mark" x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 4}"/>'
        yield (
            f'<text class="tick" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">'
            f"{format_number(tick, step=1.0)}</text>"
        )
    yield f'<line class="base" x1="{left}" y1="{bottom}" x2="{right}" y2="{bottom}"/>'


def _band(place: _Place, band: Band) -> Iterator[str]:
    left, right = _LEFT, _WIDTH - _RIGHT
    top, bottom, middle = place.y(band.high), place.y(band.low), place.y(band.value)
    yield f'<rect class="band" x="{left}" y="{top:.1f}" width="{right - left}" height="{bottom - top:.1f}"/>'
    yield f'<line class="level" x1="{left}" y1="{middle:.1f}" x2="{right}" y2="{middle:.1f}"/>'


def _line(place: _Place, line: Line, runs: list[list[tuple[float, float]]]) -> str:
    parts = []
    for run in runs:
        thinned = _thin(run)
        path = " ".join(f"{place.x(x):.1f},{place.y(y):.1f}" for x, y in thinned)
        if len(thinned) > 1:
            parts.append(f'<polyline class="line {line.style}" points="{path}"/>')
        if line.dots or len(thinned) == 1:
            parts += [
                f'<circle class="dot {line.style}" cx="{place.x(x):.1f}" cy="{place.y(y):.1f}" r="3"/>'
                for x, y in thinned
            ]
    return "".join(parts)


def _finite(line: Line) -> Iterator[list[tuple[float, float]]]:
    """Runs of neighbouring points that can be drawn."""
    run: list[tuple[float, float]] = []
    for x, y in zip(line.xs, line.ys, strict=True):
        if x is None or y is None or not math.isfinite(x) or not math.isfinite(y):
            if run:
                yield run
            run = []
        else:
            run.append((float(x), float(y)))
    if run:
        yield run


def _flat(runs: Iterable[list[tuple[float, float]]]) -> Iterator[tuple[float, float]]:
    for run in runs:
        yield from run


def _thin(run: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(run) <= _MAX_POINTS:
        return run
    size = len(run) / (_MAX_POINTS / 2)
    kept = [run[0]]
    for bucket in range(_MAX_POINTS // 2):
        part = run[round(bucket * size) : round((bucket + 1) * size)]
        pair = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(pair)
    kept.append(run[-1])
    return kept
