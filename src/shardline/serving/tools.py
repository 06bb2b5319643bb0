"""Tools of a chat request: read from the body, shown to the template, enforced by a grammar, found in the reply.

    plan = ToolPlan.make(body.tools, body.tool_choice, parallel=True, style=style)     # None: no call may come
    source = plan.grammar(marker_is_special=...)     # Lark, where a call or its form is enforced; None otherwise
    parser = plan.parser()                           # one for each reply

`tool_choice` "required" and a named function are enforced; so is, with "auto", the form of a call where a tool has
`strict`. The schemas of tools that are not strict are enforced as far as the grammar knows their keywords.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from shardline.config.errors import nearest
from shardline.serving.errors import RequestError
from shardline.serving.grammar import json_options
from shardline.serving.requests import StructuredOutputs
from shardline.serving.tool_parser import CLOSE, OPEN, PYTHON_TAG, ToolParser, parser_of
from shardline.text.tokenizer import Tokenizer

__all__ = ["STYLES", "NamedToolChoice", "Tool", "ToolPlan", "find_style", "special_markers"]

Style = Literal["hermes", "llama3_json"]
STYLES: tuple[Style, ...] = ("hermes", "llama3_json")
CHOICES = ("none", "auto", "required")
MAX_TOOLS = 128
_MARKERS = {"hermes": (OPEN, CLOSE), "llama3_json": (PYTHON_TAG,)}
_ARGUMENTS = {"hermes": "arguments", "llama3_json": "parameters"}


class Function(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    function: Function
    type: str = "function"


class NamedFunction(msgspec.Struct, kw_only=True):
    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True):
    function: NamedFunction
    type: str = "function"


@dataclass(frozen=True, kw_only=True)
class ToolPlan:
    """What may be called in one reply, and whether something must be. `choice` "named": the only one of `tools`."""

    tools: tuple[Function, ...]
    choice: Literal["auto", "required", "named"]
    parallel: bool
    style: Style

    @classmethod
    def make(
        cls,
        tools: list[Tool] | None,
        choice: str | NamedToolChoice | None,
        *,
        parallel: bool,
        style: str | None,
    ) -> ToolPlan | None:
        """Returns the plan, None where nothing may be called. `style` None: this model's template knows no tools."""
        functions = _functions(tools or [])
        if isinstance(choice, str) and choice not in CHOICES:
            raise RequestError(
                f"tool_choice = {choice[:40]!r} is unknown{nearest(choice, CHOICES)}", param="tool_choice"
            )
        if choice == "none" or (not functions and choice in (None, "auto")):
            return None
        if not functions:
            raise RequestError("tool_choice asks for a call, but there are no tools.", param="tool_choice")
        if style is None:
            raise RequestError(
                "This model's chat template has no place for tools; start the server with --tool-call-parser hermes "
                "to have them written into the system message.",
                param="tools",
                code="unsupported_parameter",
            )
        if isinstance(choice, NamedToolChoice):
            name = choice.function.name
            functions = {each: function for each, function in functions.items() if each == name}
            if not functions:
                raise RequestError(
                    f"tool_choice names {name[:64]!r}, which is not among the tools.", param="tool_choice"
                )
        kind = "named" if isinstance(choice, NamedToolChoice) else choice or "auto"
        return cls(
            tools=tuple(functions.values()),
            choice=cast(Literal["auto", "required", "named"], kind),
            parallel=parallel and kind != "named",
            style=cast(Style, style),
        )

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings that end the reply after its only call."""
        return (CLOSE,) if self.style == "hermes" and not self.parallel and self.choice == "auto" else ()

    def parser(self) -> ToolParser:
        return parser_of(
            self.style,
            names=[function.name for function in self.tools],
            max_calls=None if self.parallel else 1,
        )

    def grammar(self, *, special: frozenset[str], answer: StructuredOutputs | None = None) -> str | None:
        """Returns what the reply must follow, in Lark's notation; None where it is free.

        special  markers that are tokens of their own, not text
        answer   what content must follow where nothing is called; JSON only
        """
        if self.choice == "auto" and answer is None and not any(function.strict for function in self.tools):
            return None
        if answer is not None and self.choice != "auto":
            raise RequestError(
                f"tool_choice {self.choice!r} and response_format ask for different replies; leave one of them out.",
                param="response_format",
            )
        rules = [f"t{index}: %json {_schema_text(self._schema(tool))}" for index, tool in enumerate(self.tools)]
        any_tool = " | ".join(f"t{index}" for index in range(len(self.tools)))
        opened, closed = (_term(marker, special) for marker in (OPEN, CLOSE))
        hermes = self.style == "hermes"
        rules += [f'call: {opened} "\\n" body "\\n" {closed}' if hermes else "call: body", f"body: {any_tool}"]
        more = ('("\\n" call)*' if hermes else '("; " call)*') if self.parallel else ""
        if answer is not None:
            start = f"answer | call {more}"
            rules.append(f"answer: %json {_schema_text(_answer_schema(answer))}")
        elif self.choice != "auto":
            start = f"call {more}"
        elif hermes:  # free text in which every call has the right form
            head = f"head: TEXT {opened}" if OPEN in special else f"head[lazy]: TEXT {opened}"
            once = "*" if self.parallel else "?"
            start = f'(head "\\n" body "\\n" {closed}){once} TEXT'
            rules = [*(rule for rule in rules if not rule.startswith("call:")), head, "TEXT: /(.|\\n)*/"]
        else:
            start = f"call {more} | TEXT"
            rules.append(r"TEXT: /([^{\s](.|\n)*)?/")
        return "\n".join([f"start: {start}", *rules])

    def _schema(self, function: Function) -> dict[str, Any]:
        parameters = dict(function.parameters or {"type": "object", "properties": {}, "additionalProperties": False})
        kind = parameters.setdefault("type", "object")
        if kind != "object":
            raise RequestError(
                f"The parameters of the tool {function.name!r} must be a schema of the type 'object'.", param="tools"
            )
        parameters.pop("x-guidance", None)
        shared = {key: parameters.pop(key) for key in ("$defs", "definitions") if key in parameters}
        key = _ARGUMENTS[self.style]
        return {
            **shared,  # "#/$defs/..." in the parameters is then found where it points
            "type": "object",
            "properties": {"name": {"const": function.name}, key: parameters},
            "required": ["name", key],
            "additionalProperties": False,
            "x-guidance": {**json_options(whitespace=True), "lenient": not function.strict},
        }


def find_style(template: str | None, asked: str) -> str | None:
    """Returns how this model writes calls: as `asked`, or with "auto" what its chat template speaks of."""
    if asked != "auto":
        return asked
    if template is None or "tools" not in template:
        return None
    if OPEN in template:
        return None if "<function=" in template else "hermes"
    return "llama3_json" if '"parameters"' in template else None


def special_markers(style: str, tokenizer: Tokenizer) -> frozenset[str]:
    """Returns the style's markers that this tokenizer has as special tokens, which are not text."""
    texts = {tokenizer.token_bytes(token) for token in tokenizer.decoding.special_ids}
    return frozenset(marker for marker in _MARKERS[style] if marker.encode() in texts)


def _functions(tools: list[Tool]) -> dict[str, Function]:
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"There are {len(tools)} tools; at most {MAX_TOOLS} are allowed.", param="tools")
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        if tool.type != "function":
            raise RequestError(
                f"tools[{index}].type = {tool.type[:40]!r}; only 'function' is supported.", param="tools"
            )
        name = tool.function.name
        if not name or name in functions:
            said = "is empty" if not name else f"{name[:64]!r} comes twice"
            raise RequestError(f"tools[{index}].function.name {said}; give each tool a name of its own.", param="tools")
        functions[name] = tool.function
    return functions


def _answer_schema(answer: StructuredOutputs) -> dict[str, Any]:
    if answer.json_object:
        schema: Mapping[str, Any] = {"type": "object"}
    elif isinstance(answer.json, Mapping):
        schema = answer.json
    else:
        raise RequestError(
            "With tools, only response_format and a structured_outputs.json that is an object can constrain the rest.",
            param="structured_outputs",
        )
    return {**schema, "x-guidance": json_options(whitespace=not answer.disable_any_whitespace)}


def _schema_text(schema: dict[str, Any]) -> str:
    return msgspec.json.encode(schema).decode()


def _term(marker: str, special: frozenset[str]) -> str:
    return marker if marker in special else msgspec.json.encode(marker).decode()
