"""Tool calls in text: however the text is cut the result is the same, and nothing of it is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.serving.tool_parser import CLOSE, OPEN, PYTHON_TAG, Part, ToolCall, parser_of

NAMES = ["f", "get_weather", "\u65e5\u672c"]


def parse(style: str, pieces: list[str], *, max_calls: int | None = None) -> tuple[str, list[ToolCall]]:
    """Returns the content and the calls of a reply that came in these pieces."""
    parser = parser_of(style, names=NAMES, max_calls=max_calls)
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    parts += parser.finish()
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [part for part in parts if isinstance(part, ToolCall)]


def hermes(name: str, arguments: str) -> str:
    return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{CLOSE}'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}'


HERMES_CASES = [
    ("just text", "just text", []),
    (hermes("f", "{}"), "", [("f", "{}")]),
    (f'{OPEN}{{"name": "f"}}{CLOSE}', "", [("f", "{}")]),
    (f'{OPEN}{{"name": "f", "arguments": null}}{CLOSE}', "", [("f", "{}")]),
    (f'{OPEN}{{"arguments": {{"a": 1}}, "name": "f"}}{CLOSE}', "", [("f", '{"a": 1}')]),
    (f'{OPEN}{{"name": "f", "parameters": {{"a": 1}}}}{CLOSE}', "", [("f", '{"a": 1}')]),
    (f'{OPEN}{{"name": "f", "arguments": "{{\\"a\\": 1}}"}}{CLOSE}', "", [("f", '{"a": 1}')]),
    (f"before\n\n{hermes('f', '{}')}", "before", [("f", "{}")]),
    (f"{hermes('f', '{}')}\n after ", "\n after ", [("f", "{}")]),
    (f"a {hermes('f', '{}')}\n{hermes('g', '{}')} b", "a b", [("f", "{}"), ("g", "{}")]),
    (hermes("f", '{"a": {"b": [{"c": {}}]}}'), "", [("f", '{"a": {"b": [{"c": {}}]}}')]),
    (hermes("f", '{"s": "}{ \\" \\\\"}'), "", [("f", '{"s": "}{ \\" \\\\"}')]),
    (hermes("f", f'{{"s": "{CLOSE} {OPEN}"}}'), "", [("f", f'{{"s": "{CLOSE} {OPEN}"}}')]),
    (hermes("f", '{"s": "\u65e5\u672c \ud55c\uad6d \U0001f469\u200d\U0001f467"}'), "", None),
    (f'x {OPEN}{{"name": "f", "arguments": {{}}}}', "x", [("f", "{}")]),  # cut by a stop string, or never closed
    (f'x {OPEN}{{"name": "f", "argu', f'x {OPEN}{{"name": "f", "argu', []),
    (f'x {OPEN}{{"name": "f"}}\n</tool_c', f'x {OPEN}{{"name": "f"}}\n</tool_c', []),
    (f"x {OPEN}not json{CLOSE} y", f"x {OPEN}not json{CLOSE} y", []),
    (f"{OPEN}{{bad{CLOSE}\n{hermes('f', '{}')}", f"{OPEN}{{bad{CLOSE}", [("f", "{}")]),
    (f'{OPEN}{{"unclosed: 1}}{CLOSE} {hermes("f", "{}")}', f'{OPEN}{{"unclosed: 1}}{CLOSE}', [("f", "{}")]),
    (f"{OPEN}{OPEN}{hermes('f', '{}')[len(OPEN) :]}", OPEN, [("f", "{}")]),
    (hermes("f", "[1]"), hermes("f", "[1]"), []),
    (hermes("f", '{"a": NaN}'), hermes("f", '{"a": NaN}'), []),
    (hermes("f", '"not an object"'), hermes("f", '"not an object"'), []),
    (hermes("", "{}"), hermes("", "{}"), []),
    (f"a < b <tool b <tool_cal {CLOSE} ", f"a < b <tool b <tool_cal {CLOSE} ", []),
    ("  \n", "  \n", []),
    ("", "", []),
]
LLAMA_CASES = [
    ("just text", "just text", []),
    (llama("f", "{}"), "", [("f", "{}")]),
    (f"\n {llama('f', '{}')} ", "", [("f", "{}")]),
    (f"{PYTHON_TAG}{llama('f', '{}')}", "", [("f", "{}")]),
    (f"Let me see.{PYTHON_TAG}{llama('f', '{}')}", "Let me see.", [("f", "{}")]),
    (f"{llama('f', '{}')}; {llama('get_weather', '{}')}", "", [("f", "{}"), ("get_weather", "{}")]),
    (f"{llama('f', '{}')}\n{llama('f', '{}')};", "", [("f", "{}"), ("f", "{}")]),
    (llama("f", '{"a": {"b": "}{\\""}}'), "", [("f", '{"a": {"b": "}{\\""}}')]),
    (f"{llama('f', '{}')} and text", " and text", [("f", "{}")]),
    ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ('{"a": 1} x ', '{"a": 1} x ', []),
    (' {"name": "f", "par', ' {"name": "f", "par', []),
    (f"text {llama('f', '{}')}", f"text {llama('f', '{}')}", []),
    (f"{PYTHON_TAG}print(1)", f"{PYTHON_TAG}print(1)", []),
    (PYTHON_TAG[:5], PYTHON_TAG[:5], []),
    ("  ", "  ", []),
    ("", "", []),
]
CASES = [("hermes", *case) for case in HERMES_CASES] + [("llama3_json", *case) for case in LLAMA_CASES]


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES)
def test_what_is_a_call_and_what_is_content(style: str, text: str, content: str, calls: list[tuple[str, str]] | None):
    got_content, got_calls = parse(style, [text])
    assert got_content == content
    if calls is not None:
        assert [(call.name, call.arguments) for call in got_calls] == calls
    for call in got_calls:
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(("style", "text"), [case[:2] for case in CASES])
def test_every_cut_in_two_and_every_character_alone(style: str, text: str):
    whole = parse(style, [text])
    for place in range(len(text) + 1):
        assert parse(style, [text[:place], text[place:]]) == whole, place
    assert parse(style, list(text)) == whole


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(alphabet='ab{}[]"\\<>/ \n\u65e5\U0001f600'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)
NOISE = st.sampled_from(
    [OPEN, CLOSE, PYTHON_TAG, "<tool_", "</tool_call", "{", "}", '"', "\\", ";", " ", "\n", "text", "\u65e5\u672c", "<"]
)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), style=st.sampled_from(["hermes", "llama3_json"]))
def test_any_text_in_any_pieces_gives_what_the_whole_gives(data: st.DataObject, style: str):
    write = hermes if style == "hermes" else llama
    segment = NOISE | st.builds(
        lambda name, value, escape: write(name, json.dumps(value, ensure_ascii=escape)),
        st.sampled_from(NAMES),
        ARGUMENTS,
        st.booleans(),
    )
    segments = data.draw(st.lists(segment, max_size=6))
    text = "".join(segments)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    max_calls = data.draw(st.sampled_from([None, 1]))
    content, calls = parse(style, [text], max_calls=max_calls)
    assert parse(style, pieces, max_calls=max_calls) == (content, calls)
    assert max_calls is None or len(calls) <= max_calls
    # Nothing is lost: the content's characters are the text's, in order, and with no call there is no difference.
    rest = iter(text)
    assert all(character in rest for character in content)
    if not calls:
        assert content == text
    kept = len("".join(content.split())) + sum(len("".join(call.arguments.split())) for call in calls)
    assert kept <= len(text)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), max_size=4), st.text(alphabet="ab \n\u65e5", max_size=9))
def test_all_calls_come_back_with_their_arguments(calls: list[tuple[str, dict]], before: str):
    text = before + "\n".join(hermes(name, json.dumps(arguments)) for name, arguments in calls)
    content, found = parse("hermes", list(text))
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert content == (before.rstrip() if calls else before)


def test_after_the_last_call_that_is_allowed_everything_is_content():
    text = f"{hermes('f', '{}')} and {hermes('f', '{}')}"
    content, calls = parse("hermes", [text], max_calls=1)
    assert len(calls) == 1
    assert content == f" and {hermes('f', '{}')}"


def test_content_is_not_held_back_longer_than_it_must_be():
    parser = parser_of("hermes", names=NAMES, max_calls=None)
    assert parser.push("Hello") == ["Hello"]
    assert parser.push(" world <") == [" world"]
    assert parser.push("b") == [" <b"]
    assert parser.push(hermes("f", "{}")[:-1]) == []
    [call] = parser.push(">")
    assert isinstance(call, ToolCall)
    assert call.id.startswith("call_")


def test_a_reply_of_many_markers_is_read_in_reasonable_time():
    import time

    text = OPEN * 2000 + '{"name": "f"' * 50
    started_s = time.monotonic()
    content, calls = parse("hermes", [text])
    assert (content, calls) == (text, [])
    assert time.monotonic() - started_s < 2.0
