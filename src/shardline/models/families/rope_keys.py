"""The rope keys of config.json in both spellings.

transformers 5 writes `rope_parameters`; everything older reads `rope_theta`, `rope_scaling` and
`partial_rotary_factor`, and falls back to theta 10000 in silence when they are missing. We read either and
write both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.config import UsageError, nearest
from shardline.models.config import RopeConfig

__all__ = ["read_rope", "write_rope"]

_BOTH = ("factor", "original_max_position_embeddings")
_USED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (*_BOTH, "low_freq_factor", "high_freq_factor"),
    "yarn": (*_BOTH, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "longrope": (*_BOTH, "attention_factor", "short_factor", "long_factor"),
}
_ALWAYS = ("factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor")


def read_rope(raw: Mapping[str, Any], *, theta: float = 10000.0, partial: float = 1.0) -> RopeConfig:
    """Returns the rope of a config.json in either spelling; raises `UsageError` where the two disagree.

    `theta` and `partial` are the family's defaults.
    """
    # Phi-3 keeps the original context beside the rope; the share of dims stands there in old files.
    beside = ("partial_rotary_factor", "original_max_position_embeddings")
    defaults = {"rope_theta": theta, "partial_rotary_factor": partial}
    defaults |= {key: raw[key] for key in beside if raw.get(key) is not None}
    new, old = raw.get("rope_parameters"), {**(raw.get("rope_scaling") or {})}
    if raw.get("rope_theta") is not None:
        old["rope_theta"] = raw["rope_theta"]
    context = raw.get("max_position_embeddings")
    if new and old and _parse({**defaults, **new}, context) != _parse({**defaults, **old}, context):
        raise UsageError(
            f"config.json describes the rope twice and differently: rope_parameters = {new}, but rope_theta "
            f"and rope_scaling say {old}; delete the spelling that is wrong."
        )
    return _parse({**defaults, **(new or old)}, context)


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """Returns the keys of both spellings."""
    scaling: dict[str, Any] = {}
    defaults = RopeConfig()
    for name in _USED[rope.kind]:
        value = getattr(rope, name)
        if value is not None and (value != getattr(defaults, name) or name in _ALWAYS):
            scaling[name] = list(value) if isinstance(value, tuple) else value
    keys: dict[str, Any] = {
        "rope_parameters": {"rope_type": rope.kind, "rope_theta": rope.theta, **scaling},
        "rope_theta": rope.theta,
        "rope_scaling": {"rope_type": rope.kind, "type": rope.kind, **scaling} if scaling else None,
    }
    if rope.partial != 1.0:
        keys["rope_parameters"]["partial_rotary_factor"] = keys["partial_rotary_factor"] = rope.partial
    return keys


def _parse(keys: dict[str, Any], context: int | None) -> RopeConfig:
    name = keys.get("rope_type", keys.get("type", "default"))
    kind: Any = "longrope" if name == "su" else name
    if kind not in _USED:
        raise UsageError(f"config.json: rope type {name!r} is not supported{nearest(str(name), _USED)}")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}.union(*_USED.values())
    unknown = sorted(key for key, value in keys.items() if key not in known and value is not None)
    if unknown:
        raise UsageError(
            f"config.json: the rope has the field {unknown[0]!r} = {keys[unknown[0]]!r}, which changes the "
            "positions and is not understood; remove it only if the model was trained without it."
        )
    values = {field: keys[field] for field in _USED[kind] if keys.get(field) is not None}
    if kind == "longrope":
        for field in ("short_factor", "long_factor", "original_max_position_embeddings"):
            if field not in values:
                raise UsageError(f"config.json: a longrope needs {field}, which is missing.")
        for field in ("short_factor", "long_factor"):
            values[field] = tuple(float(value) for value in values[field])
    if "factor" in _USED[kind] and "factor" not in values:
        original = values.get("original_max_position_embeddings")
        if kind not in ("yarn", "longrope") or not original or not context:
            raise UsageError(f"config.json: a rope of the type {kind} needs factor, which is missing.")
        values["factor"] = context / original
    return RopeConfig(
        theta=float(keys["rope_theta"]), partial=float(keys["partial_rotary_factor"]), kind=kind, **values
    )
