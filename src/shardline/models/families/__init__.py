"""Families: how each one's config.json and tensors map onto the decoder, both ways, as families.yaml says."""

from __future__ import annotations

from typing import Any

from shardline.config import UsageError, nearest
from shardline.models.config import DecoderConfig
from shardline.models.families.family import Family, TensorRule, families

__all__ = ["FAMILIES", "Family", "TensorRule", "family_of", "read_model_config", "write_model_config"]

FAMILIES: dict[str, Family]


def __getattr__(name: str) -> dict[str, Family]:
    if name == "FAMILIES":  # read when it is first asked for
        return families()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def family_of(model_type: str) -> Family:
    """Returns the family that reads this `model_type`; raises `UsageError` with the nearest name."""
    known = families()
    if model_type not in known:
        near = nearest(model_type, known)
        raise UsageError(f"config.json: model_type {model_type!r} is not supported{near}")
    return known[model_type]


def read_model_config(raw: dict[str, Any]) -> DecoderConfig:
    """Returns our config for a config.json."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise UsageError("config.json has no model_type, so that nobody can tell what architecture this is.")
    return family_of(model_type).read(raw)


def write_model_config(config: DecoderConfig, *, dtype: str) -> dict[str, Any]:
    """Returns a config.json for our config: `raw` carried through, our fields on top, in both spellings.

    `dtype` is the weights' dtype by its torch name without the prefix: "float32", "bfloat16", ...
    """
    return {**config.raw, **family_of(config.family).write(config), "dtype": dtype, "torch_dtype": dtype}
