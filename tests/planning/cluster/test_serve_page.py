"""The page of a plan of serving: self-contained, its numbers those of the JSON, its bars in proportion."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from planning.cluster.page_reader import Node, read_page
from planning.cluster.test_page_in_browser import SPOILED
from shardline.hardware.catalogue import device
from shardline.planning.cluster.figures import gib, seconds
from shardline.planning.cluster.known_shapes import known_shape
from shardline.planning.cluster.serve_page import make_serve_page, write_serve_page
from shardline.planning.cluster.serve_search import ServeAsked, ServeFound, search_serving

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def found(model: str = "llama-3.1-8b", **changes: Any) -> ServeFound:
    given = {"device": device("l4"), "num_devices": 8, **changes}
    return search_serving(ServeAsked(shape=known_shape(model), **given))


FITS = found()
RATED = found(request_rate=4.0, ttft_limit_s=2.0, tpot_limit_s=0.2)
NOT = found("deepseek-v3", device=device("h100"))
ALL = pytest.mark.parametrize("plan", [FITS, RATED, NOT], ids=["fits", "rated", "not"])


def page_of(plan: ServeFound) -> Node:
    return read_page(make_serve_page(plan, command="shardline plan"))


@ALL
def test_it_needs_nothing_else_and_its_bars_are_the_memory(plan: ServeFound) -> None:
    text = make_serve_page(plan)
    assert not re.search(r"<script|\bsrc=|@import|https?://(?!www\.w3\.org)", text.split("<footer>")[0])
    pictures = page_of(plan).all("svg", "memory")
    assert len(pictures) == len(plan.ranked)
    for picture, each in zip(pictures, plan.ranked, strict=True):
        bars = [bar for bar in picture.all("rect") if "part" in bar.classes]
        widths = {(bar.classes - {"part"}).pop(): bar.percent("width") for bar in bars}
        parts = {name: count for name, count in each.serving.parts.items() if count}
        assert set(widths) == set(parts)
        scale = sum(widths.values()) / sum(parts.values())
        for name, count in parts.items():
            assert widths[name] == pytest.approx(scale * count, abs=0.01)


def test_it_says_what_the_answer_says() -> None:
    text = make_serve_page(RATED)
    best = RATED.best
    assert best is not None
    assert best.serving.ttft_s is not None
    assert seconds(best.serving.ttft_s) in text
    assert f"{best.serving.max_requests:,}" in text
    assert gib(best.serving.parts["weights"]) in text
    assert "TTFT within 2.00 s" in text
    assert f"--tensor-parallel-size {best.tensor}" in text
    assert "with weights in int8" in text


def test_where_nothing_works_it_says_what_would() -> None:
    text = make_serve_page(NOT)
    assert NOT.best is None
    assert "Nothing works" in text
    assert NOT.changes[0] in text
    assert "does not fit" in text
    assert "How quickly it answers" not in text


def test_more_fit_the_shorter_they_are() -> None:
    table = next(each for each in page_of(FITS).all("table") if "a request of" in each.text)
    counts = [int(row.all("td")[-1].text.replace(",", "")) for row in table.all("tr")[1:]]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 256
    assert counts[-1] < 3


def test_names_are_text(tmp_path: Path) -> None:
    asked = dataclasses.replace(
        FITS.asked, shape=dataclasses.replace(FITS.asked.shape, name="<script>alert(1)</script>")
    )
    write_serve_page(tmp_path / "plan.html", search_serving(asked), command="<b>")
    text = (tmp_path / "plan.html").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "&lt;b&gt;" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_labels_can_be_read(tmp_path: Path, width: int) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for plan in (FITS, RATED, NOT):
            write_serve_page(tmp_path / "plan.html", plan)
            page = browser.new_page(viewport={"width": width, "height": 800})
            page.goto((tmp_path / "plan.html").as_uri())
            assert page.evaluate(SPOILED) == []
            assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
        browser.close()
