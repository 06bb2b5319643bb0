"""Answers in the shapes that OpenAI's clients read: choices, chunks, usage, log-probabilities, errors.

A token's text in log-probabilities is `bytes:\\x..` where the token is a part of a character; chat's form also
carries the bytes themselves.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from shardline.serving.requests import RequestOutput, TopLogprobs
from shardline.text.tokenizer import Tokenizer

__all__ = [
    "ChatFormat",
    "CompletionFormat",
    "error_body",
    "token_text",
    "usage_of",
]


def error_body(message: str, *, type: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Returns OpenAI's error object."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    """Returns a token's text and bytes."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode("utf-8"), list(raw)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)


class _Envelope:
    """One response's envelope: its id, its time, its model."""

    prefix: str
    object: str
    chunk_object: str

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
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, model: str, logprobs: bool) -> None:
        super().__init__(tokenizer, model=model)
        self._logprobs = logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        """Returns a choice's chunk before its first token: clients take the role from it."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, answer: RequestOutput, *, chunk: bool) -> dict[str, Any]:
        """Returns a whole choice, or with `chunk` what a step added to it."""
        if chunk:
            body: dict[str, Any] = {"delta": {"content": answer.text} if answer.text else {}}
        else:
            body = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
        return {
            "index": index,
            **body,
            "logprobs": {"content": self._entries(answer), "refusal": None} if self._logprobs else None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }

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

    def __init__(self, tokenizer: Tokenizer, *, model: str, logprobs: bool, echo: dict[int, tuple[int, ...]]) -> None:
        """`echo` has the prompt's ids for each choice that repeats its prompt."""
        super().__init__(tokenizer, model=model)
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
            "logprobs": self._arrays(prompt, answer, start) if self._logprobs else None,
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
                None if score is None else self._by_text(token, score, top)
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
