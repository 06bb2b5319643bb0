"""A real server process, driven by the official client: what everyone's programs will do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from shardline.serving.client import stream_chat
from shardline.serving.launch import ServerProcess, start_server
from shardline.text.tokenizer import byte_tokenizer

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(server_process: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server_process.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_and_their_context(client: openai.OpenAI, server_process: ServerProcess):
    [model] = client.models.list().data
    assert model.id == server_process.model == "tiny"
    assert model.model_dump()["max_model_len"] == 256
    assert client.models.retrieve("tiny").id == "tiny"


def test_chat_whole_and_streamed_are_equal(client: openai.OpenAI):
    request: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**request)
    prompt = byte_tokenizer().encode_chat(MESSAGES, add_generation_prompt=True)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(prompt)
    assert whole.usage.completion_tokens == 20
    assert whole.choices[0].finish_reason == "length"
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    details = chunks[-1].usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == len(prompt) // 16 * 16  # the second one finds the first one's blocks
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_without_max_tokens_a_chat_may_fill_the_context(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == 256
    assert answer.choices[0].finish_reason == "length"


def test_completions_take_texts_and_ids_and_return_n_of_each(client: openai.OpenAI):
    for prompt, num_tokens in [("abc", 3), (["abc", "de"], 5), ([97, 98, 99], 3), ([[97, 98, 99], [100, 101]], 5)]:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, n=2, seed=5)
        num_prompts = 1 if num_tokens == 3 else 2
        assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == num_tokens
        assert answer.usage.completion_tokens == sum(4 for _ in answer.choices)
        assert answer.choices[0].text != answer.choices[1].text
    again = client.completions.create(model="tiny", prompt=[[97, 98, 99], [100, 101]], max_tokens=4, n=2, seed=5)
    assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices]


def test_completions_default_to_sixteen_tokens(client: openai.OpenAI):
    answer = client.completions.create(model="tiny", prompt="abc", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_a_stop_string_ends_the_reply_before_it(client: openai.OpenAI):
    request: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 60, "temperature": 0}
    text = client.completions.create(**request, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[20:24]
    cut = client.completions.create(**request, stop=[stop], extra_body={"ignore_eos": True}).choices[0]
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop"
    chunks = client.completions.create(**request, stop=stop, stream=True, extra_body={"ignore_eos": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut.text


def test_chat_logprobs(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content
    assert entries is not None
    assert len(entries) == 5
    for entry in entries:
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy: the chosen one is the likeliest
        assert len(entry.top_logprobs) == 3
    raw = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert raw.decode("utf-8", errors="replace") == answer.choices[0].message.content


def test_echo_scores_the_prompt_as_evaluation_harnesses_need_it(client: openai.OpenAI):
    request: dict[str, Any] = {"model": "tiny", "prompt": "score me", "echo": True, "logprobs": 1, "temperature": 0}
    choice = client.completions.create(**request, max_tokens=1).choices[0]
    scores = choice.logprobs
    assert scores is not None
    assert choice.text.startswith("score me")
    assert scores.tokens is not None
    assert "".join(scores.tokens[:8]) == "score me"
    assert scores.token_logprobs is not None
    assert scores.token_logprobs[0] is None
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs or []) == 9
    assert scores.text_offset == list(range(9))
    only = client.completions.create(**request, max_tokens=0)
    assert only.choices[0].text == "score me"
    assert only.choices[0].logprobs is not None
    assert only.choices[0].logprobs.token_logprobs == pytest.approx(scores.token_logprobs[:8])
    assert only.usage is not None
    assert only.usage.completion_tokens == 0


@pytest.mark.parametrize(
    ("change", "error", "param", "words"),
    [
        ({"model": "nope"}, openai.NotFoundError, "model", "this server has 'tiny'"),
        ({"max_tokens": "many"}, openai.BadRequestError, "max_tokens", "expected `int | null`"),
        ({"temperature": -2}, openai.BadRequestError, "temperature", "temperature = -2"),
        ({"messages": []}, openai.BadRequestError, "messages", "messages is empty"),
        ({"messages": [{"role": "boss", "content": "x"}]}, openai.BadRequestError, "messages", "'boss'"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, openai.BadRequestError, "prompt", "4.. tokens.*256"),
        ({"max_tokens": 250}, openai.BadRequestError, "max_tokens", "max_tokens = 250.*256"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, r"tools[0].function", "function is missing"),
        ({"tools": [{"function": {"name": "f"}}]}, openai.BadRequestError, "tools", "no place for tools"),
        ({"extra_body": {"functions": [{"name": "f"}]}}, openai.BadRequestError, "functions", "use tools"),
        ({"n": 0}, openai.BadRequestError, "n", "between 1 and"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs", "needs logprobs"),
    ],
)
def test_errors_are_openais(client: openai.OpenAI, change: dict[str, Any], error: type, param: str, words: str):
    with pytest.raises(error, match=words) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **change})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_what_constrains_nothing_is_accepted(client: openai.OpenAI):
    client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=1, response_format={"type": "text"}, user="someone", n=1
    )


def test_an_unknown_field_is_answered_with_a_warning(client: openai.OpenAI):
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=1, extra_body={"max_tokns": 5, "colour": "blue"}
    )
    warning = raw.headers["x-shardline-warning"]
    assert "\"max_tokns\"; did you mean 'max_tokens'?" in warning
    assert '"colour"' in warning


def test_request_ids_are_unique(client: openai.OpenAI):
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: client.completions.create(model="tiny", prompt="x", max_tokens=1).id, range(24)))
    assert len(set(ids)) == 24


def test_content_parts_are_joined_and_other_kinds_refused(client: openai.OpenAI):
    request: dict[str, Any] = {"model": "tiny", "max_tokens": 1, "temperature": 0}
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    joined = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **request)
    plain = client.chat.completions.create(messages=MESSAGES, **request)
    assert joined.usage == plain.usage
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(messages=[{"role": "user", "content": image}], **request)


def test_the_clients_of_our_own(server_process: ServerProcess):
    pieces: list[str] = []
    reply = stream_chat(server_process.url, MESSAGES, max_tokens=15, temperature=0, on_text=pieces.append)
    assert "".join(pieces) == reply.text
    assert (reply.num_tokens, reply.finish_reason) == (15, "length")
    assert 0 < reply.ttft_s < reply.wall_s
    assert reply.tokens_per_s is not None
    assert reply.tokens_per_s > 0


def run_cli(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardline", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_port_in_use_is_one_sentence(server_process: ServerProcess, tiny_folder: Path):
    port = server_process.url.rpartition(":")[2]
    done = run_cli("serve", str(tiny_folder), "--port", port)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"shardline serve: Port {port} on 127.0.0.1 is in use; stop what listens there, "
        "or pass another --port (0 takes a free one)."
    )


def test_startup_says_what_fits_and_what_the_defaults_are(server_process: ServerProcess):
    log = server_process.log()
    for words in ("weights", "kv cache", "64 requests of full length", "phases", "sampling", server_process.url):
        assert words.replace("64", "4") in log


def test_a_server_that_can_not_start_says_why(tmp_path: Path):
    from shardline.config import ShardlineError

    with pytest.raises(ShardlineError, match=r"There is no folder"):
        start_server(tmp_path / "nothing", timeout_s=60)


def test_sigterm_lets_running_requests_finish(tiny_folder: Path):
    with start_server(tiny_folder, arguments=["--served-model-name", "other/name"]) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            assert client.models.retrieve("other/name").id == "other/name"
            chunks = client.completions.create(
                model="other/name", prompt="abc", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            first = next(iter(chunks))
            server.process.terminate()
            last = list(chunks)[-1]
        assert first.choices[0].finish_reason is None
        assert last.choices[0].finish_reason == "length"
        assert server.stop() == 0


def test_chat_in_the_terminal_gives_the_servers_reply(server_process: ServerProcess, tiny_folder: Path):
    import json

    done = run_cli("chat", str(tiny_folder), "--prompt", "Hello", "--temperature", "0", "--max-tokens", "10", "--json")
    assert done.returncode == 0, done.stderr
    served = stream_chat(server_process.url, MESSAGES, max_tokens=10, temperature=0)
    assert json.loads(done.stdout)["reply"] == served.text
