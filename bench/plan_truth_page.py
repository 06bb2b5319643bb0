"""docs/plan-accuracy.md and its plot, from scored predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from shardline.planning.cluster.scoring import errors_of
from shardline.planning.cluster.truth import Prediction, known_settings

__all__ = ["page", "plot"]

_COLOURS = (
    "#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f", "#6b7280", "#92400e",
    "#1e40af", "#0f766e", "#a21caf", "#334155", "#ca8a04", "#16a34a", "#9f1239",
)  # fmt: skip
_COLUMNS = {"memory": "measured_mem_gib", "tokens_per_s": "measured_tokens_per_s_per_gpu"}
_UNITS = {"memory": "GiB a device", "tokens_per_s": "tokens/s a device"}
_TITLES = {"memory": "Memory", "tokens_per_s": "Throughput"}


@cache
def _why() -> dict[tuple[int, str], str]:
    """Returns (row, figure) -> why it is far off."""
    data = yaml.safe_load((Path(__file__).parent / "plan_truth_why.yaml").read_text(encoding="utf-8"))
    return {(entry["row"], entry["figure"]): entry["why"] for entry in data["rows"]}


def page(
    rows: Sequence[dict[str, str]],
    predictions: Sequence[Prediction],
    summary: dict[str, Any],
    left_out: dict[str, dict[str, Any]],
) -> str:
    """Returns the page's Markdown."""
    parts = [
        "# How right the planner is\n",
        "Written by `python bench/plan_truth.py --write`; don't edit it. The 208 published measurements are in",
        "`tests/planning/plan_truth.csv`, each with its source. Constants are per engine and per device, in",
        "`planning/cluster/engines.yaml` and `hardware/catalogue.yaml`, never per row.\n",
        *_targets(summary),
        "![Predicted against measured](plan-accuracy.svg)\n",
        "The diagonal is right, the band is 20 %. Hollow marks are rows that leave out recomputation, ZeRO stage or",
        "dtype.\n",
        *_sources(summary, left_out),
        *_worst(rows, predictions),
        *_skipped(rows, predictions),
        *_method(summary),
    ]
    return "\n".join(parts) + "\n"


def _targets(summary: dict[str, Any]) -> list[str]:
    memory, tokens = summary["memory"]["known"], summary["tokens_per_s"]["known"]
    every = summary["tokens_per_s"]["all"]
    sweep = summary["bloom_tau"]
    wrong = len(summary["wrongly_out_of_memory"])
    lines = [
        "| target, where recomputation, ZeRO stage and dtype are known | reached |",
        "|---|---|",
        f"| memory within 10 % on 75 % of rows | {memory['within_10']:.0%} of {memory['count']} |",
        f"| memory within 20 % on 95 % | {memory['within_20']:.0%} |",
        f"| tokens/s within 20 % on 75 % | {tokens['within_20']:.0%} of {tokens['count']} (all rows: "
        f"{every['within_20']:.0%} of {every['count']}) |",
        f"| no out-of-memory row said to fit | {len(summary['wrongly_fits'])} of {summary['num_out_of_memory']} |",
        f"| at most 10 % of fitting rows said not to | {wrong / summary['num_fitting']:.0%} ({wrong} of "
        f"{summary['num_fitting']}) |",
        f"| Kendall's tau of the BLOOM sweep at least 0.6 | {sweep['tau']:.2f} over {sweep['layouts']} layouts (what "
        f"ran out of memory counts as last); {sweep['tau_of_timed']:.2f} among the {sweep['timed_layouts']} that ran |",
    ]
    return [*lines, ""]


def _sources(summary: dict[str, Any], left_out: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "## By source",
        "\"Left out\" predicts a source's rows as runs of its family's plainest engine, fitted to all other sources",
        "only: what to expect of an engine that nobody has calibrated.\n",
        "| source | figure | rows | within 10 % | within 20 % | median error | bias | left out: within 20 % | median |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for source, kinds in summary["sources"].items():
        for kind, shares in kinds.items():
            held = left_out.get(source, {}).get(kind, {}).get("all", {"count": 0})
            cells = f"{held['within_20']:.0%} | {held['median']:.0%}" if held["count"] else "- | -"
            lines.append(
                f"| {source} | {_TITLES[kind].lower()} | {shares['count']} | {shares['within_10']:.0%} "
                f"| {shares['within_20']:.0%} | {shares['median']:.1%} | {shares['bias']:+.0%} | {cells} |"
            )
    totals = {}
    for kind in _COLUMNS:
        every = [
            (held[kind]["all"]["count"], held[kind]["all"]["within_20"])
            for held in left_out.values()
            if held[kind]["all"]["count"]
        ]
        count = sum(number for number, _ in every)
        totals[kind] = sum(number * share for number, share in every) / count, count
    lines.append("")
    lines.append(
        "All left-out rows together, also those that leave out settings: "
        + ", ".join(
            f"{_TITLES[kind].lower()} within 20 % on {share:.0%} of {count}" for kind, (share, count) in totals.items()
        )
        + ".\n"
    )
    return lines


def _worst(rows: Sequence[dict[str, str]], predictions: Sequence[Prediction]) -> list[str]:
    found = sorted(
        (
            (abs(math.log(1 + error)), index, kind, error)
            for kind in _COLUMNS
            for index, error in errors_of(kind, rows, predictions)
        ),
        reverse=True,
    )[:10]
    lines = [
        "## The worst ten",
        "| row | run | figure | measured | predicted | error | why |",
        "|---|---|---|---|---|---|---|",
    ]
    for _, index, kind, error in found:
        row, prediction = rows[index], predictions[index]
        got = prediction.memory_gib if kind == "memory" else prediction.tokens_per_s_per_device
        assert got is not None
        why = _why().get((index, kind), "Not looked into yet.")
        settings = "" if known_settings(row) else " (settings left out)"
        lines.append(
            f"| {index} | {row['source']}: {row['model']} on {row['n_gpus']} x {row['hardware']}{settings} | "
            f"{_TITLES[kind].lower()} | {float(row[_COLUMNS[kind]]):.4g} | {got:.4g} | {error:+.0%} | {why} |"
        )
    return [*lines, ""]


def _skipped(rows: Sequence[dict[str, str]], predictions: Sequence[Prediction]) -> list[str]:
    lines = ["## Not predicted", "| row | run | why |", "|---|---|---|"]
    for index, (row, prediction) in enumerate(zip(rows, predictions, strict=True)):
        if prediction.skipped:
            lines.append(f"| {index} | {row['source']}: {row['model']} | {prediction.skipped} |")
    return [*lines, ""]


def _method(summary: dict[str, Any]) -> list[str]:
    return [
        "## What is compared",
        "- Memory as its publisher counts it (`measure` in `planning/cluster/sources.yaml`): allocated tensors, what",
        "  the allocator reserved, or all of the device. GB are taken as GiB where a table is from torch.",
        "- Tokens/s of one device. MFU and TFLOP/s are not compared across sources: conventions differ by 12 % at",
        "  8,192 tokens. The identities between tokens/s and published TFLOP/s are tests",
        "  (`tests/planning/cluster/test_known_answers.py`).",
        "- What a row leaves out is chosen as its authors would have: the cheapest recomputation that fits, the",
        "  micro-batch and split that give the most tokens. Its `assumed` list says what that was.",
        f"- {summary['skipped']} rows can't be predicted in part or at all; the table above says why.",
        "- A row fits when the prediction, less half of what the allocator holds unused (it gives that back before it",
        "  gives up), is within the device's memory.",
    ]


def plot(rows: Sequence[dict[str, str]], predictions: Sequence[Prediction]) -> str:
    """Returns an SVG picture: predicted against measured, memory beside throughput, a colour a source."""
    sources = [
        source
        for source in dict.fromkeys(row["source"] for row in rows)
        if any(rows[i]["source"] == source for kind in _COLUMNS for i, _ in errors_of(kind, rows, predictions))
    ]
    colour = {source: _COLOURS[i % len(_COLOURS)] for i, source in enumerate(sources)}
    width, side, top = 1080, 400, 50
    height = top + side + 70 + 20 * math.ceil(len(sources) / 3)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#1f2937">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for panel, kind in enumerate(_COLUMNS):
        lines += _panel(rows, predictions, kind, left=80 + panel * 530, top=top, side=side, colour=colour)
    for i, source in enumerate(sources):
        x, y = 60 + (i % 3) * 340, top + side + 70 + (i // 3) * 20
        lines.append(f'<circle cx="{x}" cy="{y - 4}" r="5" fill="{colour[source]}"/>')
        lines.append(f'<text x="{x + 12}" y="{y}">{_escape(source)}</text>')
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _panel(
    rows: Sequence[dict[str, str]],
    predictions: Sequence[Prediction],
    kind: str,
    *,
    left: int,
    top: int,
    side: int,
    colour: dict[str, str],
) -> list[str]:
    points = [(index, float(rows[index][_COLUMNS[kind]]), error) for index, error in errors_of(kind, rows, predictions)]
    values = [value for _, measured, error in points for value in (measured, measured * (1 + error))]
    low, high = math.log10(min(values)) - 0.08, math.log10(max(values)) + 0.08

    def at(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * side

    band = math.log10(1.2) / (high - low) * side
    x0, y0 = left, top + side
    clip = f"clip-{kind}"
    corners = (x0, y0 - band), (x0 + side, top - band), (x0 + side, top + band), (x0, y0 + band)
    outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    lines = [
        f'<clipPath id="{clip}"><rect x="{x0}" y="{top}" width="{side}" height="{side}"/></clipPath>',
        f'<text x="{x0}" y="{top - 16}" font-size="15" font-weight="600">{_TITLES[kind]}, {_UNITS[kind]}</text>',
        f'<rect x="{x0}" y="{top}" width="{side}" height="{side}" fill="#f9fafb" stroke="#d1d5db"/>',
        f'<g clip-path="url(#{clip})">',
        f'<polygon points="{outline}" fill="#dbeafe"/>',
        f'<line x1="{x0}" y1="{y0}" x2="{x0 + side}" y2="{top}" stroke="#93c5fd"/>',
    ]
    for index, measured, error in points:
        row = rows[index]
        shade = colour[row["source"]]
        fill = shade if known_settings(row) else "none"
        x, y = x0 + at(measured), y0 - at(measured * (1 + error))
        title = _escape(f"row {index}: {row['source']}, {row['model']}: {measured:g}, {error:+.0%}")
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{shade}" fill-opacity="0.75">'
            f"<title>{title}</title></circle>"
        )
    lines.append("</g>")
    for tick in _ticks(10**low, 10**high):
        x, y = x0 + at(tick), y0 - at(tick)
        lines.append(f'<text x="{x:.1f}" y="{y0 + 18}" text-anchor="middle" fill="#6b7280">{tick:g}</text>')
        lines.append(f'<text x="{x0 - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#6b7280">{tick:g}</text>')
    lines.append(f'<text x="{x0 + side / 2}" y="{y0 + 38}" text-anchor="middle">measured</text>')
    lines.append(
        f'<text transform="translate({x0 - 52},{top + side / 2}) rotate(-90)" text-anchor="middle">predicted</text>'
    )
    return lines


def _ticks(low: float, high: float) -> list[float]:
    span = math.log10(high / low)
    steps = (1, 2, 5) if span < 2.5 else (1,)
    return [step * 10**power for power in range(-1, 7) for step in steps if low <= step * 10**power <= high]


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
