"""How a model is told of its tools: by its chat template, or in the system message where the template knows none.

tools = shown_tools(body.tools)                     # what a template takes
messages = write_tools_in(messages, tools)          # for a template that doesn't: hermes' style, as plain text
"""

from __future__ import annotations

from typing import Any

import msgspec

from shardline.serving.tool_parser import CLOSE, OPEN
from shardline.serving.tools import Tool

__all__ = ["shown_tools", "write_tools_in"]

_INTRODUCTION = (
    "You can call these functions, one JSON object a line:\n<tools>\n{tools}\n</tools>\n"
    f"To call one, write its name and arguments as JSON between markers:\n"
    f'{OPEN}\n{{{{"name": "NAME", "arguments": {{{{"KEY": "VALUE"}}}}}}}}\n{CLOSE}'
)


def shown_tools(tools: list[Tool]) -> list[dict[str, Any]]:
    """Returns tools as chat templates take them, which may count on a description and on parameters."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": tool.function.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def write_tools_in(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns messages in which tools, calls and their results are text of the system, assistant and user roles."""
    plain = [_as_text(message) for message in messages]
    if tools is None:
        return plain
    introduction = _INTRODUCTION.format(tools="\n".join(_json(tool["function"]) for tool in tools))
    if plain[0]["role"] == "system":
        first = {"role": "system", "content": f"{plain[0]['content']}\n\n{introduction}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": introduction}, *plain]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    calls = [f"{OPEN}\n{_json(call['function'])}\n{CLOSE}" for call in message["tool_calls"]]
    content = [message["content"]] if message["content"] else []
    return {"role": "assistant", "content": "\n".join([*content, *calls])}


def _json(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value).decode()
