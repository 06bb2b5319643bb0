"""A chat request over a real HTTP connection, with its timings. Standard library only.

reply = stream_chat("http://127.0.0.1:8000", [{"role": "user", "content": "Hello"}], on_text=print)
reply.text, reply.ttft_s, reply.tokens_per_s
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardline.config.errors import ShardlineError

__all__ = ["ChatReply", "stream_chat"]


@dataclass(frozen=True, kw_only=True)
class ChatReply:
    """`tokens_per_s` counts the tokens after the first over the time after the first; None for a single token."""

    text: str
    finish_reason: str | None
    num_prompt_tokens: int
    num_tokens: int
    ttft_s: float
    tokens_per_s: float | None
    wall_s: float


def stream_chat(
    url: str,
    messages: list[dict[str, Any]],
    *,
    model: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 600.0,
    on_text: Callable[[str], None] | None = None,
    **fields: Any,
) -> ChatReply:
    """Streams one chat completion; `fields` go into the body (`max_tokens=64`, `temperature=0.0`, ...).

    Raises `ShardlineError` with the server's own sentence where it answers with an error.
    """
    body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **fields}
    if model is not None:
        body["model"] = model
    headers = {"content-type": "application/json"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s)
    try:
        started_s = time.monotonic()
        connection.request("POST", f"{parts.path.rstrip('/')}/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ShardlineError(f"{url} answered {response.status}: {_message(response.read())}")
        return _read_stream(response, started_s, on_text)
    except (OSError, http.client.HTTPException) as error:
        raise ShardlineError(f"Can't talk to {url}: {error}. Is the server running?") from error
    finally:
        connection.close()


def _read_stream(
    response: http.client.HTTPResponse, started_s: float, on_text: Callable[[str], None] | None
) -> ChatReply:
    text, finish_reason, usage = "", None, {"prompt_tokens": 0, "completion_tokens": 0}
    first_s = last_s = None
    for event in _events(response):
        if "error" in event:
            raise ShardlineError(f"The server failed in mid-reply: {event['error']['message']}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            finish_reason = choice["finish_reason"] or finish_reason
            if piece or choice["finish_reason"]:
                last_s = time.monotonic()
                first_s = first_s or last_s
            if piece:
                text += piece
                if on_text is not None:
                    on_text(piece)
    ended_s = time.monotonic()
    first_s, last_s = first_s or ended_s, last_s or ended_s
    num_tokens = usage["completion_tokens"]
    return ChatReply(
        text=text,
        finish_reason=finish_reason,
        num_prompt_tokens=usage["prompt_tokens"],
        num_tokens=num_tokens,
        ttft_s=first_s - started_s,
        tokens_per_s=(num_tokens - 1) / (last_s - first_s) if num_tokens > 1 and last_s > first_s else None,
        wall_s=ended_s - started_s,
    )


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line[len(b"data: ") :].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise ShardlineError("The connection closed in mid-reply.")


def _message(data: bytes) -> str:
    try:
        return json.loads(data)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return data.decode("utf-8", errors="replace")[:300]
