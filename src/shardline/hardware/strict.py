"""Plain values to dataclasses, strictly: a key that is not known is an error with the nearest one.

    rule = convert_strictly(yaml.safe_load(text), Rule)

msgspec checks the types; on its own it would pass over unknown keys of dataclasses.
"""

from __future__ import annotations

import dataclasses
import typing
from importlib import resources
from typing import Any, TypeVar

import msgspec

from shardline.config.errors import nearest

__all__ = ["StrictError", "convert_strictly", "load_tables"]

T = TypeVar("T")


class StrictError(ValueError):
    """Values that do not have the form asked for; the message says where and what."""


def convert_strictly(values: Any, kind: type[T]) -> T:
    """Returns `values` as a `kind` (a dataclass, or a dict or tuple of them); raises `StrictError`."""
    _reject_unknown(values, kind, "")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise StrictError(f"{str(error).replace('`$.', '`')}.") from None


def load_tables(name: str) -> Any:
    """Returns the content of one of this package's YAML files."""
    import yaml

    text = resources.files("shardline.hardware").joinpath(name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _reject_unknown(value: Any, kind: Any, where: str) -> None:
    for option in _options(kind):
        if dataclasses.is_dataclass(option) and isinstance(value, dict):
            hints = typing.get_type_hints(option)
            for key, inner in value.items():
                if key not in hints:
                    place = f" in {where}" if where else ""
                    raise StrictError(f"Unknown key {key!r}{place}{nearest(str(key), hints)}")
                _reject_unknown(inner, hints[key], f"{where}.{key}" if where else str(key))
        elif typing.get_origin(option) is tuple and isinstance(value, list):
            for number, inner in enumerate(value):
                _reject_unknown(inner, typing.get_args(option)[0], f"{where}[{number}]")
        elif typing.get_origin(option) is dict and isinstance(value, dict):
            for key, inner in value.items():
                _reject_unknown(inner, typing.get_args(option)[1], f"{where}.{key}" if where else str(key))


def _options(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the kind itself."""
    if typing.get_origin(kind) in (tuple, dict) or not typing.get_args(kind):
        return (kind,)
    return typing.get_args(kind)
