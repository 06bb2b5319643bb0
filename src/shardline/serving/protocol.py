"""The bodies of OpenAI's requests, read strictly, and what they mean for the engine.

    body, warnings = read_body(data, CompletionBody)        # RequestError names the field
    sampling = make_sampling(body, defaults, max_tokens=16)

A field of the wrong type is an error. A field that nobody here knows is left out with a warning, except one that
would constrain the reply (an older name of a grammar, tools where there are none): to ignore it would be to answer
another question.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from shardline.config.errors import nearest
from shardline.serving.constraints import ResponseFormat, StructuredOutputsBody, structured_outputs, successor
from shardline.serving.errors import RequestError
from shardline.serving.requests import MAX_LOGPROBS, SamplingParams
from shardline.serving.tools import NamedToolChoice, Tool

__all__ = [
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "Message",
    "SamplingBody",
    "TokenizeBody",
    "chat_logprobs",
    "chat_messages",
    "check_truncation",
    "completion_prompts",
    "make_sampling",
    "read_body",
    "read_defaults",
]

MAX_CHOICES = 128
MAX_PRIORITY = 2**31
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_COPIED = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
)
# Fields that change nothing here, so that no one needs a warning about them.
_HARMLESS = frozenset({"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"})
_CONSTRAINTS = frozenset(
    {"grammar", "structured_outputs", "structural_tag", "json_schema", "regex", "ebnf", "tools", "functions"}
    | {"response_format", "tool_choice", "function_call"}
)
# Values of constraining fields that constrain nothing.
_UNCONSTRAINED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none",),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
}


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class SamplingBody(msgspec.Struct, kw_only=True):
    """What completions and chat completions share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(SamplingBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    @property
    def num_samples(self) -> int:
        """Samples of each prompt, of which `num_choices` are returned."""
        return self.num_choices if self.best_of is None else self.best_of


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class MadeCall(msgspec.Struct, kw_only=True):
    function: CalledFunction
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ChatBody(SamplingBody, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", bound=msgspec.Struct)


def read_body(data: bytes, kind: type[Body]) -> tuple[Body, list[str]]:
    """Returns the typed body and a list of warnings; raises `RequestError` for anything that can't be used."""
    try:
        values = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise RequestError("The body is nested too deeply.") from None
    if not isinstance(values, dict):
        raise RequestError(f"The body must be a JSON object, but it is {_json_type(values)}.")
    known = set(kind.__struct_fields__)
    unknown = sorted(set(values) - known - _HARMLESS)
    for name in unknown:
        _reject_constraint(name, values[name])
    ignored = [name for name in unknown if name not in _CONSTRAINTS and not name.startswith("guided_")]
    try:
        body = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from None
    return body, [f"ignored the unknown field {json.dumps(name[:80])}{_hint(name, known)}" for name in ignored[:20]]


def read_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sampling values of generation_config.json that stand in for what a request leaves out."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: generation_config.get(name) for name in names}
    return {
        name: value for name, value in found.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }


def make_sampling(
    body: SamplingBody,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Returns the request's sampling parameters: its own values, then `defaults`, then OpenAI's."""
    if not 1 <= body.num_choices <= MAX_CHOICES:
        raise RequestError(f"n = {body.num_choices} must be between 1 and {MAX_CHOICES}.", param="n")
    _check_best_of(body)
    for name, value in (("logprobs", logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise RequestError(f"{name} = {value} must be between 0 and {MAX_LOGPROBS}.", param=name)
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs are not for streams; send stream = false.", param="prompt_logprobs")
    if body.priority is not None and abs(body.priority) > MAX_PRIORITY:
        raise RequestError(f"priority = {body.priority} must be between -2**31 and 2**31.", param="priority")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is only for requests with stream = true.", param="stream_options")
    given = {name: value for name in _COPIED if (value := getattr(body, name)) is not None}
    stop = body.stop or ()
    return SamplingParams(
        **{**defaults, **given},
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias or {}),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_words=tuple(body.bad_words or ()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=structured_outputs(body.response_format, body.structured_outputs),
    )


def completion_prompts(body: CompletionBody) -> list[str | list[int]]:
    """Returns the prompts of a completion request: a text, texts, token ids, or lists of token ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise RequestError("prompt mixes texts and token ids in one list; send one kind.", param="prompt")
    if kinds == {int}:
        return [[item for item in prompt if isinstance(item, int)]]
    if not prompt:
        raise RequestError("The prompt is empty; send a text or token ids.", param="prompt")
    return [item for item in prompt if not isinstance(item, int)]


def chat_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Returns messages as chat templates take them: a role and a text, calls and whose result it is."""
    if not messages:
        raise RequestError("messages is empty; send at least one message.", param="messages")
    plain = [_plain_message(index, message) for index, message in enumerate(messages)]
    names: dict[str, str] = {}
    for message in plain:  # some templates want the function's name with its result, which OpenAI's form leaves out
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return plain


def chat_logprobs(body: ChatBody) -> int | None:
    """Returns the number of alternatives asked for, None when no log-probabilities are wanted."""
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs = {body.top_logprobs} must be between 0 and {MAX_LOGPROBS}.", param="top_logprobs"
        )
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs = true.", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def check_truncation(body: SamplingBody) -> int | None:
    """Returns how many of a prompt's last tokens are kept, None for all; -1: what the context has room for."""
    size = body.truncate_prompt_tokens
    if size is not None and size != -1 and size < 1:
        raise RequestError(
            f"truncate_prompt_tokens = {size} must be at least 1, or -1 for what the context has room for.",
            param="truncate_prompt_tokens",
        )
    return size


def _check_best_of(body: SamplingBody) -> None:
    best_of = body.best_of if isinstance(body, CompletionBody) else None
    if best_of is None:
        return
    if not body.num_choices <= best_of <= MAX_CHOICES:
        raise RequestError(
            f"best_of = {best_of} must be at least n = {body.num_choices} and at most {MAX_CHOICES}.", param="best_of"
        )
    if body.stream and best_of > body.num_choices:
        raise RequestError(
            "best_of can't be streamed: which replies are the best is known at their end.", param="best_of"
        )


def _plain_message(index: int, message: Message) -> dict[str, Any]:
    where = f"messages[{index}]"
    if message.role not in ROLES:
        raise RequestError(
            f"{where}.role = {message.role[:40]!r} is not supported{nearest(message.role, ROLES)}", param="messages"
        )
    if message.tool_calls and message.role != "assistant":
        raise RequestError(f"{where}.tool_calls: only an assistant's message has them.", param="messages")
    if message.content is None and not message.tool_calls:
        raise RequestError(f"{where}.content is missing; send a text.", param="messages")
    plain: dict[str, Any] = {"role": ROLES[message.role], "content": _text(where, message.content or "")}
    if message.tool_calls:
        plain["tool_calls"] = [_made_call(where, call) for call in message.tool_calls]
    if message.role == "tool":
        given = {"tool_call_id": message.tool_call_id, "name": message.name}
        plain |= {key: value for key, value in given.items() if value is not None}
    return plain


def _text(where: str, content: str | list[ContentPart]) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text" or part.text is None:
            raise RequestError(
                f"{where}.content has a part of type {part.type[:40]!r}; this model reads parts of type 'text' only.",
                param="messages",
            )
    return "".join(part.text or "" for part in content)


def _made_call(where: str, call: MadeCall) -> dict[str, Any]:
    """Returns a call of the history with its arguments as an object, as templates take them."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise RequestError(
                f"{where}.tool_calls: the arguments of {call.function.name[:64]!r} are not a JSON object.",
                param="messages",
            )
    function = {"name": call.function.name, "arguments": arguments or {}}
    return {"type": "function", "function": function} | ({} if call.id is None else {"id": call.id})


def _reject_constraint(name: str, value: Any) -> None:
    if name not in _CONSTRAINTS and not name.startswith("guided_"):
        return
    if value is None or value in _UNCONSTRAINED.get(name, ()):
        return
    instead = successor(name)
    raise RequestError(
        f"{name} is not supported {'any more' if name.startswith('guided_') else 'here'}, and ignoring it would return "
        f"a reply that does not follow it; {'leave it out' if instead is None else f'use {instead}'}.",
        param=name,
        code="unsupported_parameter",
    )


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    for token in given:
        if not re.fullmatch(r"[0-9]{1,9}", token):
            raise RequestError(f"logit_bias has the key {token[:40]!r}; keys are token ids.", param="logit_bias")
    return {int(token): bias for token, bias in given.items()}


def _hint(name: str, known: set[str]) -> str:
    hint = nearest(name, known)
    return hint if "did you mean" in hint else ""


def _type_error(message: str) -> RequestError:
    """Turns msgspec's "Expected `int`, got `str` - at `$.max_tokens`" into a sentence about the field."""
    what, _, path = message.partition(" - at ")
    field = path.strip("`").removeprefix("$").removeprefix(".")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
    if missing:
        name = f"{field}.{missing[1]}" if field else missing[1]
        return RequestError(f"{name} is missing.", param=name)
    return RequestError(f"{field or 'The body'}: {what[:1].lower()}{what[1:]}.", param=field or None)


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
