"""The HTTP side in this process, over real sockets: disconnects, failures, limits, error objects."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest

from serving.conftest import LocalServer, local_server
from serving.tiny_models import SCRIPTS, ScriptedTokens, make_engine, make_request
from shardline.serving.client import stream_chat
from shardline.serving.engine import Engine
from shardline.serving.runner import Runner

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def call(
    url: str, path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers or {})
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


def call_json(url: str, path: str, body: Any = None, **rest: Any) -> tuple[int, Any]:
    status, _, data = call(url, path, body, **rest)
    return status, json.loads(data)


def stream(url: str, path: str, body: dict[str, Any]) -> list[Any]:
    """The parsed frames of a stream; the last must be [DONE]."""
    status, headers, data = call(url, path, {**body, "stream": True})
    assert status == 200, data
    assert headers["content-type"].startswith("text/event-stream")
    frames = [frame.removeprefix("data: ") for frame in data.decode().split("\n\n") if frame]
    assert frames[-1] == "[DONE]"
    assert "[DONE]" not in frames[:-1]
    return [json.loads(frame) for frame in frames[:-1]]


@pytest.fixture
def scripted() -> Iterator[Any]:
    """A server whose first request answers with a text of the test's choice."""
    servers = []

    class AnyRequest(dict[str, list[int]]):
        def __init__(self, text: str) -> None:
            self.text = text

        def __getitem__(self, name: str) -> list[int]:
            return list(self.text.encode())

    def start(text: str, **limits: int) -> str:
        engine = make_engine(**limits)
        engine.runner = Runner(engine.decoder, engine._cache, ScriptedTokens(AnyRequest(text)))  # type: ignore[arg-type]
        context = local_server(engine)
        servers.append(context)
        return context.__enter__().url

    yield start
    for context in servers:
        context.__exit__(None, None, None)


def test_a_stream_begins_with_the_role_and_ends_with_a_reason(local: LocalServer):
    frames = stream(local.url, "/v1/chat/completions", {**CHAT, "max_tokens": 6, "temperature": 0})
    choices = [frame["choices"][0] for frame in frames]
    assert choices[0]["delta"]["role"] == "assistant"
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert len({frame["id"] for frame in frames}) == 1
    assert {frame["object"] for frame in frames} == {"chat.completion.chunk"}
    assert all("usage" not in frame for frame in frames)


def test_usage_comes_in_a_frame_of_its_own_when_asked_for(local: LocalServer):
    body = {**CHAT, "max_tokens": 6, "temperature": 0, "stream_options": {"include_usage": True}}
    frames = stream(local.url, "/v1/chat/completions", body)
    assert all(frame["usage"] is None for frame in frames[:-1])
    assert frames[-1]["choices"] == []
    status, whole = call_json(local.url, "/v1/chat/completions", {**CHAT, "max_tokens": 6, "temperature": 0})
    assert status == 200
    assert frames[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 6
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + 6
    text = "".join(choice["delta"].get("content", "") for frame in frames for choice in frame["choices"])
    assert text == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_chunks_join_to_the_text_without_a_split_character(scripted: Any, text: str):
    url = scripted(text)
    body = {**CHAT, "max_tokens": len(text.encode())}
    pieces = [frame["choices"][0]["delta"].get("content", "") for frame in stream(url, "/v1/chat/completions", body)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
def test_a_stop_string_over_several_tokens_is_cut_off(scripted: Any, streaming: bool):
    url = scripted("say STOP now")
    body = {"prompt": "x", "max_tokens": 12, "stop": ["STOP"], "stream_options": {"include_usage": True}}
    if streaming:
        *frames, last = stream(url, "/v1/completions", body)
        choices, usage = [frame["choices"][0] for frame in frames], last["usage"]
    else:
        del body["stream_options"]
        _, answer = call_json(url, "/v1/completions", body)
        choices, usage = answer["choices"], answer["usage"]
    assert "".join(choice["text"] for choice in choices) == "say "
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == "STOP"
    assert usage["completion_tokens"] == len("say STOP")  # what was computed, not what was shown


def test_streamed_logprobs_equal_the_unstreamed(local: LocalServer):
    body = {**CHAT, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 2, "stop": ["zzzz"]}
    frames = stream(local.url, "/v1/chat/completions", body)
    joined = [entry for frame in frames for entry in (frame["choices"][0]["logprobs"] or {"content": []})["content"]]
    _, whole = call_json(local.url, "/v1/chat/completions", body)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert joined == entries
    assert len(entries) == whole["usage"]["completion_tokens"] == 12
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert all(entry["bytes"] is not None for entry in entries)


def open_request(url: str, path: str, body: dict[str, Any]) -> socket.socket:
    """Sends a request and returns its socket; the caller hangs up."""
    parts = urllib.parse.urlsplit(url)
    data = json.dumps(body).encode()
    connection = socket.create_connection((parts.hostname, parts.port), timeout=20)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


LONG = {**CHAT, "max_tokens": 200, "ignore_eos": True}


def wait_for(condition: Any, *, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.002)


def slow_down(engine: Engine, seconds: float) -> None:
    """Makes each step take a while, as a larger model would."""
    step = engine.step

    def slow_step() -> Any:
        time.sleep(seconds)
        return step()

    engine.step = slow_step  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def slow() -> Iterator[LocalServer]:
    engine = make_engine(max_num_seqs=2)
    slow_down(engine, 0.02)
    with local_server(engine, max_num_waiting=3) as server:
        yield server


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_frees_its_blocks_at_once(slow: LocalServer, streaming: bool):
    connection = open_request(slow.url, "/v1/chat/completions", {**LONG, "stream": streaming})
    wait_for(lambda: slow.engine.blocks.usage > 0)
    [sequence] = slow.engine.scheduler.running
    connection.close()
    slow.wait_until_idle()
    assert sequence.num_output_tokens < 150, "the reply was generated to its end for nobody"


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_while_it_waits_is_forgotten(slow: LocalServer, streaming: bool):
    running = [open_request(slow.url, "/v1/chat/completions", LONG) for _ in range(2)]
    wait_for(lambda: len(slow.engine.scheduler.running) == 2)
    waiting = open_request(slow.url, "/v1/chat/completions", {**LONG, "stream": streaming})
    wait_for(lambda: len(slow.engine.scheduler.waiting) == 1)
    waiting.close()
    wait_for(lambda: not slow.engine.scheduler.waiting)
    assert len(slow.engine.scheduler.running) == 2
    for connection in running:
        connection.close()
    slow.wait_until_idle()


def test_a_full_queue_answers_429_and_recovers(slow: LocalServer):
    crowd = [open_request(slow.url, "/v1/chat/completions", LONG) for _ in range(5)]
    wait_for(lambda: slow.async_engine.num_in_flight == 5)
    status, headers, data = call(slow.url, "/v1/chat/completions", CHAT)
    assert status == 429
    assert headers["retry-after"] == "1"
    assert json.loads(data)["error"]["code"] == "queue_full"
    for connection in crowd:
        connection.close()
    slow.wait_until_idle()
    assert call(slow.url, "/v1/chat/completions", {**CHAT, "max_tokens": 1})[0] == 200


def test_more_replies_than_the_server_takes_are_refused_for_good(slow: LocalServer):
    status, body = call_json(slow.url, "/v1/completions", {"prompt": "x", "n": 6})
    assert status == 400
    assert "at most 5" in body["error"]["message"]


def test_two_streams_at_once_do_not_mix(local: LocalServer):
    prompts = ["first prompt", "another one", "third", "and a fourth prompt"]
    bodies = [{"prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True} for prompt in prompts]
    alone = [call_json(local.url, "/v1/completions", body)[1]["choices"][0]["text"] for body in bodies]
    together: dict[int, list[Any]] = {}

    def run(index: int) -> None:
        together[index] = stream(local.url, "/v1/completions", bodies[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = ["".join(frame["choices"][0]["text"] for frame in together[index]) for index in range(len(bodies))]
    assert texts == alone
    assert len({together[index][0]["id"] for index in range(len(bodies))}) == len(bodies)


class FailingRunner:
    """Fails on the steps whose numbers it is given; otherwise the real one."""

    def __init__(self, runner: Runner, failing: range) -> None:
        self.runner = runner
        self.failing = failing
        self.num_steps = 0

    def run(self, schedule: Any) -> Any:
        self.num_steps += 1
        if self.num_steps in self.failing:
            raise RuntimeError("the matrix fell over")
        return self.runner.run(schedule)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


def warm_engine() -> Engine:
    """An engine that has computed a token, so that the server's thread does not begin with one."""
    engine = make_engine()
    engine.generate([make_request("warm-up", "x", max_tokens=1)])
    return engine


def failing_server(failing: range) -> Any:
    engine = warm_engine()
    engine.runner = FailingRunner(engine.runner, failing)  # type: ignore[assignment]
    return local_server(engine)


def test_an_error_in_mid_stream_is_one_frame_then_done_and_the_engine_goes_on():
    with failing_server(range(3, 4)) as server:
        frames = stream(server.url, "/v1/chat/completions", {**CHAT, "max_tokens": 20, "ignore_eos": True})
        assert "the matrix fell over" in frames[-1]["error"]["message"]
        assert frames[-1]["error"]["type"] == "server_error"
        assert all("error" not in frame for frame in frames[:-1])
        server.wait_until_idle()
        assert call(server.url, "/health")[0] == 200
        assert call(server.url, "/v1/chat/completions", {**CHAT, "max_tokens": 3})[0] == 200


def test_a_failing_step_answers_whole_requests_with_an_error_object():
    with failing_server(range(2, 3)) as server:
        status, body = call_json(server.url, "/v1/chat/completions", {**CHAT, "max_tokens": 20, "ignore_eos": True})
        assert status == 500
        assert "the matrix fell over" in body["error"]["message"]


def test_an_engine_that_keeps_failing_is_dead_and_says_so():
    with failing_server(range(1, 100)) as server:
        statuses = [call(server.url, "/v1/chat/completions", CHAT)[0] for _ in range(3)]
        assert statuses == [500, 500, 503]  # the third failure in a row is the engine's end
        wait_for(lambda: server.async_engine.health() is not None)
        for path in ("/health", "/ready"):
            status, body = call_json(server.url, path)
            assert status == 503
            assert "the matrix fell over" in body["error"]["message"]
        assert call(server.url, "/v1/chat/completions", CHAT)[0] == 503


def test_a_step_that_hangs_turns_health_to_503():
    engine = warm_engine()
    let_go = threading.Event()
    step = engine.step

    def hanging_step() -> Any:
        let_go.wait(20)
        return step()

    engine.step = hanging_step  # type: ignore[method-assign]
    with local_server(engine, step_timeout_s=0.1) as server:
        assert call(server.url, "/health")[0] == 200
        connection = open_request(server.url, "/v1/chat/completions", {**CHAT, "max_tokens": 1})
        wait_for(lambda: call(server.url, "/health")[0] == 503)
        assert "has not come back" in call_json(server.url, "/health")[1]["error"]["message"]
        let_go.set()
        wait_for(lambda: call(server.url, "/health")[0] == 200)
        connection.close()


def test_keys_are_asked_for_where_there_are_any():
    with local_server(make_engine(), api_keys=("first", "second")) as server:
        status, body = call_json(server.url, "/v1/models")
        assert status == 401
        assert body["error"]["code"] == "invalid_api_key"
        assert call(server.url, "/v1/models", headers={"authorization": "Bearer wrong"})[0] == 401
        assert call(server.url, "/v1/models", headers={"authorization": "Bearer second"})[0] == 200
        assert call(server.url, "/health")[0] == 200
        reply = stream_chat(server.url, CHAT["messages"], api_key="first", max_tokens=2)
        assert reply.num_tokens == 2


def test_a_body_over_the_limit_is_413():
    with local_server(make_engine(), max_body_bytes=1000) as server:
        status, body = call_json(server.url, "/v1/completions", {"prompt": "x" * 2000})
        assert status == 413
        assert "limit of 1000 bytes" in body["error"]["message"]
        assert call(server.url, "/v1/completions", {"prompt": "x"})[0] == 200


def test_defaults_of_the_folder_stand_in_for_what_a_request_leaves_out():
    with local_server(make_engine(), defaults={"temperature": 0.0}) as server:
        body = {"prompt": "abc", "max_tokens": 20, "ignore_eos": True}
        texts = {call_json(server.url, "/v1/completions", body)[1]["choices"][0]["text"] for _ in range(3)}
        assert len(texts) == 1
        hot = {**body, "temperature": 2.0}
        assert call_json(server.url, "/v1/completions", hot)[1]["choices"][0]["text"] not in texts


def test_metrics_carry_vllms_names_and_count(local: LocalServer):
    def value(name: str) -> float:
        text = call(local.url, "/metrics")[2].decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"shardline:{name}{{"))

    before = {name: value(name) for name in ("prompt_tokens_total", "generation_tokens_total")}
    _, body = call_json(local.url, "/v1/completions", {"prompt": "twelve bytes", "max_tokens": 5, "ignore_eos": True})
    assert body["usage"]["prompt_tokens"] == 12
    wait_for(lambda: value("generation_tokens_total") - before["generation_tokens_total"] == 5)
    assert value("prompt_tokens_total") - before["prompt_tokens_total"] == 12
    assert value("num_requests_running") == 0
    assert value("num_requests_waiting") == 0
    assert value("kv_cache_usage_perc") == 0
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert value(f"{name}_count") > 0


def test_the_chat_page_is_one_file_that_shows_text_as_text(local: LocalServer):
    status, headers, data = call(local.url, "/")
    page = data.decode()
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "innerHTML" not in page
    assert "http://" not in page
    assert "https://" not in page
