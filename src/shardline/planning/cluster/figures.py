"""Figures in words and the pieces that pictures on a page share: numbers, ticks, and one SVG element.

    gib(bytes)          "61.1 GiB", "1,078 GiB"
    seconds(0.0123)     "12.3 ms"
    ticks(100)          [0, 20, 40, 60, 80, 100]
    svg(body, height=44, title="dp8", desc="...")
    scroll_table("The layouts", head, body)

A picture is as wide as its place: what is drawn says where it is in percent of the width, so text keeps its size on a
telephone and on paper. Its colours come from the page's CSS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

__all__ = ["GIB", "gib", "label", "scroll_table", "seconds", "share", "svg", "three", "ticks", "time_ticks"]

GIB = 1 << 30
# Pixels that a letter takes at most in the fonts that browsers choose, and what stays free beside a word.
_LETTER, _MARGIN = 7.0, 4
_UNITS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def gib(count: float) -> str:
    size = count / GIB
    return f"{size:,.0f} GiB" if size >= 999.95 else f"{size:.1f} GiB"


def seconds(value: float) -> str:
    """Three digits, in the unit that suits."""
    if value == 0:
        return "0 s"
    size, unit = _unit(value)
    return f"{three(value / size)} {unit}"


def three(value: float) -> str:
    """Three digits, and all of those before the point."""
    value = float(f"{value:.3g}")  # 9.996 is 10.0
    digits = 2 - math.floor(math.log10(value)) if value else 0
    return f"{value:,.{max(0, digits)}f}"


def time_ticks(top: float, *, most: int = 6) -> list[tuple[float, str]]:
    """Returns (seconds, text) on an axis that ends at `top`, round numbers of one unit for the whole axis."""
    size, unit = _unit(top)
    return [(number * size, f"{number:.6g} {unit}") for number in ticks(top / size, most=most)]


def share(value: float) -> str:
    """A percentage, of which little is not nothing."""
    if 0 < value < 0.001:
        return "< 0.1%"
    return f"{value:.1%}" if value < 0.1 else f"{value:.0%}"


def ticks(top: float, *, most: int = 6) -> list[float]:
    """Returns round numbers from 0 to at most `top`, no more than `most` after 0."""
    step = 10 ** math.floor(math.log10(top / most))
    step = next(step * factor for factor in (1, 2, 2.5, 5, 10) if top / (step * factor) <= most)
    return [step * index for index in range(int(top / step * (1 + 1e-9)) + 1)]


def svg(body: str, *, height: int, title: str, desc: str, css: str = "") -> str:
    """Returns an `<svg>` of the page's width that says what it shows."""
    return (
        f'<svg class="{css}" role="img" width="100%" height="{height}">'
        f"<title>{escape(title)}</title><desc>{escape(desc)}</desc>{body}</svg>"
    )


def scroll_table(title: str, head: str, body: str, *, css: str = "") -> str:
    """Returns a table that scrolls sideways in its own place where a screen is too narrow for it."""
    kind = f' class="{css}"' if css else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}"><table{kind}><thead><tr>{head}'
        f"</tr></thead><tbody>{body}</tbody></table></div>"
    )


def label(texts: Sequence[str], *, x: float, width: float, y: int, css: str, wide: int = 560, narrow: int = 300) -> str:
    """Returns the first of `texts` that fits into `width` percent of the picture, centred at `x` percent.

    The picture is at least `wide` pixels wide on a screen and `narrow` on a telephone: each shows the first text that
    fits there, or none.
    """
    found = {}
    for screen, pixels in (("wide", wide), ("narrow", narrow)):
        room = width / 100 * pixels - _MARGIN
        found[screen] = next((text for text in texts if len(text) * _LETTER <= room), "")
    shown = [(text, f" {screen}") for screen, text in found.items()]
    if found["wide"] == found["narrow"]:
        shown = [(found["wide"], "")]
    return "".join(
        f'<text class="on {css}{screen}" x="{x:.3f}%" y="{y}">{escape(text)}</text>' for text, screen in shown if text
    )


def _unit(value: float) -> tuple[float, str]:
    """Returns (seconds, name) of the largest unit of which there are two, or of one second or less, one."""
    return next((each for each in _UNITS if value >= each[0] * (2 if each[0] > 1 else 0.9995)), _UNITS[-1])
