"""Where Shardline keeps what it can make again: converted models and packed data.

SHARDLINE_CACHE, else $XDG_CACHE_HOME/shardline, else ~/.cache/shardline
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["cache_dir", "scratch_folder"]


def cache_dir() -> Path:
    """Returns the user's cache folder; it may not exist yet."""
    chosen = os.environ.get("SHARDLINE_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "shardline"


@contextmanager
def scratch_folder(place: Path) -> Generator[Path]:
    """Yields a new hidden folder beside `place`, to be filled and renamed to `place`; removes it afterwards.

    First removes what killed processes of this machine left there for the same place.
    """
    import psutil

    place.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{place.name}.{socket.gethostname()}."
    for path in place.parent.glob(f"{prefix}*"):
        pid = path.name.removeprefix(prefix).partition(".")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}.", dir=place.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
