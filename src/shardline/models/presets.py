"""Named architectures, from the facts of their published config.json in presets.yaml. `tiny` is ours.

preset("gemma-2-9b")        # DecoderConfig
preset_names()              # ("tiny", "smollm2-135m", ...)
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml

from shardline.config import UsageError, nearest
from shardline.models.config import DecoderConfig
from shardline.models.families import read_model_config

__all__ = ["preset", "preset_names"]


def preset(name: str) -> DecoderConfig:
    """Returns the architecture called `name`; raises `UsageError` with the nearest name."""
    facts = _facts()
    if name not in facts:
        raise UsageError(f"model.preset = {name!r} is not known{nearest(name, facts)}")
    return read_model_config(facts[name])


def preset_names() -> tuple[str, ...]:
    """Returns all names, family by family and the small ones first."""
    return tuple(_facts())


@cache
def _facts() -> dict[str, dict[str, Any]]:
    text = resources.files("shardline.models").joinpath("presets.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["presets"]
