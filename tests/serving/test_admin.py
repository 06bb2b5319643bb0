"""New weights and sleep in a running server: whole or not at all, and nothing stale afterwards."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from serving.conftest import LocalServer, local_server
from serving.soak import soak
from serving.test_http import call, call_json, slow_down, wait_for
from serving.tiny_models import make_decoder, make_engine, tiny_config
from shardline.checkpoints.huggingface import load_decoder, save_folder
from shardline.hardware.memory import rss_bytes
from shardline.serving.engine import Engine, EngineConfig, load_engine
from shardline.serving.startup import open_engine
from shardline.text.tokenizer import byte_tokenizer

KEY = {"authorization": "Bearer secret"}
PROMPT = {"prompt": "a prompt that is long enough to fill several blocks of the cache", "max_tokens": 12}
GREEDY = {**PROMPT, "temperature": 0, "ignore_eos": True, "logprobs": 0}


def save_model(folder: Path, *, seed: int, **changes: Any) -> Path:
    tokenizer = byte_tokenizer()
    config = tiny_config(tokenizer, **changes)
    save_folder(folder, config=config, tensors=make_decoder(config, seed=seed).state_dict(), tokenizer=tokenizer)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("weights")
    return {
        "old": save_model(root / "old", seed=0),
        "new": save_model(root / "new", seed=1),
        "other shape": save_model(root / "other", seed=0, hidden_size=32),
    }


def serve(folder: Path, **config: Any) -> Any:
    engine = make_engine(load_decoder(folder), max_num_seqs=2)
    return local_server(engine, folder=str(folder), admin_key="secret", **config)


@pytest.fixture
def server(folders: dict[str, Path]) -> Iterator[LocalServer]:
    with serve(folders["old"]) as server:
        yield server


def text(url: str, body: dict[str, Any] = GREEDY) -> str:
    """The reply token by token: a random model's text is mostly half characters, which all look alike."""
    status, answer = call_json(url, "/v1/completions", body)
    assert status == 200, answer
    return "".join(answer["choices"][0]["logprobs"]["tokens"])


@pytest.fixture(scope="module")
def texts(folders: dict[str, Path]) -> dict[str, str]:
    """What a server that was started with each folder answers."""
    found = {}
    for name in ("old", "new"):
        with serve(folders[name]) as server:
            found[name] = text(server.url)
    assert found["old"] != found["new"]
    return found


def reload(server: LocalServer, path: Path | str, **more: Any) -> tuple[int, Any]:
    return call_json(server.url, "/admin/reload", {"path": str(path), **more}, headers=KEY)


def sse_text(data: bytes) -> str:
    frames = [json.loads(frame.removeprefix("data: ")) for frame in data.decode().split("\n\n")[:-2]]
    return "".join(token for frame in frames for token in frame["choices"][0]["logprobs"]["tokens"])


def test_without_a_key_there_is_nothing(folders: dict[str, Path]):
    with local_server(make_engine(), api_keys=("secret",)) as server:
        status, answer = call_json(server.url, "/admin/reload", {"path": "x"}, headers=KEY)
        assert status == 404
        assert "--admin-key" in answer["error"]["message"]


def test_the_api_key_does_not_open_it(folders: dict[str, Path]):
    with serve(folders["old"], api_keys=("client",)) as server:
        for headers in ({}, {"authorization": "Bearer client"}):
            for path in ("/admin/reload", "/admin/sleep", "/admin/wake"):
                assert call(server.url, path, {}, headers=headers)[0] == 401
        assert call(server.url, "/v1/models", headers=KEY)[0] == 401


@pytest.mark.parametrize("mode", ["drain", "pause"])
def test_after_a_reload_a_cached_prompt_gets_the_new_weights_answer(
    server: LocalServer, folders: dict[str, Path], texts: dict[str, str], mode: str
):
    assert [text(server.url), text(server.url)] == [texts["old"]] * 2
    assert server.engine.blocks.num_cached > 0
    status, answer = reload(server, folders["new"], mode=mode)
    assert status == 200, answer
    assert answer["status"] == "reloaded"
    assert answer["weights_version"] == 1
    assert server.engine.blocks.num_cached == 0
    assert text(server.url) == texts["new"]
    assert reload(server, folders["old"])[1]["weights_version"] == 2
    assert text(server.url) == texts["old"]


def test_a_bad_folder_is_one_sentence_and_the_old_weights_go_on(
    server: LocalServer, folders: dict[str, Path], texts: dict[str, str], tmp_path: Path
):
    truncated = save_model(tmp_path / "truncated", seed=1)
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    for path, words in [
        (tmp_path / "absent", "absent"),
        (folders["other shape"], "hidden_size 32 instead of 64"),
        (truncated, "truncated or damaged"),
    ]:
        status, answer = reload(server, path)
        assert status == 400
        assert words in answer["error"]["message"]
        assert answer["error"]["param"] == "path"
        assert text(server.url) == texts["old"]
    assert call_json(server.url, "/version")[1]["weights_version"] == 0


@contextmanager
def start_stream(url: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    try:
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}))
        yield connection.getresponse()
    finally:
        connection.close()


LONG = {**GREEDY, "max_tokens": 60}


def test_a_drained_stream_ends_with_the_old_weights_and_who_came_later_gets_the_new(
    folders: dict[str, Path], texts: dict[str, str]
):
    with serve(folders["old"]) as server:
        alone = text(server.url, LONG)
        slow_down(server.engine, 0.01)
        with start_stream(server.url, LONG) as running:
            wait_for(lambda: server.engine.scheduler.running)
            assert reload(server, folders["new"])[0] == 200
            assert text(server.url) == texts["new"]
            assert sse_text(running.read()) == alone


def test_a_paused_stream_keeps_what_it_has_and_goes_on_with_the_new_weights(folders: dict[str, Path]):
    with serve(folders["old"]) as server:
        old = text(server.url, LONG)
        slow_down(server.engine, 0.01)
        with start_stream(server.url, LONG) as running:
            wait_for(lambda: [each for each in server.engine.scheduler.running if each.num_output_tokens > 10])
            assert reload(server, folders["new"], mode="pause")[0] == 200
            mixed = sse_text(running.read())
            assert mixed[:4] == old[:4]
            assert mixed != old
            server.wait_until_idle()


def test_a_drain_that_takes_too_long_changes_nothing(folders: dict[str, Path], texts: dict[str, str]):
    with serve(folders["old"]) as server:
        slow_down(server.engine, 0.02)
        with start_stream(server.url, LONG) as running:
            wait_for(lambda: server.engine.scheduler.running)
            status, answer = reload(server, folders["new"], timeout_s=0.05)
            assert status == 429
            assert "nothing was changed" in answer["error"]["message"]
            running.read()
            assert text(server.url) == texts["old"]


@pytest.mark.parametrize("weights", [False, True], ids=["cache", "cache and weights"])
def test_sleep_refuses_requests_and_waking_answers_as_before(server: LocalServer, texts: dict[str, str], weights: bool):
    """The rope tables are buffers that no checkpoint holds: answers after waking show that they survived."""
    assert text(server.url) == texts["old"]
    status, answer = call_json(server.url, "/admin/sleep", {"weights": weights}, headers=KEY)
    assert (status, answer["status"]) == (200, "asleep")
    budget = server.engine.budget
    assert answer["released_bytes"] >= budget.kv_cache_bytes + (budget.weights_bytes if weights else 0)
    assert call(server.url, "/ready")[0] == 503
    assert call(server.url, "/health")[0] == 200
    status, headers, data = call(server.url, "/v1/completions", GREEDY)
    assert status == 503
    assert int(headers["retry-after"]) > 0
    assert json.loads(data)["error"]["code"] == "asleep"
    if weights:  # whatever is left in their memory, none of it may be used
        for parameter in server.engine.decoder.parameters():
            parameter.data.fill_(float("nan"))
    assert call_json(server.url, "/admin/sleep", {}, headers=KEY)[0] == 409
    assert reload(server, "anywhere")[0] == 409
    status, answer = call_json(server.url, "/admin/wake", {}, headers=KEY)
    assert (status, answer["status"]) == (200, "awake")
    assert call(server.url, "/ready")[0] == 200
    assert text(server.url) == texts["old"]
    assert call_json(server.url, "/admin/wake", {}, headers=KEY)[0] == 409


def test_waking_with_other_weights_is_one_transaction(
    server: LocalServer, folders: dict[str, Path], texts: dict[str, str], tmp_path: Path
):
    text(server.url)
    assert call(server.url, "/admin/sleep", {"weights": True}, headers=KEY)[0] == 200
    status, answer = call_json(server.url, "/admin/wake", {"path": str(tmp_path)}, headers=KEY)
    assert status == 400, answer
    assert call(server.url, "/ready")[0] == 503  # it sleeps on
    assert call(server.url, "/admin/wake", {"path": str(folders["new"])}, headers=KEY)[0] == 200
    assert text(server.url) == texts["new"]


def test_a_paused_stream_outlives_sleep(folders: dict[str, Path]):
    with serve(folders["old"]) as server:
        alone = text(server.url, LONG)
        slow_down(server.engine, 0.01)
        with start_stream(server.url, LONG) as running:
            wait_for(lambda: server.engine.scheduler.running)
            for path, body in (("sleep", {"mode": "pause", "weights": True}), ("wake", {})):
                assert call(server.url, f"/admin/{path}", body, headers=KEY)[0] == 200
            assert sse_text(running.read()) == alone


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_bytes": 256 * 2**20},
        {"kv_cache_bytes": 256 * 2**20, "kv_cache_dtype": "int8"},
        {"kv_cache_bytes": 128 * 2**20, "speculative": "draft"},
    ],
    ids=["fp32", "int8", "draft"],
)
def test_sleep_gives_the_memory_of_the_caches_back(folders: dict[str, Path], options: dict[str, Any]):
    config = EngineConfig(**{"max_model_len": 256, "max_num_seqs": 2, **options})
    draft = load_decoder(folders["old"]) if "speculative" in options else None
    engine = Engine(load_decoder(folders["old"]), byte_tokenizer(), config, draft=draft)
    for cache in engine.kv_caches:
        for tensor in cache.tensors():
            tensor.fill_(1)  # touched, so that it takes real memory
    with local_server(engine, admin_key="secret") as server:
        before = rss_bytes()
        assert call(server.url, "/admin/sleep", {}, headers=KEY)[0] == 200
        assert before - rss_bytes() > 200 * 2**20
        assert call(server.url, "/admin/sleep", {"weights": True}, headers=KEY)[0] == 409
        assert call(server.url, "/admin/wake", {}, headers=KEY)[0] == 200
        assert call(server.url, "/v1/completions", GREEDY)[0] == 200


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_sleep_gives_every_weight_back(folders: dict[str, Path], quantization: str):
    config = EngineConfig(max_model_len=256, max_num_seqs=2, kv_cache_bytes=2**20, quantization=quantization)
    engine = load_engine(folders["old"], config)
    caches = sum(tensor.nbytes for tensor in engine.kv_cache.tensors())
    with local_server(engine, folder=folders["old"], admin_key="secret") as server:
        before = call_json(server.url, "/v1/completions", GREEDY)[1]["choices"][0]["text"]
        _, answer = call_json(server.url, "/admin/sleep", {"weights": True}, headers=KEY)
        assert answer["released_bytes"] == caches + engine.budget.weights_bytes
        assert call(server.url, "/admin/wake", {}, headers=KEY)[0] == 200
        assert call_json(server.url, "/v1/completions", GREEDY)[1]["choices"][0]["text"] == before


def test_an_engine_that_dies_while_a_reload_waits_says_so(folders: dict[str, Path]):
    engine = make_engine(load_decoder(folders["old"]))
    with local_server(engine, admin_key="secret") as server, start_stream(server.url, {**LONG, "max_tokens": 150}):
        answers: list[tuple[int, Any]] = []
        slow_down(engine, 0.02)
        waiting = threading.Thread(target=lambda: answers.append(reload(server, folders["new"])))
        waiting.start()
        wait_for(lambda: server.async_engine._work is not None)

        def break_down() -> list[Any]:
            raise RuntimeError("beyond repair")

        engine.step = engine.abandon_step = break_down  # type: ignore[method-assign, assignment]
        waiting.join(20)
        [(status, answer)] = answers
        assert status == 503
        assert "beyond repair" in answer["error"]["message"]
        assert call(server.url, "/health")[0] == 503
        assert reload(server, folders["new"])[0] == 503


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_are_replaced_and_come_back_too(folders: dict[str, Path], quantization: str):
    config = EngineConfig(max_model_len=256, max_num_seqs=2, quantization=quantization)  # type: ignore[arg-type]
    with local_server(open_engine(folders["new"], config).engine) as fresh:
        expected = text(fresh.url)
    engine = open_engine(folders["old"], config).engine
    with local_server(engine, folder=str(folders["old"]), admin_key="secret") as server:
        assert text(server.url) != expected
        assert reload(server, folders["new"])[0] == 200
        assert text(server.url) == expected
        for path, body in (("sleep", {"weights": True}), ("wake", {})):
            assert call(server.url, f"/admin/{path}", body, headers=KEY)[0] == 200
        assert text(server.url) == expected


def test_reloads_among_clients_that_come_and_go(folders: dict[str, Path], texts: dict[str, str]):
    """Everyone who stays gets a whole answer, nothing leaks, and the last weights are the ones that answer."""
    engine = make_engine(load_decoder(folders["old"]), max_num_seqs=6, max_num_batched_tokens=64, num_blocks=64)
    with local_server(engine, folder=str(folders["old"]), admin_key="secret") as server:
        counts: list[Any] = []
        crowd = threading.Thread(target=lambda: counts.append(soak(server.url, num_requests=250, seed=3)))
        crowd.start()
        num_reloads = 0
        while crowd.is_alive() or num_reloads % 2 == 0:  # an odd number, so that it ends with the new weights
            name = ("new", "old")[num_reloads % 2]
            status, answer = reload(server, folders[name], mode=("drain", "pause")[num_reloads // 2 % 2])
            assert status == 200, answer
            num_reloads += 1
        crowd.join()
        assert counts[0].total() == 250
        assert num_reloads > 4
        server.wait_until_idle()
        assert text(server.url) == texts["new"]
        assert call_json(server.url, "/version")[1]["weights_version"] == num_reloads
