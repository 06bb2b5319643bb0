"""Chunks of a reply join to the unstreamed text, whatever the script, with stop strings and with tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.conftest import local_server
from serving.test_http import call_json, stream
from serving.tiny_models import SCRIPTS, OneText, ScriptedTokens, make_decoder, make_engine, tiny_config
from shardline.serving.reply import ReplyText
from shardline.serving.requests import SamplingParams
from shardline.serving.runner import Runner
from shardline.text.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
PING: Any = {"type": "function", "function": {"name": "ping"}}
# Characters of one to four bytes, joiners, marks that combine, and a flag of two halves.
ALPHABET = (
    "ab \n<\u00e9\u0301\u65e5\u672c\u8a9e\ud55c\uae00\u1112\u1161\u11ab"
    "\U0001f469\u200d\U0001f467\U0001f1e9\U0001f1ea\ufe0f"
)


@pytest.mark.parametrize("asked", ["plain", "stop", "tools"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_stream_is_the_unstreamed_reply(script: str, asked: str):
    text = SCRIPTS[script]
    arguments = json.dumps({"text": text, "{": "}"}, ensure_ascii=False)
    said = f'{text} <tool_call>\n{{"name": "ping", "arguments": {arguments}}}\n</tool_call>{text}<tool'
    engine = make_engine(make_decoder(tiny_config(TOKENIZER, max_position_embeddings=1024)), max_model_len=1024)
    engine.runner = Runner(engine.decoder, engine.kv_cache, ScriptedTokens(OneText(said)))  # type: ignore[arg-type]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": len(said.encode())}
    body |= {"plain": {}, "stop": {"stop": [text[-2:] + "<tool"]}, "tools": {"tools": [PING]}}[asked]
    with local_server(engine, tool_call_parser="hermes") as server:
        status, whole = call_json(server.url, "/v1/chat/completions", body)
        frames = stream(server.url, "/v1/chat/completions", body)
    assert status == 200
    message = whole["choices"][0]["message"]
    pieces = [choice["delta"].get("content", "") for frame in frames for choice in frame["choices"]]
    assert "".join(pieces) == message["content"]
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 3
    calls = [part for frame in frames for choice in frame["choices"] for part in choice["delta"].get("tool_calls", [])]
    if asked == "tools":
        assert message["content"] == f"{text}{text}<tool"
        [made] = message["tool_calls"]
        assert made["function"]["arguments"] == arguments
        assert [part["function"] for part in calls] == [made["function"]]
    else:
        assert not calls
        assert message["content"] == (said[: -len(text[-2:] + "<tool")] if asked == "stop" else said)


@settings(max_examples=300, deadline=None)
@given(text=st.text(ALPHABET, max_size=24), stops=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3))
def test_nothing_of_a_reply_is_shown_twice_lost_or_taken_back(text: str, stops: list[str]):
    reply = ReplyText(TOKENIZER, SamplingParams(stop=tuple(stops)))
    pieces = []
    for token in text.encode():
        pieces.append(reply.append(token))
        if reply.stop is not None:
            break
    else:
        pieces.append(reply.flush())
    shown = "".join(pieces)
    assert not any("\ufffd" in piece for piece in pieces)
    if reply.stop is None:
        assert shown == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(shown + reply.stop)
        assert not any(stop in shown for stop in stops)
