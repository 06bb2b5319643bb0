"""Models by name: the decoder's presets, and others that can be planned without being run.

known_shape("llama-3.1-8b"), known_shape("deepseek-v3")
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml

from shardline.config.errors import UsageError, nearest
from shardline.models.presets import preset, preset_names
from shardline.planning.cluster.shape import ModelShape

__all__ = ["known_shape", "known_shape_names", "published_parameters"]


def known_shape(name: str) -> ModelShape:
    """Returns the model of that name; raises `UsageError` with the nearest one."""
    if name in preset_names():
        return ModelShape.of(preset(name), name=name)
    known = _models()
    if name not in known:
        raise UsageError(
            f"The model {name!r} is not known{nearest(name, known_shape_names())} A folder, its config.json, "
            "--model-shape or --params will do as well."
        )
    facts = {key: value for key, value in known[name].items() if key != "parameters"}
    windows = tuple((window, count) for window, count in facts.pop("windows", ()))
    return ModelShape.filled(name=name, windows=windows, **facts)


def known_shape_names() -> tuple[str, ...]:
    return *preset_names(), *_models()


def published_parameters() -> dict[str, float]:
    """Returns the published counts of the models that are not presets."""
    return {name: facts["parameters"] * 1e9 for name, facts in _models().items()}


@cache
def _models() -> dict[str, dict[str, Any]]:
    text = resources.files("shardline.planning.cluster").joinpath("known_shapes.yaml").read_text(encoding="utf-8")
    data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    families = data["families"]
    return {
        name: {**families[facts["like"]], **{key: value for key, value in facts.items() if key != "like"}}
        for name, facts in data["models"].items()
    }
