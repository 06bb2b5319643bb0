"""Replicas behind one address: where requests go, and what happens when a replica or a client goes away."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardline.serving.launch import ServerProcess, start_server
from shardline.serving.routing import PrefixRouting

LONG = "This beginning is shared by many requests and is long enough to fill several blocks of the cache. " * 2


def test_a_beginning_goes_where_it_was_computed_and_new_ones_go_round():
    routing = PrefixRouting(3, piece=4)
    first = routing.choose("aaaa bbbb cccc", [0, 0, 0])
    assert routing.choose("xxxx yyyy", [0, 0, 0]) != first
    for _ in range(5):
        assert routing.choose("aaaa bbbb other", [0, 0, 0]) == first
    assert {routing.choose(f"{n} is new, and long", [0, 0, 0]) for n in range(3)} == {0, 1, 2}


def test_a_beginning_that_everyone_has_does_not_draw_everyone_to_one_replica():
    routing = PrefixRouting(2, piece=4)
    texts = [f"same {number} and then something quite different {number}" for number in range(8)]
    assert {routing.choose(text, [0, 0]) for text in texts} == {0, 1}


def test_the_longest_beginning_wins():
    routing = PrefixRouting(2, piece=2)
    assert routing.choose("aabbcc", [0, 9]) == 0
    assert routing.choose("aabbdd", [None, 0]) == 1
    assert routing.choose("aabbdd", [0, 0]) == 1
    assert routing.choose("aabbcc", [0, 0]) == 0


def test_a_busy_replica_is_left_alone_whatever_it_has_computed():
    routing = PrefixRouting(2, piece=2, max_imbalance=3)
    assert routing.choose("aabb", [0, 5]) == 0
    assert routing.choose("aabb", [3, 0]) == 0
    assert routing.choose("aabb", [4, 0]) == 1


def test_replicas_that_can_not_be_used_get_nothing():
    routing = PrefixRouting(2, piece=2)
    assert routing.choose("aa", [None, 7]) == 1
    assert routing.choose("aa", [None, None]) is None


def test_what_is_remembered_is_bounded_and_can_be_forgotten():
    routing = PrefixRouting(1, piece=1, remembered=10)
    routing.choose("abcdefghijklmnop", [0])
    assert len(routing._sent[0]) == 10
    assert routing._known(0, routing._pieces("abcdefghijklmnop")) == 10
    routing.forget(0)
    assert routing._known(0, routing._pieces("abc")) == 0


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[ServerProcess]:
    arguments = ["--max-model-len", "256", "--max-num-seqs", "4", "--data-parallel-size", "2"]
    with start_server(tiny_folder, arguments=arguments) as running:
        yield running


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def get(server: ServerProcess, path: str) -> str:
    with urllib.request.urlopen(server.url + path, timeout=30) as answer:
        return answer.read().decode()


def metric(server: ServerProcess, name: str) -> dict[str, float]:
    """The value of a series for each replica."""
    found = re.findall(rf"^shardline:{name}{{(.*?)}} (\S+)$", get(server, "/metrics"), flags=re.MULTILINE)
    return {re.search(r'replica="(\d)"', labels)[1]: float(value) for labels, value in found}  # type: ignore[index]


def replicas(server: ServerProcess) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(server.process.pid).children()
        if "--memory-share" in " ".join(child.cmdline())
    ]


def test_requests_that_begin_alike_share_a_replica_s_cache(server: ServerProcess):
    assert server.ready["replicas"] == 2
    assert json.loads(get(server, "/v1/models"))["data"][0]["id"] == "tiny"
    before = metric(server, "prefix_cache_hits_total")
    for number in range(6):
        body = {"prompt": f"{LONG}{number}", "max_tokens": 2, "temperature": 0}
        assert post(server, "/v1/completions", body)["usage"]["completion_tokens"] > 0
    after = metric(server, "prefix_cache_hits_total")
    assert sorted(after) == ["0", "1"]
    gained = [after[index] - before.get(index, 0.0) for index in after]
    assert min(gained) == 0
    assert max(gained) >= 5 * 160


def test_other_requests_are_spread(server: ServerProcess):
    before = metric(server, "prompt_tokens_total")
    with ThreadPoolExecutor(8) as pool:
        bodies = [{"prompt": f"{number} is new", "max_tokens": 8} for number in range(16)]
        list(pool.map(lambda body: post(server, "/v1/completions", body), bodies))
    after = metric(server, "prompt_tokens_total")
    assert all(after[index] > before[index] for index in ("0", "1"))


def test_a_stream_is_what_the_whole_answer_would_be(server: ServerProcess):
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0}
    whole = post(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
    request = urllib.request.Request(
        server.url + "/v1/chat/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        frames = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert frames.pop() == "[DONE]"
    deltas = [json.loads(frame)["choices"][0]["delta"].get("content") or "" for frame in frames]
    assert "".join(deltas) == whole


def test_errors_pass_through(server: ServerProcess):
    for path, body, code in (("/v1/completions", {"prompt": "a", "n": 0}, 400), ("/v1/nothing", {}, 404)):
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(server, path, body)
        assert caught.value.code == code
        assert "error" in json.loads(caught.value.read())
        caught.value.close()


def test_a_conversation_of_stored_responses_stays_with_the_replica_that_keeps_it(server: ServerProcess):
    first = post(server, "/v1/responses", {"input": "Hello", "max_output_tokens": 4})
    for number in range(4):  # to either replica, were it by turns
        post(server, "/v1/completions", {"prompt": f"between {number}", "max_tokens": 1})
        body = {"input": "And then?", "previous_response_id": first["id"], "max_output_tokens": 4}
        assert post(server, "/v1/responses", body)["previous_response_id"] == first["id"]


def test_a_client_that_leaves_takes_its_request_with_it(server: ServerProcess):
    body = {"prompt": "tell me", "max_tokens": 200, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    answer = urllib.request.urlopen(request, timeout=60)
    answer.readline()
    answer.close()
    deadline = time.monotonic() + 20
    while sum(metric(server, "num_requests_running").values()) > 0:
        assert time.monotonic() < deadline, "the replica went on without its client"
        time.sleep(0.05)


def test_a_replica_that_dies_is_replaced_and_nobody_notices(server: ServerProcess):
    victim = replicas(server)[0]
    os.kill(victim.pid, signal.SIGKILL)
    for number in range(12):
        assert post(server, "/v1/completions", {"prompt": f"still {number}", "max_tokens": 2})["choices"]
    deadline = time.monotonic() + 60
    while json.loads(get(server, "/health"))["replicas"]["healthy"] < 2:
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.2)
    assert victim.pid not in {child.pid for child in replicas(server)}


def test_replicas_end_with_the_router_however_it_ends(tiny_folder: Path):
    arguments = ["--max-model-len", "64", "--max-num-seqs", "2", "--data-parallel-size", "2"]
    with start_server(tiny_folder, arguments=arguments) as running:
        children = replicas(running)
        running.process.kill()
        gone, alive = psutil.wait_procs(children, timeout=20)
        assert len(gone) == 2, alive


def test_the_whole_ends_when_it_is_told_to(tiny_folder: Path):
    arguments = ["--max-model-len", "64", "--max-num-seqs", "2", "--data-parallel-size", "2"]
    with start_server(tiny_folder, arguments=arguments) as running:
        children = replicas(running)
        assert len(children) == 2
        assert running.stop() == 0
        gone, alive = psutil.wait_procs(children, timeout=20)
        assert len(gone) == 2, alive
