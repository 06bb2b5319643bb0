"""Text to train on, as a list of documents: the standard library, a folder, a .txt file or a .jsonl file.

    source = open_source("stdlib")
    for document in source.documents():
        print(document.name, document.text)

    stdlib     each .py file of the running Python's standard library, without tests and site-packages
    FOLDER     each UTF-8 file under it is a document; hidden, binary and empty files are skipped and counted
    FILE.txt   a document ends at a form feed, at two blank lines, or, past 16,384 characters, at the next blank
               line; at the next line past 32,768, and at 65,536 characters in any case
    FILE.jsonl each line is {"text": "..."} or {"messages": [{"role": "...", "content": "..."}, ...]}

The order is that of the sorted names (or of the lines), so that it's the same wherever the same files are.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from shardline.config.errors import ShardlineError, UsageError

__all__ = ["Document", "Source", "SourceFile", "open_source"]

Kind = Literal["files", "txt", "jsonl"]
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SOFT_LENGTH, _LINE_LENGTH, _HARD_LENGTH = 16_384, 32_768, 65_536


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document: a `text`, or the `messages` of a chat. `name` says where it stands, as FILE or FILE:LINE."""

    name: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None

    def split_key(self) -> int:
        """64 bits that depend on the content only, so that equal documents fall on the same side of a split."""
        content = self.text if self.text is not None else json.dumps(self.messages, sort_keys=True)
        digest = hashlib.sha256(content.encode("utf-8", errors="surrogatepass")).digest()
        return int.from_bytes(digest[:8], "little")


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    name: str
    path: Path
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files that have been read once: listed with sizes and hashes, and known to be text."""

    description: str
    kind: Kind
    files: tuple[SourceFile, ...]
    skipped: dict[str, int]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def fingerprint(self) -> str:
        """Returns a SHA-256 of the listing: equal fingerprints, equal documents."""
        listing = [self.kind, *((file.name, file.size_bytes, file.sha256) for file in self.files)]
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yields the documents in order. Raises `UsageError` with file and line for a line that can't be used."""
        for file in self.files:
            content = file.path.read_bytes()
            if hashlib.sha256(content).hexdigest() != file.sha256:
                raise ShardlineError(f"{file.path} changed while it was being read; run the command again.")
            if self.kind == "jsonl":
                yield from _jsonl_documents(file, content)
            elif self.kind == "txt":
                for number, text in enumerate(_split_text(content.decode("utf-8")), start=1):
                    yield Document(name=f"{file.name}#{number}", text=text)
            else:
                yield Document(name=file.name, text=content.decode("utf-8"))


def open_source(source: str) -> Source:
    """Returns the source that `data.source` names. Raises `UsageError` where it is missing, empty or no text."""
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        return _open_folder(root, f"the standard library of Python {platform.python_version()}", stdlib=True)
    path = Path(source).expanduser()
    if path.is_dir():
        return _open_folder(path, f"the folder {path}", stdlib=False)
    if not path.exists():
        raise UsageError(
            f"data.source = {source!r}: there is no such file or folder; "
            "pass stdlib, a folder, a .txt file or a .jsonl file."
        )
    kinds: dict[str, Kind] = {".txt": "txt", ".jsonl": "jsonl"}
    if path.suffix.lower() not in kinds:
        raise UsageError(
            f"data.source = {source!r} is neither a folder nor a .txt or .jsonl file; "
            "rename it, or pass the folder that holds it."
        )
    file, why_not = _examine(path, path.name)
    if file is None:
        raise UsageError(f"data.source = {source!r} can't be used: {_REASONS[why_not]}.")
    return Source(description=f"the file {path}", kind=kinds[path.suffix.lower()], files=(file,), skipped={})


_REASONS = {
    "binary": "it is not UTF-8 text",
    "empty": "it is empty",
    "unreadable": "it can't be read; check its permissions",
}


def _open_folder(root: Path, description: str, *, stdlib: bool) -> Source:
    skipped: Counter[str] = Counter()
    paths = _stdlib_paths(root) if stdlib else _visible_paths(root, skipped)
    files = []
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        file, why_not = _examine(path, path.relative_to(root).as_posix())
        if file is None:
            skipped[why_not] += 1
        else:
            files.append(file)
    if not files:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items())) or "it is empty"
        raise UsageError(f"There is no text in {description} ({counts}); pass a folder with UTF-8 files.")
    return Source(description=description, kind="files", files=tuple(files), skipped=dict(sorted(skipped.items())))


def _stdlib_paths(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_STDLIB]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _visible_paths(root: Path, skipped: Counter[str]) -> Iterator[Path]:
    """The files below `root`, links to folders not followed; a hidden folder counts as one hidden entry."""
    for folder, subfolders, names in os.walk(root):
        hidden = [name for name in subfolders if name.startswith(".")]
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        skipped.update({"hidden": len(hidden) + sum(name.startswith(".") for name in names)})
        yield from (Path(folder, name) for name in names if not name.startswith("."))
    skipped += Counter()  # drops a count of zero


def _examine(path: Path, name: str) -> tuple[SourceFile | None, str]:
    """The file with its size and hash, or None and why it is skipped."""
    try:
        content = path.read_bytes() if path.is_file() else None
    except OSError:
        content = None
    if content is None:
        return None, "unreadable"
    if not content.strip():
        return None, "empty"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return None, "binary"
    if b"\0" in content:
        return None, "binary"
    sha256 = hashlib.sha256(content).hexdigest()
    return SourceFile(name=name, path=path, size_bytes=len(content), sha256=sha256), ""


def _split_text(text: str) -> Iterator[str]:
    """Cuts one file into documents; together they are the file without form feeds and without blank documents."""
    for section in text.split("\f"):
        parts: list[str] = []
        length = blank_lines = 0
        for line in section.splitlines(keepends=True):
            for start in range(0, len(line), _HARD_LENGTH):
                blank = not line.strip()
                ends = (
                    (blank_lines >= 2 and not blank)
                    or (length >= _SOFT_LENGTH and blank_lines and not blank)
                    or length >= _LINE_LENGTH
                )
                if ends:
                    yield from _unless_blank("".join(parts))
                    parts, length = [], 0
                part = line[start : start + _HARD_LENGTH]
                parts.append(part)
                length += len(part)
                blank_lines = blank_lines + 1 if blank else 0
        yield from _unless_blank("".join(parts))


def _unless_blank(text: str) -> Iterator[str]:
    if text.strip():
        yield text


def _jsonl_documents(file: SourceFile, content: bytes) -> Iterator[Document]:
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield _jsonl_document(line, f"{file.path}:{number}")


def _jsonl_document(line: bytes, where: str) -> Document:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise UsageError(f"{where}: this line is not valid JSON: {error}.") from None
    wanted = 'expected {"text": "..."} or {"messages": [...]}'
    if not isinstance(value, dict) or ("text" in value) == ("messages" in value):
        found = f"the keys {sorted(value)}" if isinstance(value, dict) else f"a {type(value).__name__}"
        raise UsageError(f"{where}: {wanted}, got {found}.")
    if "text" in value:
        if not isinstance(value["text"], str):
            raise UsageError(f"{where}: text must be a string, got {type(value['text']).__name__}.")
        return Document(name=where, text=value["text"])
    messages = value["messages"]
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{where}: messages must be a list with at least one message.")
    for index, message in enumerate(messages):
        keys = message if isinstance(message, dict) else {}
        if not isinstance(keys.get("role"), str) or not isinstance(keys.get("content"), str):
            raise UsageError(f"{where}: messages[{index}] needs a role and a content, each a string.")
    return Document(name=where, messages=messages)
