"""The API as an OpenAPI 3.1 document, made from the types that read the requests. Served at `/openapi.json`.

    document = openapi_document(model_names=["my-model"], vocab_size=32000, max_model_len=4096, admin=True)

Request bodies come from `protocol` and its neighbours, so a field can't be in one and not in the other; what those
types can't say (ranges, names, no empty lists) is added here. Unknown fields are allowed, as the server allows them,
with a warning header.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shardline import __version__
from shardline.serving.admin import ReloadBody, SleepBody, WakeBody
from shardline.serving.embeddings import EmbeddingBody
from shardline.serving.protocol import ROLES, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from shardline.serving.responses import TEXT_PARTS, ResponseBody

__all__ = ["openapi_document"]

_BODIES = (ChatBody, CompletionBody, EmbeddingBody, ResponseBody, TokenizeBody, DetokenizeBody)
_ADMIN_BODIES = (ReloadBody, SleepBody, WakeBody)

_RANGES: dict[str, dict[str, float]] = {
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "n": {"minimum": 1, "maximum": 128},
    "top_logprobs": {"minimum": 0, "maximum": 20},
    "timeout_s": {"exclusiveMinimum": 0, "maximum": 86_400},
}
# What fields ask of each other, and values that only some of a type's have a meaning here.
_SAID = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
_CALLED = {
    "required": ["tool_calls"],
    "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}},
}
_TEXT_PART = {"required": ["type", "text"], "properties": {"text": {"type": "string"}}}
_SHAPES: dict[str, dict[str, Any]] = {
    "Message": {"anyOf": [_SAID, _CALLED]},
    "ContentPart": {"allOf": [_TEXT_PART, {"properties": {"type": {"const": "text"}}}]},
    "InputItem": {"allOf": [_SAID, {"required": ["role"], "properties": {"type": {"enum": ["message", None]}}}]},
    "InputPart": {"allOf": [_TEXT_PART, {"properties": {"type": {"enum": list(TEXT_PARTS)}}}]},
    "TokenizeBody": {
        "oneOf": [
            {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
            {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
        ]
    },
    "ResponseBody": {
        "properties": {
            "tools": {"maxItems": 0},
            "tool_choice": {"enum": ["none", "auto", None]},
            "truncation": {"enum": ["disabled", None]},
            "background": {"enum": [False, None]},
        }
    },
}
_NOT_EMPTY = ("prompt", "input", "messages", "allowed_token_ids")
_TOKEN_IDS = ("prompt", "input", "tokens", "stop_token_ids", "allowed_token_ids")
_NUM_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
_ERRORS = {
    400: "The request can't be used; the message says why and `param` names the field.",
    401: "The key is missing or wrong.",
    404: "No such model, response or path.",
    405: "The path does not take this method.",
    409: "Not in the server's present state.",
    413: "The body is over the size limit.",
    429: "The queue is full; see Retry-After.",
    500: "The engine failed this request.",
    503: "The server sleeps, shuts down or has stopped; see Retry-After where there is one.",
    504: "The reply took longer than the server allows.",
}


def openapi_document(*, model_names: list[str], vocab_size: int, max_model_len: int, admin: bool) -> dict[str, Any]:
    """Returns the document; `admin` says whether the /admin/ endpoints are there."""
    bodies = (*_BODIES, *_ADMIN_BODIES) if admin else _BODIES
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    for name, schema in schemas.items():
        shape = dict(_SHAPES.get(name, {}))
        for field, more in shape.pop("properties", {}).items():
            schema["properties"][field] |= more
        schema |= shape
        for field, described in schema.get("properties", {}).items():
            described |= _RANGES.get(field, {})
            if field in _NOT_EMPTY:
                described |= {"minLength": 1, "minItems": 1}
            if field in _TOKEN_IDS:
                _bound_integers(described, vocab_size - 1)
            if field in _NUM_TOKENS:
                described["maximum"] = max_model_len
            if field == "model":
                described["enum"] = [*model_names, None]
            if field == "role":
                described["enum"] = list(ROLES)
    paths: dict[str, Any] = {
        "/v1/chat/completions": {"post": _post("Continues a chat.", ChatBody, "Completion", streams=True)},
        "/v1/completions": {"post": _post("Continues texts.", CompletionBody, "Completion", streams=True)},
        "/v1/embeddings": {"post": _post("Turns texts into vectors.", EmbeddingBody, "List")},
        "/v1/responses": {"post": _post("Answers, and keeps the answer.", ResponseBody, "Response", streams=True)},
        "/v1/responses/{response_id}": {
            "parameters": [_path_parameter("response_id")],
            "get": _operation("Returns a stored response.", "Response"),
            "delete": _operation("Forgets a stored response.", "Deleted"),
        },
        "/v1/models": {"get": _operation("Lists the models.", "List")},
        "/v1/models/{model}": {
            "parameters": [_path_parameter("model")],
            "get": _operation("Returns a model.", "Model"),
        },
        "/tokenize": {"post": _post("Turns a text or a chat into token ids.", TokenizeBody, "Tokens")},
        "/detokenize": {"post": _post("Turns token ids into a text.", DetokenizeBody, "Text")},
        "/health": {"get": _operation("Says whether the engine is alive.", "Status", key=False)},
        "/ready": {"get": _operation("Says whether requests are taken now.", "Status", key=False)},
        "/version": {"get": _operation("Says which version runs.", "Version", key=False)},
        "/metrics": {"get": _plain("Numbers for Prometheus.", "text/plain")},
        "/openapi.json": {"get": _plain("This document.", "application/json")},
        "/": {"get": _plain("A chat page.", "text/html")},
    }
    if admin:
        paths |= {
            "/admin/reload": {"post": _post("Replaces the weights.", ReloadBody, "Admin", key="adminKey")},
            "/admin/sleep": {"post": _post("Gives memory back.", SleepBody, "Admin", key="adminKey")},
            "/admin/wake": {"post": _post("Takes memory again.", WakeBody, "Admin", key="adminKey")},
        }
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Shardline", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas, **_RESULTS},
            "securitySchemes": {"apiKey": bearer, "adminKey": bearer},
        },
    }


def _bound_integers(schema: dict[str, Any], largest: int) -> None:
    """Makes every integer in a schema a token id."""
    if schema.get("type") == "integer":
        schema |= {"minimum": 0, "maximum": largest}
    for inner in (*schema.get("anyOf", ()), schema.get("items")):
        if isinstance(inner, dict):
            _bound_integers(inner, largest)


def _post(
    summary: str, body: type[msgspec.Struct], result: str, *, streams: bool = False, key: str = "apiKey"
) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
    operation = _operation(summary, result, key=key)
    if streams:
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _EVENT}
    return {**operation, "requestBody": {"required": True, "content": content}}


def _operation(summary: str, result: str, *, key: str | bool = "apiKey") -> dict[str, Any]:
    failed = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[str, Any] = {
        "200": {
            "description": "Done.",
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{result}"}}},
        }
    }
    responses |= {str(status): {"description": text, "content": failed} for status, text in _ERRORS.items()}
    security = [{}, {str(key): []}] if key else [{}]
    return {"summary": summary, "responses": responses, "security": security}


def _plain(summary: str, media_type: str) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": {"description": "Done.", "content": {media_type: {}}}}}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _object(**properties: Any) -> dict[str, Any]:
    """Returns the schema of an object that has all of these, and may have more."""
    return {"type": "object", "properties": properties, "required": list(properties)}


_STRING, _INTEGER, _OBJECTS = {"type": "string"}, {"type": "integer"}, {"type": "array", "items": {"type": "object"}}
_MAYBE_STRING = {"type": ["string", "null"]}
_USAGE = _object(prompt_tokens=_INTEGER, total_tokens=_INTEGER)
_EVENT = {"type": "object", "properties": {"event": _STRING, "data": _STRING}, "required": ["data"]}
_RESULTS: dict[str, Any] = {
    "Completion": _object(id=_STRING, object=_STRING, created=_INTEGER, model=_STRING, choices=_OBJECTS, usage=_USAGE),
    "Response": _object(
        id=_STRING, object={"const": "response"}, created_at=_INTEGER, status=_STRING, model=_STRING, output=_OBJECTS
    ),
    "Deleted": _object(id=_STRING, object=_STRING, deleted={"type": "boolean"}),
    "List": _object(object={"const": "list"}, data=_OBJECTS),
    "Model": _object(id=_STRING, object={"const": "model"}, created=_INTEGER, owned_by=_STRING, max_model_len=_INTEGER),
    "Tokens": _object(count=_INTEGER, max_model_len=_INTEGER, tokens={"type": "array", "items": _INTEGER}),
    "Text": _object(prompt=_STRING),
    "Status": _object(status={"const": "ok"}),
    "Version": _object(version=_STRING, weights_version=_INTEGER),
    "Admin": _object(status=_STRING, path=_MAYBE_STRING, weights_version=_INTEGER, wall_s={"type": "number"}),
    "Error": _object(
        error=_object(message=_STRING, type=_STRING, param=_MAYBE_STRING, code=_MAYBE_STRING),
    ),
}
