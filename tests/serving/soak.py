"""Wrong requests and clients that leave, by the thousand, against a running server. `make soak` runs the long form:

    cd tests && python -m serving.soak --fuzz 10000 --schema-examples 100 --soak 2000

`fuzz` sends damaged bodies, wrong values and broken HTTP; `schema_fuzz` what Schemathesis makes of /openapi.json;
`soak` mixed requests of which a share hangs up at random. Each returns how many requests ended how, and raises when
one of them got a 5xx or an answer in the wrong shape.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize", "/detokenize")
VALID: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}],
    "/v1/completions": [{"prompt": "abc", "max_tokens": 2}, {"prompt": [1, 2, 3], "max_tokens": 2, "logprobs": 1}],
    "/v1/embeddings": [{"input": "abc"}, {"input": ["a", "b"], "encoding_format": "base64"}],
    "/v1/responses": [{"input": "hi", "max_output_tokens": 2}],
    "/tokenize": [{"prompt": "abc"}, {"messages": [{"role": "user", "content": "hi"}]}],
    "/detokenize": [{"tokens": [104, 105]}],
}
EXTREMES: list[Any] = [
    *(0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 2**70, 1e300, -1e300, 1e-300, 1.5, 99.9),
    *("", "x", "a\x00b", "\ud800", "\u65e5\u672c", "\U0001f469\u200d\U0001f467", "x" * 3000, "tiny", "user", "text"),
    *(
        None,
        True,
        False,
        [],
        {},
        [[]],
        [None],
        [1, "a"],
        {"a": 1},
        [0] * 300,
        {"type": "json_object"},
        {"type": "text"},
    ),
]
RAW = (
    b"",
    b"\x00\xff\xfe\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer \xff\xfe\r\ncontent-length: 2\r\n\r\n{}",
    b"GET /%00%ff/../.. HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /v1/models/%F0%9F%98 HTTP/1.1\r\nhost: x\r\n\r\n",
)


class Client:
    """Sends bytes and reads the answer; one connection a request."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 0)

    async def send(self, data: bytes, *, leave_after: int | None = None, timeout_s: float = 60.0) -> bytes:
        """Returns all that came back, or what had come after `leave_after` reads, when it hangs up."""
        reader, writer = await asyncio.open_connection(*self._address)
        answer = b""
        try:
            writer.write(data)
            reads = 0
            while leave_after is None or reads < leave_after:
                piece = await asyncio.wait_for(reader.read(65536), timeout_s)
                if not piece:
                    break
                answer += piece
                reads += 1
        except (ConnectionError, BrokenPipeError):
            pass
        finally:
            writer.close()
        return answer

    async def post(self, path: str, body: bytes, **how: Any) -> bytes:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: soak\r\nconnection: close\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return await self.send(head.encode() + body, **how)


def check_answer(answer: bytes, sent: Any) -> str:
    """Returns the status; fails for a 5xx, or for an error that is no error object."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ")[1].decode()
    assert not status.startswith("5"), (sent, answer[:2000])
    if b"transfer-encoding: chunked" in head.lower():
        return status
    if status != "200" and body and b"application/json" in head.lower():
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}, (sent, error)
        assert error["message"], sent
    return status


def fuzz(url: str, *, num_requests: int, seed: int = 0, num_at_once: int = 8) -> Counter[str]:
    """Sends wrong requests; returns their number by status ("closed": broken HTTP that got no answer)."""
    rng = random.Random(seed)
    client, counts = Client(url), Counter[str]()

    async def one() -> None:
        kind = rng.random()
        if kind < 0.05:
            data = rng.choice(RAW)
            try:
                answer = await client.send(data, leave_after=1, timeout_s=0.2) if data else b""
            except TimeoutError:  # it waits for the rest of a body, rightly
                counts["no answer"] += 1
                return
            answer = answer.partition(b"\r\n\r\n")[0]  # the rest may not have come with the first read
            counts[check_answer(answer, data) if answer.startswith(b"HTTP/") else "closed"] += 1
            return
        path = rng.choice(PATHS)
        body = damaged(rng, path) if kind < 0.5 else wrong_values(rng, path)
        counts[check_answer(await client.post(path, body), (path, body))] += 1

    asyncio.run(_many(one, num_requests, num_at_once))
    return counts


def damaged(rng: random.Random, path: str) -> bytes:
    """A valid body with a few bytes changed, lost or added."""
    body = bytearray(json.dumps(rng.choice(VALID[path])).encode())
    for _ in range(rng.randint(1, 5)):
        where = rng.randrange(len(body))
        change = rng.randrange(4)
        if change == 0:
            body[where] = rng.randrange(256)
        elif change == 1:
            del body[where]
        elif change == 2:
            body.insert(where, rng.choice(b'{}[]",:\x00\xff9-e'))
        else:
            body[where:where] = body[where : where + rng.randint(1, 9)]
    return bytes(body)


def wrong_values(rng: random.Random, path: str) -> bytes:
    """A valid body with fields of the API set to what they should not be."""
    body: dict[str, Any] = dict(rng.choice(VALID[path]))
    for _ in range(rng.randint(1, 3)):
        body[rng.choice(FIELDS)] = rng.choice(EXTREMES)
    return json.dumps(body).encode()


FIELDS = (
    *("model", "prompt", "messages", "input", "tokens", "max_tokens", "max_completion_tokens", "max_output_tokens"),
    *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "seed", "logprobs", "top_logprobs"),
    *("echo", "stream", "stream_options", "user", "logit_bias", "presence_penalty", "frequency_penalty", "min_tokens"),
    *("repetition_penalty", "ignore_eos", "skip_special_tokens", "tools", "tool_choice", "response_format", "suffix"),
    *("guided_json", "surprise", "encoding_format", "dimensions", "pooling", "instructions", "previous_response_id"),
    *("store", "metadata", "text", "best_of", "allowed_token_ids", "bad_words", "priority", "structured_outputs"),
    *("prompt_logprobs", "truncate_prompt_tokens", "parallel_tool_calls", "add_generation_prompt"),
)


def schema_fuzz(url: str, *, max_examples: int, seed: int = 0) -> Counter[str]:
    """Sends what Schemathesis makes of /openapi.json, right and wrong, and checks the answers against it."""
    import requests
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from schemathesis import GenerationMode
    from schemathesis.checks import (
        content_type_conformance,
        not_a_server_error,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    counts = Counter[str]()
    with urllib.request.urlopen(f"{url}/openapi.json") as response:
        schema = schemathesis.openapi.from_dict(json.load(response))
    schema.config.update(base_url=url)
    with requests.Session() as session:
        for result in schema.get_all_operations():
            operation = result.ok()
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

                @seeded(seed)
                @settings(
                    max_examples=max_examples,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                @given(case=operation.as_strategy(generation_mode=mode))
                def ask(case: Any) -> None:
                    answer = case.call(session=session, timeout=60)
                    counts[str(answer.status_code)] += 1
                    case.validate_response(answer, checks=checks)

                if mode is GenerationMode.POSITIVE or operation.body:
                    ask()
    return counts


def soak(
    url: str, *, num_requests: int, share_leaving: float = 0.3, seed: int = 0, num_at_once: int = 16
) -> Counter[str]:
    """Sends good requests of every kind, of which a share hangs up at random; returns how they ended."""
    rng = random.Random(seed)
    client, counts = Client(url), Counter[str]()

    async def one() -> None:
        path, body = good_request(rng)
        data = json.dumps(body).encode()
        if rng.random() >= share_leaving:
            answer = await client.post(path, data)
            assert b" 200 " in answer[:20], (path, body, answer[:500])
            if body.get("stream") and path != "/v1/responses":
                assert b"data: [DONE]" in answer, (path, body, answer[-300:])
            counts["whole"] += 1
            return
        if rng.random() < 0.3:  # before its body is whole
            await client.send(
                f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 999\r\n\r\n{{".encode(), leave_after=0
            )
            counts["left early"] += 1
            return
        wait_s = rng.random() ** 3 * 0.3
        leaving = asyncio.create_task(client.post(path, data, leave_after=rng.choice([1, 2, 5])))
        await asyncio.wait([leaving], timeout=wait_s)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        counts["left"] += 1

    asyncio.run(_many(one, num_requests, num_at_once))
    return counts


def good_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A request that any server with 256 tokens of context answers; many share their beginning."""
    shared = "The same beginning of many prompts, long enough for a few blocks. "
    text = (shared if rng.random() < 0.5 else "") + "word " * rng.randint(1, 12)
    more: dict[str, Any] = {"temperature": rng.choice([0, 0.7, 1.0]), "seed": rng.choice([None, 1, 2])}
    stream = rng.random() < 0.6
    kind = rng.randrange(5)
    if kind == 0:
        messages = [{"role": "user", "content": text}]
        return "/v1/chat/completions", {
            "messages": messages,
            "max_tokens": rng.randint(1, 24),
            "stream": stream,
            **more,
        }
    if kind == 1:
        body = {"prompt": text, "max_tokens": rng.randint(1, 24), "n": rng.randint(1, 3), "stream": stream, **more}
        return "/v1/completions", body
    if kind == 2:
        body = {"prompt": [text, text + "!"], "max_tokens": 2, "echo": True, "logprobs": 2, "stream": stream, **more}
        return "/v1/completions", body
    if kind == 3:
        return "/v1/embeddings", {"input": [text] * rng.randint(1, 4), "pooling": rng.choice(["mean", "last"])}
    body = {"input": text, "max_output_tokens": rng.randint(1, 24), "stream": stream, "store": rng.random() < 0.5}
    return "/v1/responses", body


async def _many(one: Callable[[], Any], num_requests: int, num_at_once: int) -> None:
    left = num_requests

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await one()

    async with asyncio.TaskGroup() as group:
        for _ in range(num_at_once):
            group.create_task(worker())


def metric(url: str, name: str) -> float:
    """Returns the sum of one of the server's series."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"shardline:{name}{{"))


def wait_until_free(url: str, *, timeout_s: float = 30.0) -> None:
    """Returns when nothing runs or waits and no block of the KV cache is in use."""
    deadline = time.monotonic() + timeout_s
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any(metric(url, name) for name in names):
        assert time.monotonic() < deadline, {name: metric(url, name) for name in names}
        time.sleep(0.05)


def main() -> int:
    """Runs all three against a server process of its own and prints what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fuzz", type=int, default=10_000, metavar="N", help="wrong requests")
    parser.add_argument("--schema-examples", type=int, default=100, metavar="N", help="Schemathesis' an operation")
    parser.add_argument("--soak", type=int, default=2_000, metavar="N", help="mixed requests, 30 %% of which hang up")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    import psutil

    from serving.tiny_models import save_tiny_folder
    from shardline.serving.launch import start_server

    flags = ["--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
    with (
        tempfile.TemporaryDirectory() as root,
        start_server(save_tiny_folder(Path(root) / "tiny"), arguments=flags) as server,
    ):
        process = psutil.Process(server.process.pid)

        def report(name: str, counts: Counter[str], started_s: float) -> None:
            wait_until_free(server.url)
            seconds, rss = time.monotonic() - started_s, process.memory_info().rss / 2**20
            ended = ", ".join(f"{key}: {count}" for key, count in sorted(counts.items()))
            print(f"{name}: {counts.total()} requests in {seconds:.0f} s ({ended}); {rss:.0f} MiB, no block in use")

        parts: list[tuple[str, Callable[[int], Counter[str]]]] = [
            ("fuzz", lambda i: fuzz(server.url, num_requests=args.fuzz // 4, seed=args.seed + i)),
            ("schema", lambda i: schema_fuzz(server.url, max_examples=args.schema_examples // 4, seed=args.seed + i)),
            ("soak", lambda i: soak(server.url, num_requests=args.soak // 4, seed=args.seed + i)),
        ]
        for name, run in parts:
            sizes = []
            for quarter in range(4):
                started_s = time.monotonic()
                report(f"{name} {quarter + 1}/4", run(quarter), started_s)
                sizes.append(process.memory_info().rss)
            grown = (sizes[-1] - sizes[1]) / 2**20
            print(f"{name}: memory grew by {grown:.1f} MiB in its second half")
            assert grown < 32, f"{name}: {grown:.1f} MiB more in its second half"
        with urllib.request.urlopen(f"{server.url}/health") as response:
            assert response.status == 200
        said = server.log()
        assert "Traceback" not in said, said
    print("the engine is alive and its log holds no traceback")
    return 0


if __name__ == "__main__":
    sys.exit(main())
