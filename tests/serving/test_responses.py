"""`/v1/responses`: whole, streamed and continued, through OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from serving.conftest import LocalServer, local_server
from serving.test_http import FailingRunner, call, call_json, warm_engine
from serving.tiny_models import SCRIPTS, OneText, ScriptedTokens, make_engine
from shardline.serving.runner import Runner

ASK = {"model": "tiny", "input": "Hello", "max_output_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def client(local: LocalServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{local.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat_text(local: LocalServer, messages: list[dict[str, str]]) -> str:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    status, answer = call_json(local.url, "/v1/chat/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


def test_a_response_is_the_chat_of_the_same_messages(local: LocalServer, client: OpenAI):
    response = client.responses.create(**ASK, instructions="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert response.output_text == chat_text(local, messages)
    assert response.object == "response"
    assert response.instructions == "Be brief."
    assert response.usage is not None
    assert response.usage.output_tokens <= 8
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.status in ("completed", "incomplete")


def test_a_reply_cut_at_the_limit_is_incomplete(client: OpenAI):
    response = client.responses.create(**{**ASK, "max_output_tokens": 1})
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_the_events_of_a_stream_are_openais_and_join_to_the_whole(local: LocalServer, client: OpenAI):
    whole = client.responses.create(**ASK)
    events = list(client.responses.create(**ASK, stream=True))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in deltas) == whole.output_text
    final: Any = events[-1]
    assert final.response.output_text == whole.output_text
    assert final.response.usage == whole.usage
    _, _, data = call(local.url, "/v1/responses", {**ASK, "stream": True})
    for frame in data.decode().rstrip().split("\n\n"):
        name, _, content = frame.partition("\ndata: ")
        assert name == f"event: {json.loads(content)['type']}"


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
def test_a_conversation_goes_on_by_the_id_of_its_last_response(local: LocalServer, client: OpenAI, streaming: bool):
    if streaming:
        last: Any = list(client.responses.create(**ASK, instructions="Be brief.", stream=True))[-1]
        first = last.response
    else:
        first = client.responses.create(**ASK, instructions="Be brief.")
    second = client.responses.create(**{**ASK, "input": "And then?"}, previous_response_id=first.id)
    messages = [  # instructions are not carried over
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    assert second.output_text == chat_text(local, messages)
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    third = client.responses.create(**ASK, previous_response_id=second.id)  # its own history is still there
    assert third.status in ("completed", "incomplete")


def test_the_output_of_a_response_can_be_sent_back_as_input(local: LocalServer, client: OpenAI):
    first = client.responses.create(**ASK, store=False)
    items: Any = [{"role": "user", "content": "Hello"}, *(item.model_dump() for item in first.output)]
    items.append({"role": "user", "content": [{"type": "input_text", "text": "Go on."}]})
    second = client.responses.create(**{**ASK, "input": items})
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Go on."},
    ]
    assert second.output_text == chat_text(local, messages)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
def test_a_reply_follows_the_schema(client: OpenAI, streaming: bool):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    wanted: Any = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    asked: Any = {**ASK, "max_output_tokens": 60, "temperature": 1.0, "text": wanted}
    response: Any = client.responses.create(**asked, stream=streaming)
    if streaming:
        response = list(response)[-1].response
    assert response.text.format.name == "answer"
    if response.status == "completed":
        assert isinstance(json.loads(response.output_text)["ok"], bool)
    else:  # a random model may write blanks until the limit
        assert response.output_text.lstrip().startswith("{")


def test_the_store_keeps_the_newest():
    with local_server(make_engine(), max_stored_responses=2) as server:
        names = [call_json(server.url, "/v1/responses", ASK)[1]["id"] for _ in range(3)]
        assert [call(server.url, f"/v1/responses/{name}")[0] for name in names] == [404, 200, 200]
        status, answer = call_json(server.url, "/v1/responses", {**ASK, "previous_response_id": names[0]})
        assert status == 400
        assert answer["error"]["code"] == "previous_response_not_found"


def test_what_can_not_be_done_is_refused(local: LocalServer):
    for change, param in [
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"text": {"format": {"type": "yaml"}}}, "text"),
        ({"text": {"format": {"type": "text", "schemas": {}}}}, "text.format"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"input": "x" * 1000}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input"),
        ({"previous_response_id": "resp_nothing"}, "previous_response_id"),
        ({"temperature": -1}, "temperature"),
    ]:
        status, answer = call_json(local.url, "/v1/responses", {**ASK, **change})
        assert status == 400, change
        assert answer["error"]["param"] == param, change


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_no_stream_splits_a_character(path: str, text: str):
    engine = make_engine()
    engine.runner = Runner(engine.decoder, engine.kv_cache, ScriptedTokens(OneText(text)))  # type: ignore[arg-type]
    num_tokens = len(text.encode())
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": "x", "max_output_tokens": num_tokens},
        "/v1/completions": {"prompt": "x", "max_tokens": num_tokens},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": num_tokens},
    }
    with local_server(engine) as server:
        _, _, data = call(server.url, path, {**bodies[path], "stream": True})
    frames = [line.removeprefix("data: ") for line in data.decode().split("\n") if line.startswith("data: {")]
    pieces = [piece for frame in frames if (piece := shown(json.loads(frame)))]
    assert "".join(pieces) == text
    assert len(pieces) > 3
    assert not any("\ufffd" in piece for piece in pieces)


def shown(event: dict[str, Any]) -> str:
    """What one event adds to the reply, in any of the three forms."""
    if "choices" in event:
        return "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in event["choices"]
        )
    return event["delta"] if event["type"] == "response.output_text.delta" else ""


def test_an_engine_failure_in_mid_stream_is_an_event():
    engine = warm_engine()
    engine.runner = FailingRunner(engine.runner, range(3, 4))  # type: ignore[assignment]
    with local_server(engine) as server, OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        events: Any = list(client.responses.create(**{**ASK, "max_output_tokens": 20}, stream=True))
        assert events[-1].type == "response.failed"
        assert "the matrix fell over" in events[-1].response.error.message
        assert client.responses.create(**ASK).status in ("completed", "incomplete")
