from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.config import ShardlineError, UsageError
from shardline.text.sources import Document, _split_text, open_source


def texts(path: Path) -> list[str | None]:
    return [document.text for document in open_source(str(path)).documents()]


def test_the_standard_library():
    source = open_source("stdlib")
    names = [file.name for file in source.files]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} < set(names)
    assert all(name.endswith(".py") for name in names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert source.size_bytes > 5_000_000
    assert source.fingerprint() == open_source("stdlib").fingerprint()


def test_a_folder_skips_and_counts(tmp_path: Path):
    (tmp_path / "b.py").write_text("print('b')\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.md").write_text("caf\u00e9\n", encoding="utf-8")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n")
    (tmp_path / "zeros.txt").write_bytes(b"a\0b")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("x")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    source = open_source(str(tmp_path))
    assert [(d.name, d.text) for d in source.documents()] == [("b.py", "print('b')\n"), ("sub/a.md", "caf\u00e9\n")]
    assert source.skipped == {"binary": 2, "empty": 1, "hidden": 2, "unreadable": 1}


def test_the_fingerprint_follows_the_content(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one")
    before = open_source(str(tmp_path)).fingerprint()
    (tmp_path / "a.txt").write_text("two")
    changed = open_source(str(tmp_path)).fingerprint()
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert len({before, changed, open_source(str(tmp_path)).fingerprint()}) == 3


def test_a_file_that_changes_while_it_is_read(tmp_path: Path):
    (tmp_path / "a.py").write_text("one")
    source = open_source(str(tmp_path))
    (tmp_path / "a.py").write_text("two")
    with pytest.raises(ShardlineError, match=r"a\.py changed while it was being read; run the command again"):
        list(source.documents())


def test_a_text_file_is_cut_at_two_blank_lines_and_form_feeds(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_text("one\n\nstill one\n\n\ntwo\n\fthree\n\n\n\n", encoding="utf-8")
    assert texts(path) == ["one\n\nstill one\n\n\n", "two\n", "three\n\n\n\n"]
    assert [d.name for d in open_source(str(path)).documents()] == ["book.txt#1", "book.txt#2", "book.txt#3"]


def test_long_text_is_cut_at_a_blank_line_then_at_a_line_then_anywhere():
    line = "x" * 99 + "\n"
    paragraphs = (line * 50 + "\n") * 8
    assert {len(part) for part in _split_text(paragraphs)} == {5001 * 4}
    assert max(map(len, _split_text(line * 1000))) <= 32_768 + 100
    assert [len(part) for part in _split_text("y" * 150_000)] == [65_536, 65_536, 150_000 - 2 * 65_536]


@given(text=st.text(alphabet="ab \n\u00e9", max_size=200))
def test_cutting_loses_no_text(text: str):
    assert "".join(_split_text(text)).split() == text.split()


def test_jsonl_of_texts_and_chats(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text(f'{{"text": "one"}}\n\n{json.dumps({"messages": chat})}\n', encoding="utf-8")
    first, second = open_source(str(path)).documents()
    assert (first.name, first.text, first.messages) == (f"{path}:1", "one", None)
    assert (second.name, second.text, second.messages) == (f"{path}:3", None, chat)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1]", r'expected \{"text".*got a list'),
        ('{"prompt": "a"}', r"got the keys \['prompt'\]"),
        ('{"text": "a", "messages": []}', r"got the keys \['messages', 'text'\]"),
        ('{"text": 5}', "text must be a string, got int"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\] needs a role and a content"),
        ('{"messages": [3]}', r"messages\[0\] needs a role and a content"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UsageError, match=rf"data\.jsonl:2: .*{message}"):
        list(open_source(str(path)).documents())


def test_sources_that_cannot_be_used(tmp_path: Path):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "table.csv").write_text("a,b\n")
    (tmp_path / "folder").mkdir()
    for name, message in {
        "nowhere": "there is no such file or folder; pass stdlib, a folder",
        "empty.txt": "can't be used: it is empty",
        "binary.jsonl": "can't be used: it is not UTF-8 text",
        "table.csv": r"is neither a folder nor a \.txt or \.jsonl file",
        "folder": r"There is no text in .*\(it is empty\)",
    }.items():
        with pytest.raises(UsageError, match=message):
            open_source(str(tmp_path / name))
    (tmp_path / "folder" / ".hidden").write_text("x")
    with pytest.raises(UsageError, match=r"\(1 hidden\)"):
        open_source(str(tmp_path / "folder"))


def test_the_split_key_depends_on_the_content_only():
    assert Document(name="a", text="x").split_key() == Document(name="b", text="x").split_key()
    assert Document(name="a", text="x").split_key() != Document(name="a", text="y").split_key()
    chat = [{"role": "user", "content": "a"}]
    same = [{"content": "a", "role": "user"}]
    assert Document(name="a", messages=chat).split_key() == Document(name="a", messages=same).split_key()
