"""`/v1/completions` and `/v1/chat/completions`: a body becomes engine requests, their outputs become OpenAI's answer.

Several prompts or `n` > 1 are several engine requests; choice `i * n + j` is sample j of prompt i. With `best_of` more
samples run than are returned. Streams begin at once, so that a client sees its request accepted while it still waits.
When a stream fails after that, one frame carries the error object and `[DONE]` follows.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
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
from shardline.serving.grammar import CompiledGrammar, GrammarCompiler
from shardline.serving.openai_format import ChatFormat, CompletionFormat, error_body, prompt_scores, usage_of
from shardline.serving.protocol import (
    ChatBody,
    CompletionBody,
    SamplingBody,
    chat_logprobs,
    chat_messages,
    check_truncation,
    completion_prompts,
    make_sampling,
)
from shardline.serving.requests import FinishReason, Request, RequestOutput, SamplingParams
from shardline.serving.tool_prompts import shown_tools, write_tools_in
from shardline.serving.tools import ToolPlan, find_style, special_markers

__all__ = ["Completions"]

logger = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's and vLLM's
LONG_TEXT = 20_000  # characters that take longer to tokenise than the event loop should be away
LOGPROBS_MODE = "x-shardline-logprobs-mode"
WARNING = "x-shardline-warning"

Format = ChatFormat | CompletionFormat


class Completions:
    """Both endpoints over one engine.

    defaults          sampling values for what requests leave out
    tool_call_parser  how the model writes calls: hermes, llama3_json, or auto for what its chat template speaks of
    """

    def __init__(
        self,
        async_engine: AsyncEngine,
        *,
        model_name: str,
        defaults: dict[str, Any],
        tool_call_parser: str = "auto",
    ) -> None:
        self._async_engine = async_engine
        self._engine = async_engine.engine
        self._tokenizer = async_engine.engine.tokenizer
        self._model_name = model_name
        self._defaults = defaults
        template = self._tokenizer.tool_template
        self._template_takes_tools = template is not None and "tools" in template
        self._tool_style = find_style(template, tool_call_parser)
        self._grammars = GrammarCompiler(
            self._tokenizer,
            vocab_size=self._engine.decoder.config.vocab_size,
            eos_token_ids=self._engine.eos_token_ids,
        )

    async def complete(self, http: HttpRequest, body: CompletionBody, headers: dict[str, str]) -> Response:
        """Answers `/v1/completions`."""
        echo = bool(body.echo)
        given = completion_prompts(body)
        self._async_engine.check_count(len(given) * body.num_samples)  # before the work of tokenising them
        prompts = [await self.encode_prompt(prompt) for prompt in given]
        prompts = [self._truncated(prompt, body, body.max_tokens, headers) for prompt in prompts]
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        if max_tokens == 0 and not echo and body.prompt_logprobs is None:
            raise RequestError(
                "max_tokens = 0 needs echo = true or prompt_logprobs, or there is nothing to return.",
                param="max_tokens",
            )
        sampling = make_sampling(
            body,
            self._defaults,
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=_most(body.prompt_logprobs, body.logprobs if echo else None),
        )
        if body.max_tokens is None:
            room = self._engine.max_model_len - max(map(len, prompts))
            sampling = dataclasses.replace(sampling, max_tokens=min(DEFAULT_COMPLETION_TOKENS, max(room, 1)))
        if body.num_samples > body.num_choices and sampling.logprobs is None:
            sampling = dataclasses.replace(sampling, logprobs=0)  # to know which are the best
        repeated = {i: tuple(prompts[i // body.num_choices]) for i in range(len(prompts) * body.num_choices)}
        form = CompletionFormat(
            self._tokenizer, model=body.model or self._model_name, logprobs=body.logprobs, echo=repeated if echo else {}
        )
        grammar = await self.compile_grammar(sampling)
        sampling = dataclasses.replace(sampling, n=body.num_samples)
        return await self._answer(http, body, headers, form, prompts, sampling, grammar)

    async def chat(self, http: HttpRequest, body: ChatBody, headers: dict[str, str]) -> Response:
        """Answers `/v1/chat/completions`."""
        logprobs = chat_logprobs(body)
        plan = ToolPlan.make(
            body.tools, body.tool_choice, parallel=body.parallel_tool_calls is not False, style=self._tool_style
        )
        messages = chat_messages(body.messages)
        tools = None if plan is None else shown_tools(body.tools or [])
        if not self._template_takes_tools:
            messages, tools = write_tools_in(messages, tools), None
        prompt = await self.encode_chat(
            messages, add_generation_prompt=body.add_generation_prompt is not False, tools=tools
        )
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if max_tokens == 0:
            raise RequestError("max_tokens = 0 must be at least 1.", param="max_tokens")
        prompt = self._truncated(prompt, body, max_tokens, headers)
        sampling = make_sampling(
            body, self._defaults, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs
        )
        grammar = await self.compile_grammar(sampling, plan)
        if plan is not None:
            sampling = dataclasses.replace(sampling, stop=(*sampling.stop, *plan.stop))
            if special_markers(plan.style, self._tokenizer):  # the parser must see them
                sampling = dataclasses.replace(sampling, skip_special_tokens=False)
        model = body.model or self._model_name
        form = ChatFormat(self._tokenizer, model=model, logprobs=logprobs is not None, tools=plan)
        sampling = dataclasses.replace(sampling, n=body.num_choices)
        return await self._answer(http, body, headers, form, [prompt], sampling, grammar)

    async def compile_grammar(self, sampling: SamplingParams, plan: ToolPlan | None = None) -> CompiledGrammar | None:
        """Returns what the reply must follow, compiled on other threads; None where it is free."""
        if plan is not None:
            special = special_markers(plan.style, self._tokenizer)
            source = plan.grammar(special=special, answer=sampling.structured_outputs)
            return None if source is None else await self._grammars.compile(source, param="tools")
        if sampling.structured_outputs is None:
            return None
        return await self._grammars.compile(sampling.structured_outputs)

    def _truncated(
        self, prompt: list[int], body: SamplingBody, max_tokens: int | None, headers: dict[str, str]
    ) -> list[int]:
        """Returns the prompt's last tokens, as many as the request says, and then says so in the headers."""
        size = check_truncation(body)
        if size == -1:
            size = max(1, self._engine.max_model_len - (1 if max_tokens is None else max_tokens))
        if size is None or len(prompt) <= size:
            return prompt
        said = f"cut the prompt from {len(prompt)} to its last {size} tokens, as truncate_prompt_tokens asks"
        headers[WARNING] = f"{headers[WARNING]}; {said}" if WARNING in headers else said
        return prompt[-size:]

    async def encode_prompt(self, prompt: str | list[int]) -> list[int]:
        """Returns the ids of one prompt, with the BOS that the tokenizer adds; ids are taken as they are."""
        if isinstance(prompt, list):
            return prompt
        if len(prompt) > LONG_TEXT:
            return await asyncio.to_thread(self._tokenizer.encode_prompt, prompt)
        return self._tokenizer.encode_prompt(prompt)

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Returns the ids of a rendered chat; raises `RequestError` where the template refuses it."""
        long = sum(len(message["content"]) for message in messages) > LONG_TEXT or tools is not None
        encode = functools.partial(
            self._tokenizer.encode_chat, messages, add_generation_prompt=add_generation_prompt, tools=tools
        )
        try:
            return await asyncio.to_thread(encode) if long else encode()
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
        grammar: CompiledGrammar | None,
    ) -> Response:
        samples = sampling.samples()
        requests = [
            Request(
                request_id=f"{form.id}-{index}",
                prompt_token_ids=tuple(prompts[index // len(samples)]),
                sampling=samples[index % len(samples)],
                priority=body.priority or 0,
                adapter=self._engine.adapter_of(body.model),
                grammar=None if grammar is None else grammar.start(),
            )
            for index in range(len(prompts) * len(samples))
        ]
        answers = self._async_engine.submit(requests)
        num_prompt_tokens = sum(map(len, prompts))
        headers = {**headers, "x-request-id": form.id}
        if form.scores or body.prompt_logprobs is not None:
            headers[LOGPROBS_MODE] = self._engine.config.logprobs_mode
        if body.stream:
            usage = _Usage(num_prompt_tokens, num_samples=len(samples))
            frames = _frames(answers, form, len(requests), usage, include_usage=body.include_usage)
            return EventStream(frames, answers, headers)
        try:
            whole = await while_connected(http.receive, _collect(answers, requests))
        finally:
            answers.close()
        usage = usage_of(
            num_prompt_tokens,
            sum(len(answer.token_ids) for answer in whole),
            cached_tokens=sum(answer.num_cached_tokens for answer in whole[:: len(samples)]),
        )
        shown = _best(whole, num_samples=len(samples), num_best=body.num_choices)
        choices = [form.choice(index, answer, chunk=False) or {} for index, answer in enumerate(shown)]
        content = {**form.envelope(choices, chunk=False), "usage": usage}
        if body.prompt_logprobs is not None:
            scores = [
                prompt_scores(
                    self._tokenizer, tuple(prompts[index // body.num_choices]), answer, count=body.prompt_logprobs
                )
                for index, answer in enumerate(shown)
            ]
            if isinstance(form, ChatFormat):  # vLLM's place for them
                content["prompt_logprobs"] = scores[0]
            else:
                for choice, score in zip(choices, scores, strict=True):
                    choice["prompt_logprobs"] = score
        return Response(msgspec.json.encode(content), media_type="application/json", headers=headers)


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


@dataclasses.dataclass
class _Usage:
    """Counts a stream's tokens. Of several samples of a prompt, the first says what the cache had of it."""

    num_prompt_tokens: int
    num_samples: int
    num_output_tokens: int = 0
    num_cached_tokens: dict[int, int] = dataclasses.field(default_factory=dict)

    def take(self, index: int, output: RequestOutput) -> None:
        self.num_output_tokens += len(output.token_ids)
        if index % self.num_samples == 0:
            self.num_cached_tokens[index] = output.num_cached_tokens

    def to_json(self) -> dict[str, Any]:
        cached = sum(self.num_cached_tokens.values())
        return usage_of(self.num_prompt_tokens, self.num_output_tokens, cached_tokens=cached)


def _most(a: int | None, b: int | None) -> int | None:
    return max((value for value in (a, b) if value is not None), default=None)


def _best(whole: list[RequestOutput], *, num_samples: int, num_best: int) -> list[RequestOutput]:
    """Returns of each prompt's samples the `num_best` with the highest mean log-probability, the best first."""
    if num_best == num_samples:
        return whole

    def mean(answer: RequestOutput) -> float:
        return sum(answer.logprobs) / max(len(answer.logprobs), 1)

    groups = [whole[first : first + num_samples] for first in range(0, len(whole), num_samples)]
    return [answer for group in groups for answer in sorted(group, key=mean, reverse=True)[:num_best]]


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
    answers: Answers, form: Format, num_choices: int, usage: _Usage, *, include_usage: bool
) -> AsyncIterator[bytes]:
    no_usage = {"usage": None} if include_usage else {}

    def frame(choices: list[dict[str, Any]]) -> bytes:
        return _event({**form.envelope(choices, chunk=True), **no_usage})

    openings = [form.opening(index) for index in range(num_choices)]
    for opening in openings:
        if opening is not None:
            yield frame([opening])
    waiting: dict[int, RequestOutput] = {}  # tokens whose text is held back: they come with the next text
    async for output in answers:
        if output.finish_reason is FinishReason.ERROR:
            yield _event(_failure(output))
            yield b"data: [DONE]\n\n"
            return
        index = int(output.request_id.rpartition("-")[2])
        usage.take(index, output)
        if index in waiting:
            held = waiting.pop(index)
            held.extend(output)
            output = held
        if output.text or output.finished:
            choice = form.choice(index, output, chunk=True)
            if choice is not None:
                yield frame([choice])
        else:
            waiting[index] = output
    if include_usage:
        yield _event({**form.envelope([], chunk=True), "usage": usage.to_json()})
    yield b"data: [DONE]\n\n"


def _failure(output: RequestOutput) -> dict[str, Any]:
    message = output.error or "The engine failed this request."
    if output.error_param is not None:
        return error_body(message, type=RequestError.kind, param=output.error_param)
    return error_body(message, type="server_error")


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
