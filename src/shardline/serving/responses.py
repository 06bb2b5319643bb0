"""`/v1/responses`: OpenAI's newer form of a chat, for text and JSON. A conversation goes on by its last response's id.

    {"input": "Hello", "instructions": "Be brief.", "max_output_tokens": 64, "stream": true}
    {"input": "And then?", "previous_response_id": "resp_..."}

Responses are kept in memory, the newest `max_stored` of them and at most `MAX_STORED_CHARACTERS` of text; `store` false
keeps none. Instructions belong to one response and are not carried over. A stream is OpenAI's sequence of events, each
named, with `sequence_number` counting them.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from shardline.serving.async_engine import Answers, AsyncEngine
from shardline.serving.completions import Completions, EventStream
from shardline.serving.constraints import JsonSchema, ResponseFormat
from shardline.serving.disconnect import while_connected
from shardline.serving.errors import NotFoundError, RequestError
from shardline.serving.protocol import ChatBody, Message, chat_messages, make_sampling
from shardline.serving.requests import FinishReason, Request, RequestOutput, SamplingParams

__all__ = ["ResponseBody", "Responses"]

MAX_STORED_CHARACTERS = 32 * 2**20
TEXT_PARTS = ("input_text", "output_text", "text")


class InputPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    role: str | None = None
    content: str | list[InputPart] | None = None
    type: str | None = None


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the reply must follow, as in `response_format`, but without a level between."""

    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None


class ResponseBody(msgspec.Struct, kw_only=True):
    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    text: TextOptions | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    truncation: str | None = None
    background: bool | None = None


@dataclass(frozen=True, slots=True)
class _Stored:
    response: dict[str, Any]
    messages: list[dict[str, Any]]  # the whole conversation, without instructions
    num_characters: int


class Responses:
    """The endpoint over one engine, and the store of what it answered."""

    def __init__(
        self,
        async_engine: AsyncEngine,
        completions: Completions,
        *,
        model_name: str,
        defaults: dict[str, Any],
        max_stored: int,
    ) -> None:
        self._async_engine = async_engine
        self._completions = completions
        self._model_name = model_name
        self._defaults = defaults
        self._max_stored = max_stored
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._num_characters = 0

    async def create(self, http: HttpRequest, body: ResponseBody, headers: dict[str, str]) -> Response:
        """Answers `POST /v1/responses`."""
        _check_supported(body)
        messages = [*self._history(body.previous_response_id), *_messages(body)]
        opening = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
        prompt = await self._encode([*opening, *messages])
        if body.max_output_tokens is not None and body.max_output_tokens < 1:
            raise RequestError(
                f"max_output_tokens = {body.max_output_tokens} must be at least 1.", param="max_output_tokens"
            )
        reply = _Reply(body, body.model or self._model_name, num_prompt_tokens=len(prompt))
        sampling = self._sampling(body)
        grammar = await self._completions.compile_grammar(sampling)
        request = Request(
            request_id=reply.id,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            grammar=None if grammar is None else grammar.start(),
            adapter=self._async_engine.engine.adapter_of(body.model),
        )
        answers = self._submit(request)
        headers = {**headers, "x-request-id": reply.id}
        if body.stream:
            return EventStream(self._events(answers, reply, messages, body), answers, headers)
        try:
            await while_connected(http.receive, _collect(answers, reply))
        finally:
            answers.close()
        self._store(reply, messages, body)
        return Response(msgspec.json.encode(reply.response()), media_type="application/json", headers=headers)

    def get(self, response_id: str) -> dict[str, Any]:
        """Returns a stored response."""
        return self._find(response_id).response

    def delete(self, response_id: str) -> dict[str, Any]:
        """Forgets a stored response."""
        self._num_characters -= self._find(response_id).num_characters
        del self._stored[response_id]
        return {"id": response_id, "object": "response", "deleted": True}

    def _find(self, response_id: str) -> _Stored:
        stored = self._stored.get(response_id)
        if stored is None:
            raise NotFoundError(f"There is no stored response with the id {response_id[:80]!r}.")
        return stored

    def _history(self, response_id: str | None) -> list[dict[str, Any]]:
        if response_id is None:
            return []
        stored = self._stored.get(response_id)
        if stored is None:
            raise RequestError(
                f"There is no stored response with the id {response_id[:80]!r}: it was never stored, or newer ones "
                "took its place; send the whole conversation in input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return stored.messages

    async def _encode(self, messages: list[dict[str, Any]]) -> list[int]:
        try:
            return await self._completions.encode_chat(messages, add_generation_prompt=True)
        except RequestError as error:
            raise RequestError(str(error), param="input", code=error.code) from None

    def _sampling(self, body: ResponseBody) -> SamplingParams:
        wanted = body.text.format if body.text is not None else None
        chat = ChatBody(
            messages=[],
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            response_format=None if wanted is None else _response_format(wanted),
        )
        try:
            return make_sampling(chat, self._defaults, max_tokens=body.max_output_tokens, logprobs=None)
        except RequestError as error:
            if error.param != "response_format":
                raise
            message = str(error).replace("response_format.json_schema", "text.format")
            raise RequestError(message.replace("response_format", "text.format"), param="text") from None

    def _submit(self, request: Request) -> Answers:
        try:
            return self._async_engine.submit([request])
        except RequestError as error:
            param = {"prompt": "input", "max_tokens": "max_output_tokens"}.get(error.param or "", error.param)
            raise RequestError(str(error), param=param, code=error.code) from None

    def _store(self, reply: _Reply, messages: list[dict[str, Any]], body: ResponseBody) -> None:
        if body.store is False or self._max_stored < 1:
            return
        whole = [*messages, {"role": "assistant", "content": reply.answer.text}]
        num_characters = sum(len(message["content"]) for message in whole)
        self._stored[reply.id] = _Stored(reply.response(), whole, num_characters)
        self._num_characters += num_characters
        while self._stored and (len(self._stored) > self._max_stored or self._num_characters > MAX_STORED_CHARACTERS):
            _, oldest = self._stored.popitem(last=False)
            self._num_characters -= oldest.num_characters

    async def _events(
        self, answers: Answers, reply: _Reply, messages: list[dict[str, Any]], body: ResponseBody
    ) -> AsyncIterator[bytes]:
        yield reply.event("response.created", response=reply.response())
        yield reply.event("response.in_progress", response=reply.response())
        where = {"output_index": 0, "content_index": 0, "item_id": reply.item_id}
        yield reply.event("response.output_item.added", output_index=0, item=reply.item(content=[]))
        yield reply.event("response.content_part.added", **where, part=_part(""))
        async for output in answers:
            reply.take(output)
            if output.finish_reason is FinishReason.ERROR:
                yield reply.event("response.failed", response=reply.response())
                return
            if output.text:
                yield reply.event("response.output_text.delta", **where, delta=output.text, logprobs=[])
        text = reply.answer.text
        yield reply.event("response.output_text.done", **where, text=text, logprobs=[])
        yield reply.event("response.content_part.done", **where, part=_part(text))
        yield reply.event("response.output_item.done", output_index=0, item=reply.item(content=[_part(text)]))
        self._store(reply, messages, body)
        yield reply.event(f"response.{reply.status}", response=reply.response())


class _Reply:
    """One response as it grows."""

    def __init__(self, body: ResponseBody, model_name: str, *, num_prompt_tokens: int) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self.item_id = f"msg_{uuid.uuid4().hex}"
        self.answer = RequestOutput(request_id=self.id, num_prompt_tokens=num_prompt_tokens)
        self._body = body
        self._model_name = model_name
        self._created_at = int(time.time())
        self._num_events = 0

    @property
    def status(self) -> str:
        reason = self.answer.finish_reason
        if reason is None:
            return "in_progress"
        if reason is FinishReason.ERROR:
            return "failed"
        return "incomplete" if reason is FinishReason.LENGTH else "completed"

    def take(self, output: RequestOutput) -> None:
        self.answer.extend(output)

    def event(self, kind: str, **fields: Any) -> bytes:
        content = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(content) + b"\n\n"

    def item(self, *, content: list[dict[str, Any]]) -> dict[str, Any]:
        status = "in_progress" if self.status == "in_progress" else self.status.replace("failed", "incomplete")
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def response(self) -> dict[str, Any]:
        """Returns the response object as it is now."""
        body, done = self._body, self.status != "in_progress"
        failed = self.status == "failed"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "status": self.status,
            "background": False,
            "error": {"code": "server_error", "message": self.answer.error or ""} if failed else None,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model_name,
            "output": [self.item(content=[_part(self.answer.text)])] if done and not failed else [],
            "parallel_tool_calls": False,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": _shown_format(body.text)},
            "tool_choice": "none",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if done else None,
        }

    def _usage(self) -> dict[str, Any]:
        num_input, num_output = self.answer.num_prompt_tokens, len(self.answer.token_ids)
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": self.answer.num_cached_tokens},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        }


async def _collect(answers: Answers, reply: _Reply) -> None:
    async for output in answers:
        if output.finish_reason is FinishReason.ERROR:
            raise answers.failure(output)
        reply.take(output)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _messages(body: ResponseBody) -> list[dict[str, Any]]:
    """Returns the input as chat messages."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    if not body.input:
        raise RequestError("input is empty; send a text or at least one message.", param="input")
    return [_message(index, item) for index, item in enumerate(body.input)]


def _message(index: int, item: InputItem) -> dict[str, Any]:
    where = f"input[{index}]"
    if item.type not in (None, "message") or item.role is None:
        kind = item.type or "without a role"
        raise RequestError(f"{where} is {kind[:40]!r}; this server reads messages only.", param="input")
    content = item.content
    if isinstance(content, list):
        for part in content:
            if part.type not in TEXT_PARTS or part.text is None:
                raise RequestError(
                    f"{where}.content has a part of type {part.type[:40]!r}; this server reads text only.",
                    param="input",
                )
        content = "".join(part.text or "" for part in content)
    try:
        [message] = chat_messages([Message(role=item.role, content=content)])
    except RequestError as error:
        raise RequestError(str(error).replace("messages[0]", where), param="input") from None
    return message


def _response_format(wanted: TextFormat) -> ResponseFormat:
    schema = None
    if wanted.type == "json_schema":
        schema = JsonSchema(name=wanted.name, schema=wanted.schema, strict=wanted.strict)
    return ResponseFormat(type=wanted.type, json_schema=schema)


def _shown_format(text: TextOptions | None) -> dict[str, Any]:
    wanted = None if text is None else text.format
    if wanted is None or wanted.type != "json_schema":
        return {"type": "text" if wanted is None else wanted.type}
    shown = msgspec.to_builtins(wanted)
    return {key: value for key, value in shown.items() if value is not None}


def _check_supported(body: ResponseBody) -> None:
    """Refuses what would change the answer and can't be done here."""
    asked = {
        "tools": bool(body.tools),
        "tool_choice": body.tool_choice not in (None, "none", "auto"),
        "truncation": body.truncation not in (None, "disabled"),
        "background": bool(body.background),
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise RequestError(
                f"{name} is not supported by /v1/responses here; use /v1/chat/completions, or leave it out.",
                param=name,
                code="unsupported_parameter",
            )
