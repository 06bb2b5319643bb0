"""What a request says its reply must follow, read strictly from its body.

    wanted = structured_outputs(body.response_format, body.structured_outputs)      # None: nothing

`response_format` is OpenAI's, `structured_outputs` vLLM's. A schema is enforced whether `strict` is set or not.
vLLM's older fields (`guided_json` and so on) are refused with the name of what took their place.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shardline.config.errors import nearest
from shardline.serving.errors import RequestError
from shardline.serving.requests import StructuredOutputs

__all__ = ["ResponseFormat", "StructuredOutputsBody", "structured_outputs", "successor"]

FORMATS = ("text", "json_object", "json_schema")
_SUCCESSORS = {
    **{
        f"guided_{name}": f"structured_outputs.{name}" for name in ("json", "regex", "choice", "grammar", "json_object")
    },
    "json_schema": "structured_outputs.json, or response_format",
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar",
    "functions": "tools",
    "function_call": "tool_choice",
}


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


def structured_outputs(
    response_format: ResponseFormat | None, given: StructuredOutputsBody | None
) -> StructuredOutputs | None:
    """Returns what the reply must follow, None where that is nothing."""
    wanted = None if response_format is None else _read_format(response_format)
    if given is None:
        return wanted
    if wanted is not None:
        raise RequestError(
            "response_format and structured_outputs both constrain the reply; send one of them.",
            param="structured_outputs",
        )
    return StructuredOutputs(
        json=given.json,
        regex=given.regex,
        choice=None if given.choice is None else tuple(given.choice),
        grammar=given.grammar,
        json_object=bool(given.json_object),
        disable_any_whitespace=bool(given.disable_any_whitespace),
    )


def successor(name: str) -> str | None:
    """Returns the field that does here what `name` does elsewhere."""
    return _SUCCESSORS.get(name)


def _read_format(given: ResponseFormat) -> StructuredOutputs | None:
    if given.type not in FORMATS:
        raise RequestError(
            f"response_format.type = {given.type[:40]!r} is not supported{nearest(given.type, FORMATS)}",
            param="response_format",
        )
    if given.type == "json_schema":
        if given.json_schema is None or given.json_schema.schema is None:
            raise RequestError("response_format.json_schema.schema is missing.", param="response_format")
        return StructuredOutputs(json=given.json_schema.schema)
    if given.json_schema is not None:
        raise RequestError(
            f"response_format has a json_schema but its type is {given.type!r}; set it to 'json_schema'.",
            param="response_format",
        )
    return StructuredOutputs(json_object=True) if given.type == "json_object" else None
