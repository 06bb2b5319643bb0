"""Where Shardline keeps what it can make again: converted models and packed data.

SHARDLINE_CACHE, else $XDG_CACHE_HOME/shardline, else ~/.cache/shardline
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_dir"]


def cache_dir() -> Path:
    """Returns the user's cache folder; it may not exist yet."""
    chosen = os.environ.get("SHARDLINE_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "shardline"
