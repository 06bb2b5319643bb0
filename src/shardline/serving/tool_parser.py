"""Tool calls in the text of a reply, as it grows: content comes through at once, a call once it is whole.

    parser = parser_of("hermes", names=["get_weather"], max_calls=None)
    parts = parser.push("Let me see. <tool_call>{...")      # texts and `ToolCall`s, in order
    parts += parser.finish()

How the text is cut makes no difference. What does not turn out to be a call, such as one with broken JSON or one that
the reply's end has cut, comes as content, whole. White space around calls is left out. Two styles are read:

    hermes      <tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere in the text (Qwen, Hermes)
    llama3_json {"name": ..., "parameters": {...}}, at the beginning or after <|python_tag|>; more after ";"
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

__all__ = ["CLOSE", "OPEN", "PYTHON_TAG", "Part", "ToolCall", "ToolParser", "parser_of"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

_IN_STRING = re.compile(r'\\.|"', re.DOTALL)
_AT_CLOSE = re.compile(f'"|{CLOSE}')
_AT_BRACE = re.compile(r'["{}]')


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call. `arguments` is a JSON object as the model wrote it; `id` is new and has no meaning."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)


Part = str | ToolCall


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()  # as written; empty where it is missing
    parameters: msgspec.Raw = msgspec.Raw()


class ToolParser:
    """Base: `_text` is what is not decided yet. A style says where a call may begin and where it ends."""

    def __init__(self, *, names: Collection[str], max_calls: int | None) -> None:
        """`names` are the functions there are; after `max_calls` calls everything is content."""
        self.num_calls = 0
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._text = ""
        self._space = ""  # white space that comes before a call, or is content after all
        self._parts: list[Part] = []
        self._inside = False
        self._after_call = False  # whether a call was the last thing that came
        self._reset_scan(0)

    def push(self, text: str) -> list[Part]:
        """Returns what the reply's next piece of text decides."""
        self._text += text
        self._run(final=False)
        return self._take()

    def finish(self) -> list[Part]:
        """Returns the rest, when the reply has ended."""
        self._run(final=True)
        if not self._after_call or self._space.strip():
            self._content(self._space)
        self._space = ""
        return self._take()

    def _run(self, *, final: bool) -> None:
        while self._text and self._advance(final=final):
            pass

    def _advance(self, *, final: bool) -> bool:
        """Decides one thing more; False: nothing can be decided before more text comes."""
        raise AssertionError("a style defines this")

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _content(self, text: str) -> None:
        self._after_call = self._after_call and not text
        if text and self._parts and isinstance(self._parts[-1], str):
            self._parts[-1] += text
        elif text:
            self._parts.append(text)

    def _content_until(self, end: int) -> None:
        """Gives the text up to `end` as content, but holds back the white space at its end."""
        text, self._text = self._space + self._text[:end], self._text[end:]
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._content(shown)

    @property
    def _may_call(self) -> bool:
        return self._max_calls is None or self.num_calls < self._max_calls

    def _call(self, body: str) -> bool:
        """Adds the call that `body` is, if it is one."""
        call = _read_call(body, self._names if self.names_only else None)
        if call is None:
            return False
        self.num_calls += 1
        self._parts.append(call)
        self._space, self._after_call = "", True
        return True

    names_only = False  # whether a call of an unknown function is content

    def _reset_scan(self, position: int) -> None:
        self._position, self._in_string = position, False

    def _scan(self, pattern: re.Pattern[str], *, overlap: int) -> re.Match[str] | None:
        """Returns the next match of `pattern` outside JSON strings; goes on later where it stopped.

        `overlap` is how many characters at the end could be the beginning of a match.
        """
        while True:
            match = (_IN_STRING if self._in_string else pattern).search(self._text, self._position)
            if match is None:
                end = len(self._text)
                if self._in_string:
                    overlap = 1 if self._text.endswith("\\", self._position) else 0
                self._position = max(self._position, end - overlap)
                return None
            self._position = match.end()
            if match[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                return match


class HermesParser(ToolParser):
    """Calls between markers."""

    def _advance(self, *, final: bool) -> bool:
        if not self._inside:
            return self._look_for_open(final=final)
        match = self._scan(_AT_CLOSE, overlap=len(CLOSE) - 1)
        if match is None and not final:
            return False
        body = self._text[len(OPEN) :] if match is None else self._text[len(OPEN) : match.start()]
        self._inside = False
        if self._call(body):
            self._text = "" if match is None else self._text[match.end() :]
        else:  # the marker is text, and what follows it is read again
            self._content(self._space + OPEN)
            self._space, self._text = "", self._text[len(OPEN) :]
        return True

    def _look_for_open(self, *, final: bool) -> bool:
        if not self._may_call:
            self._content_until(len(self._text))
            return False
        begin = self._text.find(OPEN)
        if begin < 0:
            self._content_until(len(self._text) - (0 if final else _overlap(self._text, OPEN)))
            return False
        self._content_until(begin)
        self._inside = True
        self._reset_scan(len(OPEN))
        return True


class Llama3Parser(ToolParser):
    """Bare JSON objects, so only where nothing else has been said, and only of functions that there are."""

    names_only = True

    def __init__(self, *, names: Collection[str], max_calls: int | None) -> None:
        super().__init__(names=names, max_calls=max_calls)
        self._expects = True  # a call may begin here
        self._lead = ""  # what separates calls, or is content after all
        self._depth = 0

    def finish(self) -> list[Part]:
        self._run(final=True)
        lead, self._lead = self._lead, ""
        if not self._after_call or lead.strip().strip(";"):  # what only ended the last call is left out
            self._space += lead
        return super().finish()

    def _advance(self, *, final: bool) -> bool:
        if self._inside:
            return self._read_object(final=final)
        if not self._may_call:
            self._give_lead()
            self._content_until(len(self._text))
            return False
        return self._expect(final=final) if self._expects else self._look_for_tag(final=final)

    def _expect(self, *, final: bool) -> bool:
        """At a place where a call may begin: white space, the tag and, between calls, one ";" may come first."""
        first = self._text[0]
        if first == "{":
            self._inside, self._depth = True, 0
            self._reset_scan(0)
            return True
        if first.isspace() or (first == ";" and self.num_calls and ";" not in self._lead):
            self._lead, self._text = self._lead + first, self._text[1:]
            return True
        if self._text.startswith(PYTHON_TAG):
            self._lead, self._text = self._lead + PYTHON_TAG, self._text[len(PYTHON_TAG) :]
            return True
        if not final and PYTHON_TAG.startswith(self._text):
            return False
        self._expects = False
        self._give_lead()
        return True

    def _read_object(self, *, final: bool) -> bool:
        while True:
            match = self._scan(_AT_BRACE, overlap=0)
            if match is None:
                if final:
                    self._give_up()
                return final
            self._depth += 1 if match[0] == "{" else -1
            if self._depth == 0:
                break
        body = self._text[: match.end()]
        if self._call(body):
            self._inside, self._lead = False, ""
            self._text = self._text[len(body) :]
        else:
            self._give_up()
        return True

    def _look_for_tag(self, *, final: bool) -> bool:
        begin = self._text.find(PYTHON_TAG)
        if begin < 0:
            self._content_until(len(self._text) - (0 if final else _overlap(self._text, PYTHON_TAG)))
            return False
        self._content_until(begin)
        self._expects = True
        return True

    def _give_up(self) -> None:
        """The object is no call: it and what led to it are content, and text follows."""
        self._inside = self._expects = False
        self._give_lead()
        self._content(self._space + self._text[:1])
        self._space, self._text = "", self._text[1:]

    def _give_lead(self) -> None:
        self._space, self._lead = self._space + self._lead, ""
        if self._space.strip():
            self._content(self._space)
            self._space = ""


PARSERS = {"hermes": HermesParser, "llama3_json": Llama3Parser}


def parser_of(style: str, *, names: Collection[str], max_calls: int | None) -> ToolParser:
    """Returns a parser for one reply."""
    return PARSERS[style](names=names, max_calls=max_calls)


def _read_call(body: str, names: Collection[str] | None) -> ToolCall | None:
    """Returns the call that `body` is: a name, and arguments that are a JSON object or the text of one."""
    try:
        call = msgspec.json.decode(body, type=_Call)
        if names is not None and call.name not in names:
            return None
        arguments = bytes(call.arguments or call.parameters).decode() or "{}"
        value = msgspec.json.decode(arguments)
        if isinstance(value, str):  # written as a text, as OpenAI's own format has it
            arguments = value
            value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if value is None:
        arguments, value = "{}", {}
    return ToolCall(name=call.name, arguments=arguments.strip()) if isinstance(value, dict) and call.name else None


def _overlap(text: str, marker: str) -> int:
    """Returns the length of the longest end of `text` that is a proper beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
