"""Structured output, tools and the rest of the sampling fields over HTTP, driven by the official client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from serving.conftest import LocalServer, local_server
from serving.test_http import call, call_json
from serving.tiny_models import make_decoder, make_engine, tiny_config
from shardline.serving.engine import Engine, EngineConfig
from shardline.serving.protocol import CalledFunction, MadeCall, Message, chat_messages
from shardline.serving.tools import find_style, special_markers
from shardline.text.tokenizer import Tokenizer, byte_tokenizer

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"City": {"type": "string", "maxLength": 4}},
        },
    },
}
PING: Any = {"type": "function", "function": {"name": "ping"}}
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>"
    "<tool_call>NAME</tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_template(template: str) -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer._fast.chat_template = template
    return tokenizer


def client_of(server: LocalServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """A model whose template takes tools in Hermes' style."""
    tokenizer = with_template(TOOL_TEMPLATE)
    limits = EngineConfig(max_model_len=1024, max_num_seqs=8)
    with local_server(
        Engine(make_decoder(tiny_config(tokenizer, max_position_embeddings=1024)), tokenizer, limits)
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "max_tokens": 200, **fields})


def joined(chunks: Any) -> tuple[dict[int, str], dict[int, list[dict[str, str]]], dict[int, str]]:
    """Returns what a stream adds up to: texts, calls and finish reasons by choice."""
    texts: dict[int, str] = {}
    calls: dict[int, list[dict[str, str]]] = {}
    reasons: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            for part in choice.delta.tool_calls or []:
                mine = calls.setdefault(choice.index, [])
                while len(mine) <= part.index:
                    mine.append({"name": "", "arguments": ""})
                mine[part.index]["name"] += part.function.name or ""
                mine[part.index]["arguments"] += part.function.arguments or ""
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    return texts, calls, reasons


def call_list(message: Any) -> list[dict[str, str]]:
    return [{"name": c.function.name, "arguments": c.function.arguments} for c in message.tool_calls or []]


# Structured output


def test_a_schema_is_followed_by_every_sample_streamed_or_not(client: openai.OpenAI):
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    whole = chat(client, response_format=form, n=3, seed=1, logprobs=True, top_logprobs=1)
    texts = [choice.message.content for choice in whole.choices]
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        assert set(json.loads(choice.message.content)) == {"name", "age"}
        assert len(choice.logprobs.content) >= len(choice.message.content)
    assert len(set(texts)) == 3
    streamed, _, reasons = joined(chat(client, response_format=form, n=3, seed=1, stream=True))
    assert [streamed[i] for i in range(3)] == texts
    assert set(reasons.values()) == {"stop"}


def test_pydantic_models_are_parsed(client: openai.OpenAI):
    import pydantic

    class Person(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        name: str = pydantic.Field(max_length=5)
        age: int = pydantic.Field(ge=0, le=99)

    parsed = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, max_tokens=200, response_format=Person, seed=2
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)


def test_json_objects_at_a_high_temperature(client: openai.OpenAI):
    for seed in range(4):
        answer = chat(client, response_format={"type": "json_object"}, temperature=1.5, seed=seed)
        [choice] = answer.choices
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        else:
            assert choice.finish_reason == "length"


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": r"[a-z]{3}-[0-9]{2}"}, r"[a-z]{3}-[0-9]{2}"),
        ({"choice": ["red", "green", "\u7dd1"]}, "red|green|\u7dd1"),
        ({"grammar": 'start: "a" "b"~2..4'}, "ab{2,4}"),
        ({"json": {"enum": ["x", 5]}}, '"x"|5'),
        ({"json_object": True, "disable_any_whitespace": True}, r"\{.*"),
    ],
)
def test_structured_outputs_of_both_endpoints(client: openai.OpenAI, wanted: dict[str, Any], pattern: str):
    extra = {"structured_outputs": wanted}
    answer = chat(client, extra_body=extra, seed=1, max_tokens=40)
    assert re.fullmatch(pattern, answer.choices[0].message.content, re.DOTALL)
    plain = client.completions.create(model="tiny", prompt="x", max_tokens=40, n=2, best_of=3, seed=1, extra_body=extra)
    for choice in plain.choices:
        assert re.fullmatch(pattern, choice.text, re.DOTALL)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"rgx": "a"}}, "structured_outputs", "unknown field `rgx`"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "unknown field"),
        ({"response_format": {"type": "json_objct"}}, "response_format", "did you mean 'json_object'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema is missing"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "unknown field `schema`"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "send one of them",
        ),
        ({"guided_json": {}}, "guided_json", "use structured_outputs.json"),
        ({"guided_regex": "a"}, "guided_regex", "use structured_outputs.regex"),
        ({"guided_choice": ["a"]}, "guided_choice", "use structured_outputs.choice"),
        ({"guided_grammar": "a"}, "guided_grammar", "use structured_outputs.grammar"),
        ({"guided_decoding_backend": "x"}, "guided_decoding_backend", "leave it out"),
        ({"grammar": "root ::= a"}, "grammar", "use structured_outputs.grammar"),
        ({"n": 2, "allowed_token_ids": []}, "allowed_token_ids", "at least one"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids", "0 to 258"),
        ({"bad_words": [" "]}, "bad_words", "empty"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "between 0 and 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not for streams"),
        ({"priority": 2**40}, "priority", "between"),
    ],
)
def test_a_constraint_that_can_not_be_met_is_a_400(server: LocalServer, body: dict[str, Any], param: str, words: str):
    for path, request in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "abc"})):
        status, answer = call_json(server.url, f"/v1/{path}", {**request, "max_tokens": 3, **body})
        assert status == 400, answer
        assert answer["error"]["param"].partition(".")[0] == param
        assert words in answer["error"]["message"]


def test_bad_grammars_do_not_disturb_the_requests_beside_them(server: LocalServer, client: openai.OpenAI):
    def ask(number: int) -> Any:
        if number % 2:
            body = {"prompt": "x", "structured_outputs": {"regex": "((" * number}}
            return call_json(server.url, "/v1/completions", body)[0]
        return chat(client, seed=7, temperature=0, max_tokens=20).choices[0].message.content

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(16)))
    assert set(answers[1::2]) == {400}
    assert len(set(answers[0::2])) == 1
    server.wait_until_idle()


def test_a_grammar_that_fails_in_mid_reply_is_the_clients_error(server: LocalServer):
    body = {
        "prompt": "x",
        "max_tokens": 200,
        "allowed_token_ids": [97],
        "structured_outputs": {"regex": "((a{1,100}){1,100}){1,100}"},
    }
    status, answer = call_json(server.url, "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "structured_outputs")
    status, _, data = call(server.url, "/v1/completions", {**body, "stream": True})
    frames = [json.loads(line[6:]) for line in data.decode().split("\n\n") if line.startswith("data: {")]
    assert status == 200
    assert frames[-1]["error"]["type"] == "invalid_request_error"
    server.wait_until_idle()


# Tools


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_is_asked_for_comes_with_valid_arguments(client: openai.OpenAI, choice: Any):
    request = {"tools": [WEATHER, PING], "tool_choice": choice, "seed": 3, "parallel_tool_calls": False}
    whole = chat(client, **request, n=2)
    for answer in whole.choices:
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        [made] = answer.message.tool_calls
        assert made.id.startswith("call_")
        arguments = json.loads(made.function.arguments)
        if made.function.name == "get_weather":
            assert set(arguments) == {"city", "days"}
            assert arguments["days"] in (1, 2, 3)
        else:
            assert (made.function.name, arguments) == ("ping", {})
            assert choice == "required"
    texts, calls, reasons = joined(chat(client, **request, n=2, stream=True))
    assert [calls[index] for index in range(2)] == [call_list(answer.message) for answer in whole.choices]
    assert set(texts.values()) == {""}
    assert set(reasons.values()) == {"tool_calls"}


def test_several_calls_in_one_reply(client: openai.OpenAI):
    # After a call a line break goes on to the next one, and the end of the text ends the reply: biased to go on.
    request: dict[str, Any] = {"tools": [PING], "tool_choice": "required", "seed": 4, "max_tokens": 400}
    request["logit_bias"] = {str(ord("\n")): 15}
    whole = chat(client, **request).choices[0]
    calls = call_list(whole.message)
    assert len(calls) >= 2
    assert all((each["name"], json.loads(each["arguments"])) == ("ping", {}) for each in calls)
    assert len({made.id for made in whole.message.tool_calls}) == len(calls)
    texts, streamed, reasons = joined(chat(client, **request, stream=True))
    assert streamed[0] == calls
    assert (texts[0], reasons[0]) == (whole.message.content or "", whole.finish_reason)


def test_a_call_that_max_tokens_cuts_is_content(client: openai.OpenAI):
    answer = chat(client, tools=[WEATHER], tool_choice="required", max_tokens=20, seed=1)
    [choice] = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert choice.message.content.startswith("<tool_call>\n")
    texts, _, _ = joined(chat(client, tools=[WEATHER], tool_choice="required", max_tokens=20, seed=1, stream=True))
    assert texts[0] == choice.message.content


def test_auto_leaves_free_text_alone(client: openai.OpenAI):
    plain = chat(client, tools=[WEATHER], tool_choice="auto", temperature=0, max_tokens=30)
    assert plain.choices[0].message.tool_calls is None
    texts, _, _ = joined(chat(client, tools=[WEATHER], temperature=0, max_tokens=30, stream=True))
    assert texts[0] == plain.choices[0].message.content


def test_a_strict_tool_has_its_form_enforced_where_it_is_called(server: LocalServer, client: openai.OpenAI):
    strict: Any = json.loads(json.dumps(WEATHER))
    strict["function"]["strict"] = True
    # The bias makes the model open a call at once; what follows the marker is the grammar's.
    bias = {str(ord("<")): 30}
    answer = chat(client, tools=[strict], logit_bias=bias, max_tokens=400, seed=5, parallel_tool_calls=False)
    message = answer.choices[0].message
    for made in message.tool_calls or []:
        assert json.loads(made.function.arguments)["days"] in (1, 2, 3)
    assert "<tool_call>" not in (message.content or "") or answer.choices[0].finish_reason == "length"


def test_a_response_format_beside_tools(client: openai.OpenAI):
    form: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    for seed in range(4):
        message = chat(client, tools=[WEATHER], response_format=form, seed=seed).choices[0].message
        assert message.tool_calls or set(json.loads(message.content)) == {"name", "age"}
    with pytest.raises(openai.BadRequestError, match="different replies"):
        chat(client, tools=[WEATHER], tool_choice="required", response_format=form)


def test_none_and_no_tools_mean_text(client: openai.OpenAI, server: LocalServer):
    plain = chat(client, temperature=0, max_tokens=10)
    none = chat(client, tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=10)
    assert none.choices[0].message.content == plain.choices[0].message.content
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens
    shown = chat(client, tools=[WEATHER], temperature=0, max_tokens=10)
    assert shown.usage.prompt_tokens > plain.usage.prompt_tokens + 100


def test_a_history_with_calls_and_results(client: openai.OpenAI, server: LocalServer):
    def history(arguments: Any) -> list[Any]:
        made = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        return [
            *MESSAGES,
            {"role": "assistant", "content": None, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ]

    counts = set()
    for arguments in ('{"city": "Bonn"}', {"city": "Bonn"}):
        body = {"messages": history(arguments), "tools": [WEATHER], "max_tokens": 3, "temperature": 0}
        status, answer = call_json(server.url, "/v1/chat/completions", body)
        assert status == 200, answer
        counts.add(answer["usage"]["prompt_tokens"])
    assert len(counts) == 1
    for arguments in ("{", "[1]", '"x"'):
        status, answer = call_json(server.url, "/v1/chat/completions", {"messages": history(arguments)})
        assert status == 400
        assert "not a JSON object" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice", "'maybe' is unknown"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
            "tool_choice",
            "not among",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools", "comes twice"),
        ({"tools": [{"type": "magic", "function": {"name": "f"}}]}, "tools", "'magic'"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}], "tool_choice": "required"}, "tools",
         "type 'object'"),
        ({"tools": [{"function": {"name": "f", "parameters": {"not": {}}, "strict": True}}]}, "tools", "Unimplemented"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ],
)  # fmt: skip
def test_tools_that_can_not_be_used_are_a_400(server: LocalServer, change: dict[str, Any], param: str, words: str):
    status, answer = call_json(server.url, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, **change})
    assert status == 400, answer
    assert answer["error"]["param"].partition("[")[0] == param
    assert words in answer["error"]["message"]


def test_schemas_of_tools_that_are_not_strict_may_say_more_than_can_be_enforced(client: openai.OpenAI):
    loose = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "not": {"required": ["x"]}}},
    }
    answer = chat(client, tools=[loose], tool_choice="required", seed=1, max_tokens=400)
    assert answer.choices[0].message.tool_calls or answer.choices[0].finish_reason == "length"


def test_a_template_without_tools_gets_them_as_text_when_a_parser_is_named():
    engine = make_engine(max_model_len=512)
    with local_server(engine, tool_call_parser="hermes") as server, client_of(server) as client:
        request: dict[str, Any] = {"tools": [PING], "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
        answer = chat(client, **request, max_tokens=100)
        [made] = call_list(answer.choices[0].message)
        assert (made["name"], json.loads(made["arguments"])) == ("ping", {})
        assert answer.usage.prompt_tokens > 150
        said = answer.choices[0].message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "pong"}
        again = chat(client, messages=[*MESSAGES, said, result], max_tokens=3, tools=[PING])
        assert again.usage.prompt_tokens > answer.usage.prompt_tokens + 30


def test_llama_style_calls():
    template = TOOL_TEMPLATE.replace("<tool_call>NAME</tool_call>", '{"name": ..., "parameters": ...}').replace(
        "<tool_call>", ""
    )
    tokenizer = with_template(template.replace("</tool_call>", ""))
    engine = Engine(
        make_decoder(tiny_config(tokenizer, max_position_embeddings=1024)),
        tokenizer,
        EngineConfig(max_model_len=1024, max_num_seqs=4),
    )
    with local_server(engine) as server, client_of(server) as client:
        request: dict[str, Any] = {
            "tools": [WEATHER],
            "tool_choice": "required",
            "seed": 2,
            "parallel_tool_calls": False,
        }
        whole = chat(client, **request)
        [made] = call_list(whole.choices[0].message)
        assert made["name"] == "get_weather"
        assert set(json.loads(made["arguments"])) == {"city", "days"}
        _, calls, reasons = joined(chat(client, **request, stream=True))
        assert (calls[0], reasons[0]) == ([made], "tool_calls")


# The rest of the sampling fields


def test_best_of_returns_the_likeliest(server: LocalServer, client: openai.OpenAI):
    request: dict[str, Any] = {"model": "tiny", "prompt": "once", "max_tokens": 6, "seed": 5, "logprobs": 0}
    every = client.completions.create(**request, n=5, extra_body={"ignore_eos": True})

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    ranked = [choice.text for choice in sorted(every.choices, key=mean, reverse=True)]
    best = client.completions.create(**request, n=2, best_of=5, extra_body={"ignore_eos": True})
    assert [choice.text for choice in best.choices] == ranked[:2]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage is not None
    assert best.usage.completion_tokens == 30
    del request["logprobs"]
    plain = client.completions.create(**request, best_of=5, extra_body={"ignore_eos": True})
    assert [choice.text for choice in plain.choices] == ranked[:1]
    assert plain.choices[0].logprobs is None
    for wrong in ({"best_of": 1, "n": 2}, {"best_of": 3, "stream": True}, {"best_of": 1000}):
        status, answer = call_json(server.url, "/v1/completions", {"prompt": "x", "max_tokens": 1, **wrong})
        assert (status, answer["error"]["param"]) in [(400, "best_of"), (400, "n")]


def test_prompt_logprobs_are_vllms_and_the_mode_is_said(server: LocalServer):
    body = {"prompt": "score", "max_tokens": 1, "temperature": 0, "logprobs": 2, "prompt_logprobs": 2}
    status, headers, data = call(server.url, "/v1/completions", {**body, "echo": True})
    assert (status, headers["x-shardline-logprobs-mode"]) == (200, "raw")
    [choice] = json.loads(data)["choices"]
    scores = choice["prompt_logprobs"]
    assert scores[0] is None
    assert len(scores) == 5
    for place, token in enumerate(b"core", start=1):
        entry = scores[place][str(token)]
        assert entry["logprob"] == pytest.approx(choice["logprobs"]["token_logprobs"][place])
        assert entry["decoded_token"] == chr(token)
        assert len(scores[place]) in (2, 3)
        assert {each["rank"] for each in scores[place].values()} >= {1, 2}
    chat_body = {"messages": MESSAGES, "max_tokens": 1, "prompt_logprobs": 0}
    status, answer = call_json(server.url, "/v1/chat/completions", chat_body)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in answer["prompt_logprobs"][1:])
    _, headers, _ = call(server.url, "/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert "x-shardline-logprobs-mode" not in headers
    only = {"prompt": "score", "max_tokens": 0, "prompt_logprobs": 1}
    status, answer = call_json(server.url, "/v1/completions", only)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 0)


def test_a_prompt_is_cut_only_where_that_is_asked_and_it_is_said(server: LocalServer):
    body = {"prompt": "a" * 1100 + "bcd", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    assert call_json(server.url, "/v1/completions", body)[0] == 400
    _, short = call_json(server.url, "/v1/completions", {**body, "prompt": "aaabcd"})
    status, headers, data = call(server.url, "/v1/completions", {**body, "truncate_prompt_tokens": 6})
    answer = json.loads(data)
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["choices"][0]["text"] == short["choices"][0]["text"]
    assert "cut the prompt from 1103 to its last 6 tokens" in headers["x-shardline-warning"]
    _, answer = call_json(server.url, "/v1/completions", {**body, "truncate_prompt_tokens": -1})
    assert answer["usage"]["prompt_tokens"] == 1024 - 4
    _, headers, _ = call(server.url, "/v1/completions", {**body, "prompt": "abc", "truncate_prompt_tokens": 6})
    assert "x-shardline-warning" not in headers


def test_allowed_tokens_bad_words_and_priority(server: LocalServer):
    body = {"prompt": "abc", "max_tokens": 12, "seed": 1, "ignore_eos": True, "priority": -3}
    _, answer = call_json(server.url, "/v1/completions", {**body, "allowed_token_ids": [97, 98]})
    assert set(answer["choices"][0]["text"]) <= {"a", "b"}
    greedy = {**body, "temperature": 0}
    _, free = call_json(server.url, "/v1/completions", greedy)
    text = free["choices"][0]["text"]
    word = next(text[i : i + 2] for i in range(1, 10) if text[i : i + 2].isascii() and text[i : i + 2].isprintable())
    _, barred = call_json(server.url, "/v1/completions", {**greedy, "bad_words": [word]})
    assert word.strip() in text
    assert word.strip() not in barred["choices"][0]["text"]


def test_usage_says_what_the_cache_had(server: LocalServer):
    body = {"prompt": "a prompt that no other test sends, long enough for blocks", "max_tokens": 2, "n": 2}
    _, first = call_json(server.url, "/v1/completions", body)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    _, second = call_json(server.url, "/v1/completions", body)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    _, _, data = call(
        server.url, "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    last = json.loads(data.decode().split("\n\n")[-3][6:])
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 48


def test_a_result_gets_the_name_of_the_function_that_was_called():
    made = MadeCall(id="c1", function=CalledFunction(name="ping", arguments="{}"))
    said = Message(role="assistant", tool_calls=[made])
    _, named = chat_messages([said, Message(role="tool", content="pong", tool_call_id="c1")])
    assert named == {"role": "tool", "content": "pong", "tool_call_id": "c1", "name": "ping"}
    _, other = chat_messages([said, Message(role="tool", content="pong", tool_call_id="c2")])
    assert "name" not in other


@pytest.mark.parametrize(
    ("template", "asked", "style"),
    [
        (TOOL_TEMPLATE, "auto", "hermes"),
        ('{% if tools %}{"name": function name, "parameters": ...}{% endif %}', "auto", "llama3_json"),
        ("{% if tools %}<tool_call><function=NAME></function></tool_call>{% endif %}", "auto", None),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "auto", None),
        ("{{ messages[0].content }}", "auto", None),
        ("{{ messages[0].content }}", "hermes", "hermes"),
        (None, "auto", None),
    ],
)
def test_the_style_is_what_the_template_speaks_of(template: str | None, asked: str, style: str | None):
    assert find_style(template, asked) == style


def test_the_template_named_tool_use_is_the_one_for_tools():
    tokenizer = byte_tokenizer()
    tokenizer._fast.chat_template = {"default": "plain", "tool_use": "{{ tools[0].function.name }}"}
    assert tokenizer.tool_template == "{{ tools[0].function.name }}"
    rendered = [tokenizer.render_chat(MESSAGES, add_generation_prompt=True, tools=tools) for tools in (None, [PING])]
    assert rendered == ["plain", "ping"]


def test_markers_that_are_special_tokens_are_written_and_read():
    """As in Llama 3 or in Qwen's kin, where a marker is one token that plain text can't spell."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    backend = byte_tokenizer()._backend
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in ("<tool_call>", "</tool_call>")]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    fast.chat_template = TOOL_TEMPLATE
    tokenizer = Tokenizer(fast, name="the test's tokenizer")
    assert special_markers("hermes", tokenizer) == {"<tool_call>", "</tool_call>"}
    config = tiny_config(tokenizer, max_position_embeddings=1024)
    engine = Engine(make_decoder(config), tokenizer, EngineConfig(max_model_len=1024, max_num_seqs=4))
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    with local_server(engine) as server, client_of(server) as client:
        request: dict[str, Any] = {"parallel_tool_calls": False, "seed": 2, "max_tokens": 300}
        for tools, extra in (([WEATHER], {"tool_choice": "required"}), ([strict], {"logit_bias": {"259": 100}})):
            answer = chat(client, tools=tools, **extra, **request)
            [made] = call_list(answer.choices[0].message)
            assert json.loads(made["arguments"])["days"] in (1, 2, 3)
            assert answer.choices[0].finish_reason == "tool_calls"
