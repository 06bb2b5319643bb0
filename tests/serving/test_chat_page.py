"""The chat page in a real browser: it streams, stops, counts, and shows what the model writes as text."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.conftest import LocalServer, local_server
from serving.test_http import slow_down, wait_for
from serving.tiny_models import OneText, ScriptedTokens, make_engine
from shardline.serving.runner import Runner

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
BREAK_IN = "<img src=x onerror=\"document.title='broken in'\"> & <b>bold</b>"
REPLY = BREAK_IN + "\n\u65e5\u672c\u8a9e \U0001f469\u200d\U0001f467 end."


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    engine = make_engine(max_num_seqs=2, max_model_len=500)
    engine.runner = Runner(engine.decoder, engine.kv_cache, ScriptedTokens(OneText(REPLY)))  # type: ignore[arg-type]
    slow_down(engine, 0.01)
    with local_server(engine) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("chromium"), executable_path=CHROMIUM, headless=True, args=FLAGS
        )
        yield context
        context.close()


@pytest.fixture
def page(browser: Any, server: LocalServer) -> Iterator[Any]:
    page = browser.new_page()
    page.set_viewport_size({"width": 900, "height": 700})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(server.url)
    yield page
    page.close()
    assert [each for each in problems if "Failed to load resource" not in each] == []  # that is a 400, as asked for


def ask(page: Any, text: str, *, max_tokens: int = len(REPLY.encode())) -> None:
    if not page.locator("details").get_attribute("open"):
        page.locator("details").evaluate("element => element.open = true")
    page.fill("#max_tokens", str(max_tokens))
    page.fill("#input", text)
    page.press("#input", "Enter")


def wait_for_facts(page: Any, count: int = 1) -> str:
    page.locator(".facts").nth(count - 1).wait_for(timeout=20_000)
    return page.locator(".facts").nth(count - 1).text_content()


def test_what_the_model_and_the_user_write_is_shown_as_text(page: Any, tmp_path: Path):
    ask(page, "<script>document.title='broken in'</script>")
    facts = wait_for_facts(page)
    assert page.locator(".user .text").text_content() == "<script>document.title='broken in'</script>"
    assert page.locator(".assistant .text").text_content() == REPLY
    assert page.locator(".assistant img, .assistant b, .user script").count() == 0
    assert page.title() == "Shardline chat"
    assert page.locator("#model").text_content() == "tiny"
    assert re.search(rf"{len(REPLY.encode())} tokens . first after \d+\.\d\d s . \d+\.\d tokens/s", facts), facts
    picture = tmp_path / "chat.png"
    page.screenshot(path=picture)
    assert picture.stat().st_size > 5000


def test_a_reply_is_shown_while_it_grows_and_stops_on_demand(page: Any, server: LocalServer):
    ask(page, "Go on", max_tokens=400)
    wait_for(lambda: len(page.locator(".assistant .text").text_content()) > 5)
    early = page.locator(".assistant .text").text_content()
    assert len(early) < len(REPLY)
    assert REPLY.startswith(early)
    assert page.locator("#send").is_hidden()
    page.click("#stop")
    assert "stopped" in wait_for_facts(page)
    wait_for(lambda: not server.engine.has_unfinished)
    server.wait_until_idle()
    assert page.locator("#stop").is_hidden()


def test_a_conversation_goes_on_and_can_be_begun_anew(page: Any, server: LocalServer):
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    for count, text in enumerate(("first", "second"), start=1):
        ask(page, text, max_tokens=4)
        wait_for_facts(page, count)
    roles = [message["role"] for message in sent[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    page.click("#new")
    assert page.locator(".message").count() == 0
    ask(page, "third", max_tokens=4)
    wait_for_facts(page)
    assert [message["content"] for message in sent[2]["messages"]] == ["third"]


def test_an_error_is_said_in_the_page(page: Any, server: LocalServer):
    ask(page, "x" * 2000)
    page.locator(".error").wait_for(timeout=20_000)
    assert "this model's context holds 500 tokens" in page.locator(".error").text_content()
