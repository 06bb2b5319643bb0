"""Time limits, readiness, origins, shutting down, and clients that leave in whatever state their request is."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.conftest import LocalServer, local_server
from serving.test_http import CHAT, LONG, call, call_json, open_request, slow_down, stream, wait_for, warm_engine
from serving.tiny_models import make_decoder, make_engine, tiny_config
from shardline.serving.client import stream_chat
from shardline.serving.launch import start_server
from shardline.text.tokenizer import byte_tokenizer


def test_ready_comes_after_the_first_token():
    engine = make_engine()
    let_go = threading.Event()
    step = engine.step

    def held_step() -> Any:
        let_go.wait(20)
        return step()

    engine.step = held_step  # type: ignore[method-assign]
    with local_server(engine) as server:
        status, body = call_json(server.url, "/ready")
        assert status == 503
        assert "No token has been computed yet" in body["error"]["message"]
        assert call(server.url, "/health")[0] == 200
        let_go.set()
        wait_for(lambda: call(server.url, "/ready")[0] == 200)
        assert engine.last_schedule.num_tokens > 0


def test_weights_that_are_not_finite_are_never_ready():
    decoder = make_decoder(tiny_config(byte_tokenizer()))
    decoder.get_parameter("model.layers.0.mlp.down_proj.weight").data.fill_(float("nan"))
    with local_server(make_engine(decoder)) as server:
        wait_for(lambda: "not finite" in call_json(server.url, "/ready")[1]["error"]["message"])
        status, body = call_json(server.url, "/v1/chat/completions", CHAT)
        assert status == 500
        assert "not finite" in body["error"]["message"]
        assert call(server.url, "/health")[0] == 200


@pytest.fixture(scope="module")
def impatient() -> Iterator[LocalServer]:
    engine = warm_engine()
    slow_down(engine, 0.02)
    with local_server(engine, request_timeout_s=0.3) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_reply_that_takes_too_long_is_504_and_frees_its_blocks(impatient: LocalServer, path: str):
    body = LONG if path.endswith("completions") else {"input": "Hello", "temperature": 0}
    started_s = time.monotonic()
    status, answer = call_json(impatient.url, path, body)
    assert status == 504
    assert answer["error"]["code"] == "request_timeout"
    assert "after 0.3 s" in answer["error"]["message"]
    assert time.monotonic() - started_s < 2
    impatient.wait_until_idle()


def test_a_stream_that_takes_too_long_ends_with_an_error_frame(impatient: LocalServer):
    frames = stream(impatient.url, "/v1/chat/completions", LONG)
    assert "after 0.3 s" in frames[-1]["error"]["message"]
    impatient.wait_until_idle()
    assert call(impatient.url, "/v1/chat/completions", {**CHAT, "max_tokens": 2})[0] == 200


def test_other_origins_are_let_in_only_when_they_are_named():
    origin = {"origin": "https://page.example"}
    asks = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with local_server(warm_engine()) as server:
        _, headers, _ = call(server.url, "/v1/models", headers=origin)
        assert not [name for name in headers if name.startswith("access-control")]
        assert call(server.url, "/v1/chat/completions", method="OPTIONS", headers=asks)[0] == 405
    with local_server(warm_engine(), allow_origins=("https://page.example",), api_keys=("key",)) as server:
        status, headers, _ = call(server.url, "/v1/chat/completions", method="OPTIONS", headers=asks)
        assert status == 200
        assert headers["access-control-allow-origin"] == "https://page.example"
        status, headers, _ = call(server.url, "/v1/models", headers=origin)
        assert status == 401  # the browser may read why
        assert headers["access-control-allow-origin"] == "https://page.example"
        _, headers, _ = call(server.url, "/v1/models", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in headers


def test_streams_end_whole_when_the_server_is_told_to_stop(tiny_folder: Path):
    """SIGTERM in mid-stream: what runs ends, with its last frame; new connections are refused."""
    arguments = ["--max-model-len", "400", "--max-num-seqs", "4", "--drain-timeout", "20"]
    replies: list[Any] = []
    started = threading.Semaphore(0)

    def talk() -> None:
        messages = [{"role": "user", "content": "Hello"}]
        first = [started.release]

        def on_text(_text: str) -> None:
            if first:
                first.pop()()

        replies.append(
            stream_chat(server.url, messages, on_text=on_text, max_tokens=350, ignore_eos=True, temperature=0.9)
        )

    with start_server(tiny_folder, arguments=arguments) as server:
        threads = [threading.Thread(target=talk) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert started.acquire(timeout=20)
        server.process.terminate()
        for thread in threads:
            thread.join(30)
        assert server.process.wait(20) == 0
    assert [(reply.num_tokens, reply.finish_reason) for reply in replies] == [(350, "length")] * 3


def test_one_client_leaves_while_another_prefills():
    """The shape that hung another server for ever: a stream is cut while a long prompt is being read."""
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=8)
    slow_down(engine, 0.005)
    with local_server(engine) as server:
        for _ in range(3):
            leaving = open_request(server.url, "/v1/chat/completions", {**LONG, "stream": True})
            wait_for(lambda: any(each.num_output_tokens > 2 for each in engine.scheduler.running))
            prompt = {"prompt": "a long prompt " * 12, "max_tokens": 3, "ignore_eos": True}
            answers: list[int] = []
            reading = threading.Thread(
                target=lambda prompt=prompt, answers=answers: answers.append(
                    call(server.url, "/v1/completions", prompt)[0]
                )
            )
            reading.start()
            wait_for(lambda: any(0 < each.num_computed_tokens < 100 for each in engine.scheduler.running))
            leaving.close()
            reading.join(20)
            assert answers == [200]
            server.wait_until_idle()
        assert call(server.url, "/health")[0] == 200


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"])
def test_a_client_may_leave_at_any_moment(path: str, streaming: bool):
    """From before its body is whole to after its last token, whatever the endpoint."""
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=16)
    slow_down(engine, 0.003)
    text = "some words " * 8
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "n": 2},
        "/v1/completions": {"prompt": text, "max_tokens": 12, "echo": True, "n": 2},
        "/v1/responses": {"input": text, "max_output_tokens": 12},
        "/v1/embeddings": {"input": [text, text]},
    }
    body = {**bodies[path], "stream": streaming} if path != "/v1/embeddings" else bodies[path]
    with local_server(engine) as server:
        for wait_s in (0, 0.001, 0.003, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08):
            connection = open_request(server.url, path, body)
            time.sleep(wait_s)
            connection.close()
        server.wait_until_idle()
        assert call(server.url, path, {**body, "stream": False} if path != "/v1/embeddings" else body)[0] == 200


def test_a_large_body_does_not_hold_up_others():
    """While 8 MB of JSON are decoded, a stream's tokens go on coming."""
    engine = make_engine(max_num_seqs=2)
    with local_server(engine) as server:
        large = json.dumps({"prompt": [[1] * 100] * 20_000, "max_tokens": 1}).encode()
        latencies: list[float] = []
        done = threading.Event()

        def ping() -> None:
            while not done.is_set():
                started_s = time.monotonic()
                assert call(server.url, "/health")[0] == 200
                latencies.append(time.monotonic() - started_s)

        pinging = threading.Thread(target=ping)
        pinging.start()
        assert call(server.url, "/v1/completions", large)[0] == 400
        done.set()
        pinging.join(20)
        assert max(latencies) < 1.0


class TestPoison:
    """One bad request among good ones fails alone; the others answer what they answer without it."""

    BODIES = [{"prompt": f"prompt {i}", "max_tokens": 8, "temperature": 0, "ignore_eos": True} for i in range(4)]

    def answers(self, server: LocalServer, bad: list[Any]) -> tuple[list[str], list[tuple[int, Any]]]:
        found: dict[int, Any] = {}

        def ask(index: int, body: Any) -> None:
            found[index] = call_json(server.url, "/v1/completions", body)

        bodies = [*self.BODIES, *bad]
        threads = [threading.Thread(target=ask, args=each) for each in enumerate(bodies)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        good = [found[i] for i in range(len(self.BODIES))]
        assert [status for status, _ in good] == [200] * len(good)
        server.wait_until_idle()
        return [body["choices"][0]["text"] for _, body in good], [
            found[i] for i in range(len(self.BODIES), len(bodies))
        ]

    def test_a_prompt_that_makes_nan(self):
        decoder = make_decoder(tiny_config(byte_tokenizer(), tie_word_embeddings=False))
        decoder.get_parameter("model.embed_tokens.weight").data[ord("~")] = float("nan")
        with local_server(make_engine(decoder)) as server:
            alone, _ = self.answers(server, [])
            among, bad = self.answers(server, [{"prompt": "poison ~", "max_tokens": 8}])
            assert among == alone
            assert bad[0][0] == 500
            assert "not finite" in bad[0][1]["error"]["message"]
            assert self.answers(server, [])[0] == alone  # nothing of it is left in the cache

    def test_an_over_long_prompt(self, local: LocalServer):
        alone, _ = self.answers(local, [])
        among, bad = self.answers(local, [{"prompt": "x" * 300}])
        assert among == alone
        assert bad[0][0] == 400
        assert "300 tokens" in bad[0][1]["error"]["message"]
        assert "256" in bad[0][1]["error"]["message"]

    def test_a_grammar_that_can_not_be_compiled(self, local: LocalServer):
        alone, _ = self.answers(local, [])
        bad = [
            {"prompt": "x", "structured_outputs": {"regex": "("}},
            {"prompt": "x", "structured_outputs": {"grammar": "start: nothing"}},
            {"prompt": "x", "structured_outputs": {"json": {"type": "no such type"}}},
        ]
        among, answers = self.answers(local, bad)
        assert among == alone
        assert [status for status, _ in answers] == [400, 400, 400]
        assert all(body["error"]["param"] == "structured_outputs" for _, body in answers)
