"""RUN/report.html: one self-contained page that tells what a run did, from the files of the run directory.

    path = write_report("runs/my-run")

It reads config.yaml, plan.json, metrics.jsonl and, where they are there, summary.json; any of them may be missing,
short or torn at its end. The page needs no network and no script. A running job can rewrite it as often as it likes:
the write is atomic and takes milliseconds.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import yaml

from shardline import __version__
from shardline.training.charts import Band, Line, format_number, line_chart

__all__ = ["write_report"]

_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "logits": "logits and loss",
    "communication": "gather buffers",
    "checkpoint": "copy for saves",
    "allocator": "kept by the allocator",
    "runtime": "Python and libraries",
}
_SUMMARY = {
    "hf_max_abs_logit": ("transformers and Shardline, largest logit difference", ""),
    "train_serve_max_abs_logprob": ("trainer and server, largest log-probability difference", ""),
    "ttft_s": ("time to first served token", "s"),
    "tokens_per_s": ("served tokens per second", ""),
    "wall_s": ("whole demo", "s"),
}


def write_report(run_dir: str | Path) -> Path:
    """Writes and returns RUN/report.html."""
    folder = Path(run_dir)
    run = _Run.read(folder)
    path = folder / "report.html"
    part = folder / f".report-{os.getpid()}.tmp"
    part.write_text(_page(run), encoding="utf-8")
    os.replace(part, path)
    return path


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The run directory's files, as far as they can be read."""

    name: str
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    num_bad_lines: int = 0
    _columns: dict[str, list[float | None]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> _Run:
        config_text = _text(folder / "config.yaml")
        rows, num_bad_lines = read_metrics(folder / "metrics.jsonl")
        return cls(
            name=folder.resolve().name,
            config_text=config_text,
            config=_mapping(config_text, yaml.safe_load),
            plan=_mapping(_text(folder / "plan.json"), json.loads),
            summary=_mapping(_text(folder / "summary.json"), json.loads),
            rows=rows,
            num_bad_lines=num_bad_lines,
        )

    def column(self, name: str) -> list[float | None]:
        if name not in self._columns:
            self._columns[name] = [_number(row.get(name)) for row in self.rows]
        return self._columns[name]

    def finite(self, name: str) -> list[float]:
        return [value for value in self.column(name) if value is not None]

    def setting(self, *keys: str) -> Any:
        return _dig(self.config, *keys)

    @property
    def planned(self) -> dict[str, Any]:
        """The plan's entry for the layout that ran."""
        configured = self.plan.get("configured")
        return configured if isinstance(configured, dict) else self.plan

    @property
    def heldout(self) -> list[tuple[float, float]]:
        """(step, held-out loss) of each evaluation: metrics carry the last one forward, so changes mark new ones.

        The first is that from before the first step, unless every step evaluates.
        """
        points: list[tuple[float, float]] = []
        for step, loss in zip(self.column("step"), self.column("heldout_loss"), strict=True):
            if step is not None and loss is not None and (not points or points[-1][1] != loss):
                before = not points and self.setting("train", "eval_every") != 1
                points.append((step - before, loss))
        return points


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns (rows, number of complete lines that are no JSON object); a torn last line is no fault."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return [], 0
    rows, num_bad_lines = [], 0
    decode = msgspec.json.Decoder().decode
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            row = _mapping(line.decode("utf-8", "replace"), json.loads)  # NaN and Infinity are Python's own
        if isinstance(row, dict) and row:
            rows.append(row)
        elif index < len(lines) - 1:
            num_bad_lines += 1
    return rows, num_bad_lines


def _page(run: _Run) -> str:
    sections = [
        _header(run),
        _tiles(run),
        '<section class="charts">',
        *_charts(run),
        "</section>",
        _memory(run),
        _layout(run),
        _verification(run),
        _facts(run),
        f"<footer>Written by Shardline {escape(__version__)}. Everything here comes from this run's folder.</footer>",
    ]
    template = resources.files("shardline.training").joinpath("report_page.html").read_text(encoding="utf-8")
    title = f"{escape(run.name)} - Shardline run"
    return string.Template(template).substitute(title=title, body="\n".join(sections))


def _header(run: _Run) -> str:
    model = run.setting("model", "path") or run.setting("model", "preset")
    model_name = Path(str(model)).name if model else "a model"
    parameters = _number(run.plan.get("num_parameters"))
    size = f" ({_count(parameters)} parameters)" if parameters else ""
    source = run.setting("data", "source")
    on = f" on {Path(str(source)).name}" if source else ""
    return (
        f'<header><p class="kicker">Training run</p><h1>{escape(run.name)}</h1>'
        f'<p class="lead">{escape(model_name + size + on)}. {escape(_status(run))}</p>{_notes(run)}</header>'
    )


def _status(run: _Run) -> str:
    total = _number(run.setting("train", "steps"))
    steps = run.finite("step")
    if not steps:
        return "No step is recorded yet."
    done = int(steps[-1])
    if total is None:
        return f"{done:,} steps are recorded."
    return f"All {done:,} steps done." if done >= total else f"Step {done:,} of {int(total):,}."


def _notes(run: _Run) -> str:
    notes = []
    if run.num_bad_lines:
        notes.append(f"{run.num_bad_lines} line(s) of metrics.jsonl can't be read and are left out.")
    if len(run.finite("loss")) < len(run.rows):
        notes.append(f"{len(run.rows) - len(run.finite('loss'))} step(s) have no finite loss.")
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def _tiles(run: _Run) -> str:
    tiles = []
    losses, heldout = run.finite("loss"), run.heldout
    if len(heldout) > 1 and heldout[0][1] > 0:
        first, last = heldout[0][1], heldout[-1][1]
        change = 100 * (last - first) / first
        tiles.append(("held-out loss", f"{last:.3f}", f"from {first:.3f} ({change:+.1f} %)"))
    elif heldout:
        tiles.append(("held-out loss", f"{heldout[-1][1]:.3f}", "nats per token"))
    if losses:
        tiles.append(("training loss", f"{losses[-1]:.3f}", f"from {losses[0]:.3f}"))
    speeds = run.finite("tokens_per_s")
    if speeds:
        mfu = run.finite("mfu")
        under = f"median; MFU {100 * statistics.median(mfu):.0f} %" if mfu else "median"
        tiles.append(("tokens per second", f"{statistics.median(speeds):,.0f}", under))
    tokens = run.finite("tokens")
    if tokens:
        seconds = sum(run.finite("step_s"))
        tiles.append(("tokens trained on", _count(tokens[-1]), f"in {_duration(seconds)} of steps"))
    measured, predicted = max(run.finite("memory_gib"), default=None), _predicted(run, "total")
    if measured is not None:
        under = "fattest process"
        if predicted:
            under = f"predicted {predicted:.2f} ({100 * (predicted - measured) / measured:+.0f} %)"
        tiles.append(("memory, GiB", f"{measured:.2f}", under))
    body = "".join(
        f'<div class="tile"><p class="label">{escape(label)}</p><p class="value">{escape(value)}</p>'
        f'<p class="under">{escape(under)}</p></div>'
        for label, value, under in tiles
    )
    return f'<section class="tiles">{body}</section>' if body else ""


def _charts(run: _Run) -> Iterable[str]:
    steps = run.column("step")
    losses = run.column("loss")
    lines = [Line(name="each step", xs=steps, ys=losses, style="faint")]
    smooth = _smooth(losses)
    if len(run.finite("loss")) > 20:
        lines.append(Line(name="training, smoothed", xs=steps, ys=smooth, style="a"))
    if run.heldout:
        xs, ys = zip(*run.heldout, strict=True)
        lines.append(Line(name="held-out", xs=xs, ys=ys, style="b", dots=True))
    yield _card("Loss", "nats per token", lines)
    yield _card("Learning rate", "", [Line(name="", xs=steps, ys=run.column("learning_rate"), style="a")], zero=True)
    speed = [Line(name="", xs=steps, ys=run.column("tokens_per_s"), style="a")]
    yield _card("Throughput", "tokens per second", speed, zero=True)
    memory = [Line(name="measured", xs=steps, ys=run.column("memory_gib"), style="a")]
    total = _predicted(run, "total")
    band = None
    if total is not None:
        low, high = _predicted(run, "low"), _predicted(run, "high")
        band = Band(name="predicted", low=low or total, value=total, high=high or total)
    yield _card("Memory of the fattest process", "GiB", memory, zero=True, band=band)
    norms = [Line(name="", xs=steps, ys=run.column("grad_norm"), style="a")]
    yield _card("Gradient norm", "before clipping", norms, zero=True)
    times = [
        Line(name="step", xs=steps, ys=run.column("step_s"), style="a"),
        Line(name="of it waiting for data", xs=steps, ys=run.column("data_wait_s"), style="b"),
    ]
    yield _card("Time of a step", "seconds", times, zero=True)


def _card(title: str, unit: str, lines: Sequence[Line], *, zero: bool = False, band: Band | None = None) -> str:
    keys = [(line.name, line.style) for line in lines if line.name]
    if band is not None:
        keys.append((band.name, "level"))
    legend = "".join(f'<span class="key {style}">{escape(name)}</span>' for name, style in keys)
    chart = line_chart(title=title, x_label="step", y_label=unit, lines=lines, band=band, from_zero=zero)
    return f'<figure class="card"><figcaption><h2>{escape(title)}</h2>{legend}</figcaption>{chart}</figure>'


def _memory(run: _Run) -> str:
    total = _predicted(run, "total")
    parts = _dig(run.planned, "memory_gib", "parts")
    if total is None or not isinstance(parts, dict):
        return ""
    sizes = [(name, size) for name in _PARTS if (size := _number(parts.get(name))) is not None]
    measured = max(run.finite("memory_gib"), default=None)
    high = _predicted(run, "high") or total
    scale = 100 / max(high, measured or 0.0, 1e-9)
    bar = "".join(
        f'<span class="part p{index}" style="width:{size * scale:.2f}%" title="{_PARTS[name]}"></span>'
        for index, (name, size) in enumerate(sizes)
    )
    rows = "".join(
        f'<tr><th scope="row"><span class="swatch p{index}"></span>{_PARTS[name]}</th><td>{size:.2f}</td><td></td></tr>'
        for index, (name, size) in enumerate(sizes)
    )
    seen, marker, difference = "not measured yet", "", ""
    if measured is not None:
        seen = f"{measured:.2f}"
        marker = f'<span class="marker" style="left:{measured * scale:.2f}%"></span>'
        percent = 100 * (total - measured) / measured
        difference = (
            f"<p>The prediction is {abs(percent):.1f} % {'above' if percent >= 0 else 'below'} the measured peak"
        )
        difference += ", the black mark on the bar.</p>"
    low = _predicted(run, "low") or total
    phase = _dig(run.planned, "memory_gib", "phase")
    moment = {
        "loss": "when the loss is computed",
        "backward": "in the backward pass",
        "optimizer": "in the optimizer's step",
    }.get(str(phase), "at its peak")
    return (
        '<section class="card wide"><h2>Memory, predicted against measured</h2>'
        f'<div class="bar">{bar}{marker}</div>{difference}'
        f"<table><thead><tr><th>GiB in the fattest process, {escape(moment)}</th>"
        f"<th>predicted</th><th>measured</th></tr></thead><tbody>{rows}"
        f'<tr class="sum"><th scope="row">total</th><td>{total:.2f}</td><td>{seen}</td></tr>'
        f'<tr><th scope="row">band</th><td>{low:.2f} to {high:.2f}</td><td></td></tr></tbody></table></section>'
    )


def _layout(run: _Run) -> str:
    layout = run.planned.get("layout")
    if not isinstance(layout, dict):
        return ""
    words = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in layout.items())
    reasons = run.plan.get("reasons")
    items = "".join(f"<li>{escape(str(line))}</li>" for line in reasons) if isinstance(reasons, list) else ""
    return (
        f'<section class="card wide"><h2>Layout</h2><p><strong>{escape(words)}</strong></p><ul>{items}</ul></section>'
    )


def _verification(run: _Run) -> str:
    rows = []
    for key, (words, unit) in _SUMMARY.items():
        value = _number(run.summary.get(key))
        if value is not None:
            rows.append(f'<tr><th scope="row">{words}</th><td>{format_number(value)} {unit}</td></tr>')
    reply = run.summary.get("reply")
    quote = f"<blockquote>{escape(reply)}</blockquote>" if isinstance(reply, str) and reply else ""
    if not rows and not quote:
        return ""
    return f'<section class="card wide"><h2>Verified after training</h2><table>{"".join(rows)}</table>{quote}</section>'


def _facts(run: _Run) -> str:
    machine = run.plan.get("machine")
    facts = []
    if isinstance(machine, dict):
        packages = machine.get("packages")
        torch = packages.get("torch") if isinstance(packages, dict) else None
        memory = _number(machine.get("memory_bytes"))
        facts = [
            ("machine", machine.get("cpu_name")),
            ("cores", machine.get("num_cores")),
            ("memory", f"{memory / 2**30:.1f} GiB" if memory else None),
            ("system", machine.get("os")),
            ("Python", machine.get("python_version")),
            ("torch", torch),
            ("planned", run.plan.get("date")),
        ]
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td>{escape(str(value))}</td></tr>' for name, value in facts if value
    )
    table = f"<table>{rows}</table>" if rows else ""
    config = (
        f"<details><summary>Resolved config</summary><pre>{escape(run.config_text)}</pre></details>"
        if run.config_text
        else ""
    )
    return f'<section class="card wide"><h2>Where and how</h2>{table}{config}</section>' if table or config else ""


def _smooth(values: Sequence[float | None]) -> list[float | None]:
    """Exponential average over about a fiftieth of the run; missing values stay missing."""
    keep = 1 - 1 / max(5.0, len(values) / 50)
    result: list[float | None] = []
    total, weight = 0.0, 0.0
    for value in values:
        if value is None:
            result.append(None)
            continue
        total, weight = keep * total + value, keep * weight + 1
        result.append(total / weight)
    return result


def _predicted(run: _Run, key: str) -> float | None:
    return _number(_dig(run.planned, "memory_gib", key))


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _dig(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _mapping(text: str, parse: Any) -> dict[str, Any]:
    """What `parse` makes of `text` when that is a mapping; a file that is torn or something else counts as absent."""
    try:
        value = parse(text)
    except (ValueError, yaml.YAMLError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _count(value: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"
