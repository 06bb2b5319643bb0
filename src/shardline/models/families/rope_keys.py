"""The rope and dtype keys of config.json in both spellings.

transformers 5 writes `rope_parameters` and `dtype`; everything older reads `rope_theta`, `rope_scaling` and
`torch_dtype`, and falls back to theta 10000 or fp32 in silence when they are missing. We read either and write both.
"""

from __future__ import annotations

from typing import Any

from shardline.config import UsageError, nearest
from shardline.models.config import RopeConfig

__all__ = ["read_rope", "write_rope"]

_KINDS = ("default", "linear", "llama3", "yarn")
_FIELDS = (
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
_USED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


def read_rope(raw: dict[str, Any], *, default_theta: float) -> RopeConfig:
    """Returns the rope of a config.json in either spelling; raises `UsageError` where the two disagree."""
    new = raw.get("rope_parameters")
    old = {**(raw.get("rope_scaling") or {})}
    if "rope_theta" in raw:
        old["rope_theta"] = raw["rope_theta"]
    if new and old:
        first, second = _parse(new, default_theta), _parse({**old}, default_theta)
        if first != second:
            raise UsageError(
                f"config.json describes the rope twice and differently: rope_parameters = {new}, but rope_theta and "
                f"rope_scaling say {old}; delete the spelling that is wrong."
            )
    return _parse(new or old, default_theta)


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """Returns the keys of both spellings."""
    scaling: dict[str, Any] = {}
    if rope.kind != "default":
        defaults = RopeConfig()
        for name in _USED[rope.kind]:
            value = getattr(rope, name)
            if (
                value is not None and (value != getattr(defaults, name) or name in ("factor", "low_freq_factor"))
            ) or name in ("high_freq_factor",):
                scaling[name] = value
    return {
        "rope_parameters": {"rope_type": rope.kind, "rope_theta": rope.theta, **scaling},
        "rope_theta": rope.theta,
        "rope_scaling": {"rope_type": rope.kind, "type": rope.kind, **scaling} if scaling else None,
    }


def _parse(keys: dict[str, Any], default_theta: float) -> RopeConfig:
    kind = keys.get("rope_type", keys.get("type", "default"))
    if kind not in _KINDS:
        raise UsageError(f"config.json: rope type {kind!r} is not supported{nearest(str(kind), _KINDS)}")
    known = {"rope_type", "type", "rope_theta", *_FIELDS}
    unknown = sorted(key for key, value in keys.items() if key not in known and value is not None)
    if unknown:
        raise UsageError(
            f"config.json: the rope has the field {unknown[0]!r} = {keys[unknown[0]]!r}, which changes the positions "
            "and is not understood; remove it only if the model was trained without it."
        )
    values = {name: keys[name] for name in _USED[kind] if keys.get(name) is not None}
    return RopeConfig(theta=float(keys.get("rope_theta", default_theta)), kind=kind, **values)
