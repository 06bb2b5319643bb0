"""The page in a real browser: nothing overflows, no label is cut off or meets another, no script runs."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planning.cluster.test_page import FITS, NOT, PIPED, found
from planning.cluster.test_serve_page import FEW, LARGE, RATED, SLOW
from planning.cluster.test_serve_page import NOT as NOT_SERVED
from shardline.planning.cluster.page import write_page
from shardline.planning.cluster.search import Found
from shardline.planning.cluster.serve_page import write_serve_page
from shardline.planning.cluster.serve_search import ServeFound

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")

BAD = "<img src=x onerror=\"document.title='broken in'\">"
# Labels that are cut off by their picture, wider than the bar that they stand in, or on top of each other.
SPOILED = """() => [...document.querySelectorAll('svg[role=img], .row.head svg, .plot > svg')].flatMap(svg => {
  const frame = svg.getBoundingClientRect(), said = [];
  const shown = [...svg.querySelectorAll('text')].map(text => [text, text.getBoundingClientRect()])
    .filter(([, box]) => box.width > 0);
  shown.forEach(([text, box], index) => {
    const name = `${svg.querySelector('title')?.textContent}: ${text.textContent}`;
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1)
      said.push(`cut off ${name}`);
    const y = box.top + box.height / 2;
    const bars = [...svg.querySelectorAll('rect')].map(bar => bar.getBoundingClientRect())
      .filter(bar => bar.top < y && y < bar.bottom && bar.left < box.left + 1 && bar.right > box.right - 1);
    if (text.classList.contains('on') && !bars.length) said.push(`wider than its bar ${name}`);
    for (const [other, its] of shown.slice(index + 1))
      if (box.left < its.right && its.left < box.right && box.top < its.bottom && its.top < box.bottom)
        said.push(`on top of each other ${name} and ${other.textContent}`);
  });
  return said;
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    problems: list[str] = []
    pages = []

    def open_page(plan: Found | ServeFound, width: int) -> Any:
        if isinstance(plan, ServeFound):
            write_serve_page(tmp_path / "plan.html", plan, command="shardline plan")
        else:
            write_page(tmp_path / "plan.html", plan, command="shardline plan")
        page = browser.new_page(viewport={"width": width, "height": 800})
        pages.append(page)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on("request", lambda request: problems.append(request.url) if "plan.html" not in request.url else None)
        page.goto((tmp_path / "plan.html").as_uri())
        return page

    yield open_page
    for page in pages:
        page.close()
    assert problems == []


ZERO_BUBBLE = found(
    shape=PIPED.asked.shape,
    num_devices=64,
    fixed={"tensor": 8, "pipeline": 4, "schedule": "zero_bubble_v", "virtual_stages": 2},
    micro_batch=1,
)


@pytest.mark.parametrize("width", [360, 390, 820, 821, 1024, 1280])
def test_labels_can_be_read_at_any_width(open_page: Any, width: int):
    for plan in (FITS, PIPED, NOT, ZERO_BUBBLE, RATED, LARGE, NOT_SERVED, SLOW, FEW):
        page = open_page(plan, width)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(SPOILED) == []


@pytest.mark.parametrize("plan", [FITS, PIPED, RATED, LARGE], ids=["fits", "piped", "served", "served large"])
def test_on_paper_nothing_is_cut_off(open_page: Any, plan: Found | ServeFound):
    page = open_page(plan, 700)
    page.emulate_media(media="print")
    assert page.evaluate(SPOILED) == []
    assert page.evaluate(
        "[...document.querySelectorAll('.scroll')].every(each => each.scrollWidth <= each.clientWidth)"
    )


def test_a_name_is_no_script(open_page: Any):
    shape = dataclasses.replace(FITS.asked.shape, name=BAD)
    page = open_page(dataclasses.replace(FITS, asked=dataclasses.replace(FITS.asked, shape=shape)), 1280)
    assert page.title().startswith(BAD)
    assert page.inner_text("h1").startswith(BAD)


def test_it_follows_light_and_dark(open_page: Any):
    page = open_page(FITS, 1280)
    colours = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(set(colours)) == 2
