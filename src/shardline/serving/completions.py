"""`/v1/completions` and `/v1/chat/completions`: a body becomes engine requests, their outputs become OpenAI's answer.

Several prompts or `n` > 1 are several engine requests; choice `i * n + j` is sample j of prompt i. Streams begin at
once, so that a client sees its request accepted while it still waits. When a stream fails after that, one frame
carries the error object and `[DONE]` follows.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shardline.config.errors import UsageError
from shardline.serving.async_engine import Answers, AsyncEngine
from shardline.serving.disconnect import ClientGoneError, while_connected
from shardline.serving.errors import RequestError
from shardline.serving.openai_format import ChatFormat, CompletionFormat, error_body, usage_of
from shardline.serving.protocol import (
    ChatBody,
    CompletionBody,
    SamplingBody,
    chat_logprobs,
    chat_messages,
    completion_prompts,
    make_sampling,
)
from shardline.serving.requests import FinishReason, Request, RequestOutput, SamplingParams

__all__ = ["Completions"]

logger = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's and vLLM's
LONG_TEXT = 20_000  # characters that take longer to tokenise than the event loop should be away

Format = ChatFormat | CompletionFormat


class Completions:
    """Both endpoints over one engine. `defaults` are sampling values for what requests leave out."""

    def __init__(self, async_engine: AsyncEngine, *, model_name: str, defaults: dict[str, Any]) -> None:
        self._async_engine = async_engine
        self._engine = async_engine.engine
        self._tokenizer = async_engine.engine.tokenizer
        self._model_name = model_name
        self._defaults = defaults

    async def complete(self, http: HttpRequest, body: CompletionBody, headers: dict[str, str]) -> Response:
        """Answers `/v1/completions`."""
        echo = bool(body.echo)
        given = completion_prompts(body)
        self._async_engine.check_count(len(given) * body.num_choices)  # before the work of tokenising them
        prompts = [await self.encode_prompt(prompt) for prompt in given]
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        if max_tokens == 0 and not echo:
            raise RequestError("max_tokens = 0 needs echo = true, or there is nothing to return.", param="max_tokens")
        sampling = make_sampling(
            body,
            self._defaults,
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if echo else None,
        )
        if body.max_tokens is None:
            room = self._engine.max_model_len - max(map(len, prompts))
            sampling = dataclasses.replace(sampling, max_tokens=min(DEFAULT_COMPLETION_TOKENS, max(room, 1)))
        repeated = {i: tuple(prompts[i // body.num_choices]) for i in range(len(prompts) * body.num_choices)}
        form = CompletionFormat(
            self._tokenizer,
            model=self._model_name,
            logprobs=body.logprobs is not None,
            echo=repeated if echo else {},
        )
        return await self._answer(http, body, headers, form, prompts, sampling)

    async def chat(self, http: HttpRequest, body: ChatBody, headers: dict[str, str]) -> Response:
        """Answers `/v1/chat/completions`."""
        logprobs = chat_logprobs(body)
        messages = chat_messages(body.messages)
        prompt = await self.encode_chat(messages, add_generation_prompt=body.add_generation_prompt is not False)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if max_tokens == 0:
            raise RequestError("max_tokens = 0 must be at least 1.", param="max_tokens")
        sampling = make_sampling(body, self._defaults, max_tokens=max_tokens, logprobs=logprobs)
        form = ChatFormat(self._tokenizer, model=self._model_name, logprobs=logprobs is not None)
        return await self._answer(http, body, headers, form, [prompt], sampling)

    async def encode_prompt(self, prompt: str | list[int]) -> list[int]:
        """Returns the ids of one prompt, with the BOS that the tokenizer adds; ids are taken as they are."""
        if isinstance(prompt, list):
            return prompt
        if len(prompt) > LONG_TEXT:
            return await asyncio.to_thread(self._tokenizer.encode_prompt, prompt)
        return self._tokenizer.encode_prompt(prompt)

    async def encode_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> list[int]:
        """Returns the ids of a rendered chat; raises `RequestError` where the template refuses it."""
        long = sum(len(message["content"]) for message in messages) > LONG_TEXT
        try:
            if long:
                return await asyncio.to_thread(
                    self._tokenizer.encode_chat, messages, add_generation_prompt=add_generation_prompt
                )
            return self._tokenizer.encode_chat(messages, add_generation_prompt=add_generation_prompt)
        except UsageError as error:
            raise RequestError(str(error), param="messages") from None

    async def _answer(
        self,
        http: HttpRequest,
        body: SamplingBody,
        headers: dict[str, str],
        form: Format,
        prompts: list[list[int]],
        sampling: SamplingParams,
    ) -> Response:
        requests = [
            Request(
                request_id=f"{form.id}-{index}",
                prompt_token_ids=tuple(prompts[index // body.num_choices]),
                sampling=_with_seed(sampling, index % body.num_choices),
            )
            for index in range(len(prompts) * body.num_choices)
        ]
        answers = self._async_engine.submit(requests)
        num_prompt_tokens = sum(map(len, prompts))
        headers = {**headers, "x-request-id": form.id}
        if body.stream:
            frames = _frames(answers, form, len(requests), num_prompt_tokens, include_usage=body.include_usage)
            return EventStream(frames, answers, headers)
        try:
            whole = await while_connected(http.receive, _collect(answers, requests))
        finally:
            answers.close()
        choices = [form.choice(index, answer, chunk=False) for index, answer in enumerate(whole)]
        usage = usage_of(num_prompt_tokens, sum(len(answer.token_ids) for answer in whole))
        content = msgspec.json.encode({**form.envelope(choices, chunk=False), "usage": usage})
        return Response(content, media_type="application/json", headers=headers)


class EventStream(Response):
    """Server-sent events; closes the answers however it ends."""

    def __init__(self, frames: AsyncIterator[bytes], answers: Answers, headers: dict[str, str]) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers},
        )
        del self.headers["content-length"]
        self._frames = frames
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except ClientGoneError:
            logger.debug("A client left in mid-stream.")
        finally:
            self._answers.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _with_seed(sampling: SamplingParams, sample: int) -> SamplingParams:
    """The samples of one prompt must differ, and be the same again for the same seed."""
    if sample == 0 or sampling.seed is None:
        return sampling
    return dataclasses.replace(sampling, seed=(sampling.seed + sample) % 2**63)


async def _collect(answers: Answers, requests: list[Request]) -> list[RequestOutput]:
    """Returns the whole answers; raises `ServingError` when one of them failed."""
    whole = {
        request.request_id: RequestOutput(
            request_id=request.request_id, num_prompt_tokens=len(request.prompt_token_ids)
        )
        for request in requests
    }
    async for output in answers:
        if output.finish_reason is FinishReason.ERROR:
            raise answers.failure(output)
        whole[output.request_id].extend(output)
    return list(whole.values())


async def _frames(
    answers: Answers, form: Format, num_choices: int, num_prompt_tokens: int, *, include_usage: bool
) -> AsyncIterator[bytes]:
    usage = {"usage": None} if include_usage else {}

    def frame(choices: list[dict[str, Any]]) -> bytes:
        return _event({**form.envelope(choices, chunk=True), **usage})

    openings = [form.opening(index) for index in range(num_choices)]
    for opening in openings:
        if opening is not None:
            yield frame([opening])
    waiting: dict[int, RequestOutput] = {}  # tokens whose text is held back: they come with the next text
    num_output_tokens = 0
    async for output in answers:
        if output.finish_reason is FinishReason.ERROR:
            yield _event(error_body(output.error or "The engine failed this request.", type="server_error"))
            yield b"data: [DONE]\n\n"
            return
        num_output_tokens += len(output.token_ids)
        index = int(output.request_id.rpartition("-")[2])
        if index in waiting:
            held = waiting.pop(index)
            held.extend(output)
            output = held
        if output.text or output.finished:
            yield frame([form.choice(index, output, chunk=True)])
        else:
            waiting[index] = output
    if include_usage:
        closing = form.envelope([], chunk=True)
        yield _event({**closing, "usage": usage_of(num_prompt_tokens, num_output_tokens)})
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
