"""Answers in the shapes that OpenAI's clients read: choices, chunks, usage, log-probabilities, errors.

A token's text in log-probabilities is `bytes:\\x..` where the token is a part of a character; chat's form also
carries the bytes themselves.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from shardline.serving.requests import FinishReason, RequestOutput, TopLogprobs
from shardline.serving.tool_parser import ToolCall, ToolParser
from shardline.serving.tools import ToolPlan
from shardline.text.tokenizer import Tokenizer

__all__ = [
    "ChatFormat",
    "CompletionFormat",
    "error_body",
    "prompt_scores",
    "token_text",
    "usage_of",
]


def error_body(message: str, *, type: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Returns OpenAI's error object."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def usage_of(prompt_tokens: int, completion_tokens: int, *, cached_tokens: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    """Returns a token's text and bytes."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode("utf-8"), list(raw)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)


def prompt_scores(
    tokenizer: Tokenizer, prompt: tuple[int, ...], answer: RequestOutput, *, count: int
) -> list[dict[str, Any] | None]:
    """Returns vLLM's `prompt_logprobs`: for each prompt token but the first, itself and the `count` likeliest."""
    entries: list[dict[str, Any] | None] = []
    for token, logprob, top in zip(prompt, answer.prompt_logprobs, answer.prompt_top_logprobs, strict=True):
        if logprob is None:
            entries.append(None)
            continue
        ranks = {other: rank for rank, (other, _) in enumerate(top, start=1)}
        entries.append(
            {
                str(other): {
                    "logprob": score,
                    "rank": ranks.get(other),
                    "decoded_token": token_text(tokenizer, other)[0],
                }
                for other, score in {token: logprob, **dict(top[:count])}.items()
            }
        )
    return entries


class _Envelope:
    """One response's envelope: its id, its time, its model. `scores`: whether its choices have log-probabilities."""

    prefix: str
    object: str
    chunk_object: str
    scores: bool

    def __init__(self, tokenizer: Tokenizer, *, model: str) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def envelope(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.chunk_object if chunk else self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class ChatFormat(_Envelope):
    """`/v1/chat/completions`. With `tools`, calls are taken out of the text: one chunk for each call."""

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, model: str, logprobs: bool, tools: ToolPlan | None = None) -> None:
        super().__init__(tokenizer, model=model)
        self.scores = logprobs
        self._tools = tools
        self._parsers: dict[int, ToolParser] = {}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Returns a choice's chunk before its first token: clients take the role from it."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, answer: RequestOutput, *, chunk: bool) -> dict[str, Any] | None:
        """Returns a whole choice, or with `chunk` what a step added to it; None: nothing to show yet."""
        text, calls, finish_reason, stop_reason = self._read(index, answer)
        if chunk:
            delta: dict[str, Any] = {"content": text} if text else {}
            if calls:
                delta["tool_calls"] = calls
            if not delta and not answer.finished and not self.scores:
                return None
            body: dict[str, Any] = {"delta": delta}
        else:
            content = text if text or not calls else None
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                message["tool_calls"] = [{key: call[key] for key in call if key != "index"} for call in calls]
            body = {"message": message}
        return {
            "index": index,
            **body,
            "logprobs": {"content": self._entries(answer), "refusal": None} if self.scores else None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def _read(
        self, index: int, answer: RequestOutput
    ) -> tuple[str, list[dict[str, Any]], str | None, int | str | None]:
        """Returns the text, the calls, the finish reason and the stop reason of what came."""
        if self._tools is None:
            return answer.text, [], answer.finish_reason, answer.stop_reason
        parser = self._parsers.setdefault(index, self._tools.parser())
        number = parser.num_calls
        parts = [*parser.push(answer.text), *(parser.finish() if answer.finished else ())]
        calls = []
        for call in parts:
            if isinstance(call, ToolCall):
                function = {"name": call.name, "arguments": call.arguments}
                calls.append({"index": number, "id": call.id, "type": "function", "function": function})
                number += 1
        text = "".join(part for part in parts if isinstance(part, str))
        if parser.num_calls and answer.finish_reason is FinishReason.STOP:
            return text, calls, "tool_calls", None
        return text, calls, answer.finish_reason, answer.stop_reason

    def _entries(self, answer: RequestOutput) -> list[dict[str, Any]]:
        scored = zip(answer.token_ids, answer.logprobs, answer.top_logprobs, strict=True)
        return [
            {**self._entry(token, logprob), "top_logprobs": [self._entry(*alternative) for alternative in top]}
            for token, logprob, top in scored
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = token_text(self.tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": raw}


class CompletionFormat(_Envelope):
    """`/v1/completions`; with `echo` the prompt is part of the text and of the log-probabilities."""

    prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, tokenizer: Tokenizer, *, model: str, logprobs: int | None, echo: dict[int, tuple[int, ...]]
    ) -> None:
        """`echo` has the prompt's ids for each choice that repeats its prompt."""
        super().__init__(tokenizer, model=model)
        self.scores = logprobs is not None
        self._logprobs = logprobs
        self._echo = echo
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Completions begin with their first text."""
        return None

    def choice(self, index: int, answer: RequestOutput, *, chunk: bool) -> dict[str, Any]:
        """Returns a whole choice, or with `chunk` what a step added to it."""
        prompt = self._echo.get(index, ()) if index not in self._offsets else ()
        start = self._offsets.setdefault(index, 0)
        text = self.tokenizer.decode(prompt) + answer.text if prompt else answer.text
        self._offsets[index] = start + len(text)
        return {
            "index": index,
            "text": text,
            "logprobs": None if self._logprobs is None else self._arrays(prompt, answer, start),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }

    def _arrays(self, prompt: tuple[int, ...], answer: RequestOutput, start: int) -> dict[str, Any]:
        tokens = [*prompt, *answer.token_ids]
        prompt_scores = (answer.prompt_logprobs, answer.prompt_top_logprobs) if prompt else ([], [])
        scores = [*prompt_scores[0], *answer.logprobs]
        alternatives = [*prompt_scores[1], *answer.top_logprobs]
        texts = [token_text(self.tokenizer, token)[0] for token in tokens]
        offsets = []
        for token in tokens:
            offsets.append(start)
            start += len(self.tokenizer.decode([token]))
        return {
            "tokens": texts,
            "token_logprobs": scores,
            "top_logprobs": [
                None if score is None else self._by_text(token, score, top[: self._logprobs])
                for token, score, top in zip(tokens, scores, alternatives, strict=True)
            ],
            "text_offset": offsets,
        }

    def _by_text(self, token: int, logprob: float, top: TopLogprobs) -> dict[str, float]:
        """The likeliest tokens and the chosen one; of two tokens with one text the likelier is kept."""
        by_text: dict[str, float] = {}
        for other, score in (*top, (token, logprob)):
            text, _ = token_text(self.tokenizer, other)
            by_text[text] = max(score, by_text.get(text, score))
        return by_text
