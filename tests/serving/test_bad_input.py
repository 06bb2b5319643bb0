"""Whatever a client sends, the answer is an OpenAI object and never a 500, and the engine goes on."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.conftest import LocalServer
from serving.test_http import call, call_json

PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["user", "system", "text", "none", "tiny", "a\x00b", "\ud800", "\u65e5\u672c"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "model",
        "prompt",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "stop",
        "stop_token_ids",
        "seed",
        "logprobs",
        "top_logprobs",
        "echo",
        "stream",
        "stream_options",
        "user",
        "logit_bias",
        "presence_penalty",
        "frequency_penalty",
        "min_tokens",
        "repetition_penalty",
        "ignore_eos",
        "skip_special_tokens",
        "tools",
        "response_format",
        "tokens",
        "guided_json",
        "structured_outputs",
        "tool_choice",
        "parallel_tool_calls",
        "allowed_token_ids",
        "bad_words",
        "best_of",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "priority",
        "surprise",
    ]
)
VALID: list[dict[str, Any]] = [
    {"prompt": "abc", "max_tokens": 2},
    {"prompt": [1, 2, 3], "max_tokens": 2},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    {"messages": [{"role": "user", "content": "hi"}], "tools": [{"function": {"name": "f"}}], "max_tokens": 2},
    {"prompt": "abc", "max_tokens": 2, "structured_outputs": {"choice": ["a", "b"]}},
    {"tokens": [104, 105]},
]


def check(local: LocalServer, path: str, body: bytes) -> int:
    status, headers, data = call(local.url, path, body)
    assert status in (200, 400, 404, 413, 429), (status, body, data)
    if headers["content-type"].startswith("text/event-stream"):
        assert data.endswith(b"data: [DONE]\n\n")
        return status
    answer = json.loads(data)
    if status != 200:
        assert set(answer) == {"error"}
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["message"]
    return status


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(PATHS),
    base=st.sampled_from(VALID),
    changes=st.dictionaries(FIELDS, JSON_VALUES, max_size=3),
)
def test_wrong_values_never_make_a_500(local: LocalServer, path: str, base: dict[str, Any], changes: dict[str, Any]):
    check(local, path, json.dumps({**base, **changes}).encode())


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), base=st.sampled_from(VALID), seed=st.integers(0, 10**6))
def test_damaged_json_never_makes_a_500(local: LocalServer, path: str, base: dict[str, Any], seed: int):
    rng = random.Random(seed)
    body = bytearray(json.dumps(base).encode())
    for _ in range(rng.randint(1, 4)):
        where = rng.randrange(len(body))
        kind = rng.randrange(3)
        if kind == 0:
            body[where] = rng.randrange(256)
        elif kind == 1:
            del body[where]
        else:
            body.insert(where, rng.choice(b'{}[]",:\x00\xff9-e'))
    check(local, path, bytes(body))


def test_bodies_that_are_not_objects(local: LocalServer):
    for body in (b"", b"null", b"[]", b'"x"', b"12", b"{", b"\xff\xfe", b"NaN", b'{"prompt": NaN}', b"{}", b"\x00"):
        assert check(local, "/v1/completions", body) == 400
    assert check(local, "/v1/completions", b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}") == 400
    assert check(local, "/v1/completions", b'{"a":' * 50_000) == 400


def test_a_wrong_type_names_the_field(local: LocalServer):
    for change, param in [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": [1]}, "stop[0]"),
        ({"stream": "yes"}, "stream"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"temperature": 1e400}, None),
    ]:
        body = {"prompt": "abc", **change}
        status, answer = call_json(local.url, "/v1/completions", json.dumps(body).encode())
        assert status == 400, change
        if param is not None:
            assert answer["error"]["param"] == param
    status, answer = call_json(local.url, "/v1/completions", {"max_tokens": 5})
    assert (status, answer["error"]["message"]) == (400, "prompt is missing.")


def test_extreme_numbers_are_refused_or_answered_never_a_500(local: LocalServer):
    extremes = [2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -1, -(2**63), 1e-300, 1e300, 1e-40, 0, 99.9]
    fields = ["max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "temperature", "top_p", "min_p"]
    fields += ["best_of", "prompt_logprobs", "truncate_prompt_tokens", "priority"]
    fields += ["presence_penalty", "frequency_penalty", "repetition_penalty"]
    for field in fields:
        for value in extremes:
            body = {"prompt": "abc", "max_tokens": 2, "min_tokens": 1, "top_p": 0.9, field: value}
            check(local, "/v1/completions", json.dumps(body).encode())


def test_unknown_places_and_methods_are_error_objects(local: LocalServer):
    status, answer = call_json(local.url, "/v2/models")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    status, answer = call_json(local.url, "/v1/completions")
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
    status, answer = call_json(local.url, "/v1/models/other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_tokenize_and_detokenize(local: LocalServer):
    _, answer = call_json(local.url, "/tokenize", {"prompt": "h\u00e9"})
    assert answer == {"count": 3, "max_model_len": 256, "tokens": [104, 195, 169]}
    _, answer = call_json(local.url, "/detokenize", {"tokens": [104, 195, 169]})
    assert answer == {"prompt": "h\u00e9"}
    _, answer = call_json(local.url, "/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert answer["count"] > 10
    assert call_json(local.url, "/tokenize", {})[0] == 400


def test_after_all_that_the_engine_is_whole(local: LocalServer):
    local.wait_until_idle()
    assert call(local.url, "/health")[0] == 200
    assert call(local.url, "/v1/completions", {"prompt": "abc", "max_tokens": 2})[0] == 200
