"""What a family is: a model_type, a function each way for config.json, and a table of tensor names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardline.config import UsageError
from shardline.models.config import DecoderConfig

__all__ = ["Family", "TensorRule", "take"]


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """One tensor, or one a layer where the names hold `{layer}`: ours, and the family's own name for it."""

    ours: str
    theirs: str


@dataclass(frozen=True, kw_only=True)
class Family:
    model_type: str
    read: Callable[[dict[str, Any]], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    rules: Callable[[DecoderConfig], tuple[TensorRule, ...]]

    def tensor_names(self, config: DecoderConfig) -> Iterator[tuple[str, str]]:
        """Yields (our name, their name) of every tensor that a folder of this config holds, in the file's order."""
        for rule in self.rules(config):
            if "{layer}" not in rule.ours:
                yield rule.ours, rule.theirs
                continue
            for layer in range(config.num_layers):
                yield rule.ours.format(layer=layer), rule.theirs.format(layer=layer)


def take(raw: dict[str, Any], key: str) -> Any:
    """Returns a key that the architecture can't do without."""
    if raw.get(key) is None:
        raise UsageError(f"config.json has no {key!r}, which the model_type {raw.get('model_type')!r} needs.")
    return raw[key]
