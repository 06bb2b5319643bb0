"""Folders that appear whole or not at all: written beside their place, flushed to disk, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic_folder", "flush_folder", "publish_folder", "temporary_name"]


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder that becomes `path` when the block ends, and is removed when it raises."""
    scratch = temporary_name(path)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        publish_folder(scratch, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def temporary_name(path: Path) -> Path:
    """Returns the hidden sibling that a folder is written under: one a process, so that two writers can't meet."""
    return path.parent / f".{path.name}.{os.getpid()}.tmp"


def publish_folder(scratch: Path, path: Path) -> None:
    """Renames a finished folder to its place, replacing what stood there only once the new one is on disk."""
    flush_folder(scratch)
    if path.exists():
        old = path.parent / f".{path.name}.{os.getpid()}.old"
        path.rename(old)
        scratch.rename(path)
        shutil.rmtree(old)
    else:
        scratch.rename(path)
    _flush(path.parent)


def flush_folder(folder: Path) -> None:
    """Forces every file below `folder`, and the names in it, to the disk."""
    for root, _, files in os.walk(folder):
        for name in files:
            _flush(Path(root) / name)
        _flush(Path(root))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
