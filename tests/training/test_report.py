"""report.html from whole, short, torn and hostile run directories."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hardware.machines import machine
from shardline.config import dump_config, load_config
from shardline.models.presets import preset
from shardline.planning.search import make_plan
from shardline.training.charts import Band, Line, format_number, line_chart, nice_ticks
from shardline.training.report import read_metrics, write_report

VOID = {"meta", "br"}


def _row(step: int, **changes: Any) -> dict[str, Any]:
    row = {
        "step": step,
        "tokens": step * 4096,
        "loss": 2.0 + 1 / step,
        "grad_norm": 0.9,
        "learning_rate": 3e-4,
        "tokens_per_s": 431.0,
        "mfu": 0.41,
        "memory_gib": 3.4,
        "step_s": 9.5,
        "data_wait_s": 0.01,
        "heldout_loss": 2.5 if step < 20 else 2.1,
    }
    return row | changes


def _run(folder: Path, rows: list[dict[str, Any]], *, summary: dict[str, Any] | None = None) -> Path:
    config = load_config(None, ["--parallel.zero=2", "--train.steps=40", "--model.preset=smollm2-135m"])
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config))
    plan = make_plan(preset("smollm2-135m"), config, num_processes=2, machine=machine())
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


class _Checker(HTMLParser):
    """Knows that tags close in order, and collects what could leave the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def _check(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    checker = _Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    assert not {"script", "link", "iframe", "img", "object"} & set(checker.tags)
    assert checker.references == []
    assert "url(" not in text
    assert "nan" not in "".join(part for part in text.split('points="')[1:]).lower().partition('"')[0]
    return " ".join(" ".join(checker.words).split())


def test_a_finished_run(tmp_path: Path) -> None:
    summary = {"hf_max_abs_logit": 3.2e-5, "train_serve_max_abs_logprob": 4e-6, "ttft_s": 0.21, "reply": "Paris."}
    path = write_report(_run(tmp_path, [_row(step) for step in range(1, 41)], summary=summary))
    assert path == tmp_path / "report.html"
    words = _check(path)
    assert "smollm2-135m (135 M parameters) on stdlib. All 40 steps done." in words
    assert "from 2.500 (-16.0 %)" in words
    assert "GiB in the fattest process" in words
    assert "3.40" in words
    assert "why not ZeRO-3" in words
    assert "3.2e-5" in words
    assert "Paris." in words
    assert "Example CPU" in words
    assert path.read_text().count("<svg") == 6
    assert [each.name for each in tmp_path.glob(".report*")] == []


def test_a_live_run_says_where_it_is_and_is_rewritten(tmp_path: Path) -> None:
    folder = _run(tmp_path, [_row(step) for step in range(1, 5)])
    assert "Step 4 of 40." in _check(write_report(folder))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(_row(5)) + "\n")
    assert "Step 5 of 40." in _check(write_report(folder))


@pytest.mark.parametrize("rows", [[], [_row(1)], [_row(1, loss=None, heldout_loss=None, mfu=None)]])
def test_few_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    words = _check(write_report(_run(tmp_path, rows)))
    assert ("No step is recorded yet." in words) == (not rows)


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "No step is recorded yet." in _check(write_report(tmp_path))


def test_values_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    rows = [_row(step) for step in range(1, 30)]
    rows[10]["loss"] = math.nan
    rows[11]["loss"] = math.inf
    rows[12]["grad_norm"] = "huge"
    rows[13].pop("tokens_per_s")
    words = _check(write_report(_run(tmp_path, rows)))
    assert "2 step(s) have no finite loss." in words


def test_a_torn_last_line_is_no_fault_and_a_bad_one_is_told(tmp_path: Path) -> None:
    folder = _run(tmp_path, [_row(1), _row(2)])
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 3, "loss": 2.')
    rows, bad = read_metrics(metrics)
    assert ([row["step"] for row in rows], bad) == ([1, 2], 0)
    metrics.write_bytes(b"\xff\xfe broken\n[1]\n" + metrics.read_bytes())
    rows, bad = read_metrics(metrics)
    assert ([row["step"] for row in rows], bad) == ([1, 2], 2)
    assert "2 line(s) of metrics.jsonl" in _check(write_report(folder))


@pytest.mark.parametrize("name", ["config.yaml", "plan.json", "summary.json"])
@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2]", "{a: {b: [", '{"configured": 3, "memory_gib": "x", "machine": []}']
)
def test_other_files_may_be_torn_or_something_else(tmp_path: Path, name: str, text: str) -> None:
    folder = _run(tmp_path, [_row(1), _row(2)], summary={"wall_s": 3})
    (folder / name).write_text(text)
    _check(write_report(folder))


def test_everything_is_escaped(tmp_path: Path) -> None:
    evil = "</style></title><script>alert(1)</script>&\"'$body"
    folder = _run(tmp_path / "a<b>&", [_row(1)], summary={"reply": evil})
    plan = json.loads((folder / "plan.json").read_text())
    plan["reasons"] = [evil]
    plan["machine"]["cpu_name"] = evil
    plan["configured"]["layout"] = {evil: evil}
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "config.yaml").write_text(json.dumps({"model": {"preset": evil}, "data": {"source": evil}}))
    words = _check(write_report(folder))
    assert evil in words
    assert "a<b>&" in words


def test_ticks_cover_the_range_in_round_steps() -> None:
    assert nice_ticks(0, 10, count=6) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(1.9, 2.6, count=5)[0] <= 1.9
    assert nice_ticks(1.9, 2.6, count=5)[-1] >= 2.6
    assert nice_ticks(1, 3, count=5, whole=True) == [1, 2, 3]
    assert len(nice_ticks(5, 5, count=5)) >= 2
    assert len(nice_ticks(0, 0, count=5)) >= 2
    assert len(nice_ticks(1e-7, 1e9, count=5)) <= 8


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [
        (0, 1, "0"),
        (2.5, 0.5, "2.5"),
        (2.0, 0.25, "2.00"),
        (3e-4, 1e-4, "3e-4"),
        (400, 100, "400"),
        (12500, 2500, "12.5k"),
        (3e6, 1e6, "3M"),
        (-2.5, 0.5, "-2.5"),
    ],
)
def test_numbers_are_short(value: float, step: float, text: str) -> None:
    assert format_number(value, step=step) == text


def test_long_series_are_thinned_and_keep_their_spikes() -> None:
    ys = [1.0] * 20_000
    ys[12_345] = 50.0
    svg = line_chart(title="t", x_label="step", y_label="", lines=[Line(name="", xs=range(20_000), ys=ys, style="a")])
    points = svg.partition('points="')[2].partition('"')[0].split()
    assert len(points) < 400
    heights = [float(point.split(",")[1]) for point in points]
    assert min(heights) < min(sorted(heights)[1:]) - 50


def test_a_band_is_inside_the_drawing() -> None:
    band = Band(name="predicted", low=4.0, value=5.0, high=9.0)
    line = Line(name="", xs=[1, 2], ys=[1.0, 1.1], style="a")
    svg = line_chart(title="t", x_label="step", y_label="GiB", lines=[line], band=band, from_zero=True)
    assert 'class="band"' in svg
    top = float(svg.partition('class="band"')[2].partition('y="')[2].partition('"')[0])
    assert top >= 0
