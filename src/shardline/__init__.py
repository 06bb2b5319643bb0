"""Shardline: one PyTorch code base from the first training shard to the last served token.

    from shardline import LLM, SamplingParams

`import shardline` loads no torch; the rooms below import what they need when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardline.llm import LLM, SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Loads `shardline.llm`, and with it torch, when one of its names is first used."""
    if name in ("LLM", "SamplingParams"):
        return getattr(importlib.import_module("shardline.llm"), name)
    raise AttributeError(f"module 'shardline' has no attribute {name!r}")
