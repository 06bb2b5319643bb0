"""What a family is: an entry of families.yaml, whose head describes every field of the classes here.

family = families()["qwen2"]
family.read(raw)        # DecoderConfig, from a config.json
family.write(config)    # the keys of config.json
family.tensors(config)  # the rules of a model's tensors, in the files' order
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from itertools import groupby
from typing import Any, Literal

import msgspec

from shardline.config import ShardlineError, UsageError, nearest
from shardline.models.config import Activation, DecoderConfig
from shardline.models.families.ops import OPS, Op
from shardline.models.families.rest import REST
from shardline.models.families.rope_keys import read_rope, write_rope

__all__ = ["Family", "Key", "Row", "TensorRule", "families", "read_families"]

_Sections = dict[Literal["shared", "families"], dict[str, dict[str, Any]]]
_FIELDS = tuple(field.name for field in dataclasses.fields(DecoderConfig))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorRule:
    """One tensor of a file: its name there, and what it becomes."""

    theirs: str
    ours: tuple[str, ...]
    op: Op


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where config.json says one field of ours."""

    key: str | None = None
    also: str | None = None
    default: Any = msgspec.UNSET
    computed: str | int | None = None
    words: dict[str, Activation] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.key, self.also) if name is not None)

    def read(self, raw: Mapping[str, Any], fields: Mapping[str, Any]) -> Any:
        """Returns the field's value for a config.json; `fields` are those that it may be computed from."""
        value = next((raw[name] for name in self.names if raw.get(name) is not None), None)
        if self.words:
            word = value or next(iter(self.words))
            if word not in self.words:
                family, known = raw.get("model_type"), ", ".join(self.words)
                raise UsageError(f"config.json: {self.key} = {word!r}; the {family} family computes {known}.")
            return self.words[word]
        if value is not None:
            return value
        if self.computed is not None:
            return _evaluate(self.computed, fields)
        if self.default is not msgspec.UNSET:
            return raw.get(self.names[0], self.default)
        names = " or ".join(repr(name) for name in self.names)
        raise UsageError(f"config.json has no {names}, which the model_type {raw.get('model_type')!r} needs.")

    def write(self, config: DecoderConfig, value: Any) -> dict[str, Any]:
        """Returns the key that says `value`; a null that means it stays a null."""
        if self.key is None:
            return {}
        if self.words:
            usual = next(word for word, meaning in self.words.items() if meaning == value)
            return {self.key: config.raw.get(self.key) or usual}
        is_null = config.raw.get(self.key, value) is None
        return {self.key: None if is_null and self.read(config.raw, vars(config)) == value else value}


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A module of the files, and what it is in the decoder."""

    theirs: str
    ours: str | tuple[str, ...] = ()
    op: str = "identity"
    bias: bool | str = False
    when: bool | str = True

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"the op {self.op!r} is not known{nearest(self.op, OPS)}")
        for condition in (self.bias, self.when):
            _evaluate(condition, dict.fromkeys((*_FIELDS, "routes"), 1))


class Family(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One family."""

    model_type: str
    architecture: str
    keys: dict[str, Key]
    fixed: dict[str, Any] = {}
    rope: dict[Literal["theta", "partial"], float] | None = None
    rest: str = "nothing"
    neutral: dict[str, Any] = {}
    understood: tuple[str, ...] = ()
    required: dict[str, Any] = {}
    skipped: tuple[str, ...] = ()
    before: tuple[Row, ...]
    prefix: str
    layer: tuple[Row, ...]
    after: tuple[Row, ...]

    def __post_init__(self) -> None:
        for ours in (*self.keys, *self.fixed):
            if ours not in _FIELDS:
                raise ValueError(f"{ours!r} is not a field of DecoderConfig{nearest(ours, _FIELDS)}")
        for key in self.keys.values():
            _evaluate(key.computed, dict.fromkeys(self.keys, 1))
        if self.rest not in REST:
            raise ValueError(f"{self.rest!r} is not in REST of rest.py{nearest(self.rest, REST)}")

    def read(self, raw: Mapping[str, Any]) -> DecoderConfig:
        """Returns our config; raises `UsageError` for a missing key or one that is not understood."""
        own = {*self.understood, *(name for key in self.keys.values() for name in key.names)}
        for name, value in {**self.neutral, **self.required}.items():
            if name not in own and raw.get(name) is not None and raw[name] != value:
                raise UsageError(
                    f"config.json: {name} = {raw[name]!r} changes what the model computes and is not "
                    f"understood for model_type {self.model_type!r}."
                )
        read_rest, _ = REST[self.rest]
        fields: dict[str, Any] = {}
        # What is computed comes last, from what the file says.
        for ours, key in sorted(self.keys.items(), key=lambda item: item[1].computed is not None):
            fields[ours] = key.read(raw, fields)
        eos = raw.get("eos_token_id")
        fields["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        fields |= self.fixed
        if self.rope is not None:
            fields["rope"] = read_rope(raw, **self.rope)
        return DecoderConfig(family=self.model_type, raw=dict(raw), **(fields | read_rest(raw, fields)))

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        """Returns the keys of config.json that describe our config."""
        _, write_rest = REST[self.rest]
        written: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        for ours, key in self.keys.items():
            written |= key.write(config, getattr(config, ours))
        eos = config.eos_token_ids
        written["eos_token_id"] = list(eos) if len(eos) > 1 else next(iter(eos), None)
        written |= self.required
        if self.rope is not None:
            written |= write_rope(config.rope)
        return written | write_rest(config)

    def tensors(self, config: DecoderConfig) -> Iterator[TensorRule]:
        """Yields the rules of a model's tensors in the files' order."""
        yield from _expand(self.before, config)
        for layer in range(config.num_layers):
            prefixes = (self.prefix.format(layer=layer), f"model.layers.{layer}.")
            yield from _expand(self.layer, config, prefixes=prefixes, routes=config.routes(layer))
        yield from _expand(self.after, config)


@cache
def families() -> dict[str, Family]:
    """Returns all families by their model_type."""
    file = resources.files("shardline.models.families") / "families.yaml"
    return read_families(file.read_text(encoding="utf-8"))


def read_families(text: str) -> dict[str, Family]:
    """Returns the families of a text such as families.yaml; raises `ShardlineError` for what is not known."""
    found: dict[str, Family] = {}
    name = "the file"
    try:
        for name, entry in msgspec.yaml.decode(text, type=_Sections)["families"].items():
            found[name] = msgspec.convert({"model_type": name, **entry}, Family)
    except msgspec.DecodeError as error:
        raise ShardlineError(f"families.yaml (its head says what can be there): {name}: {error}") from None
    return found


def _expand(
    rows: Iterable[Row], config: DecoderConfig, *, prefixes: tuple[str, str] = ("", ""), routes: bool = False
) -> Iterator[TensorRule]:
    fields = {**vars(config), "routes": routes}
    # Rows of experts stand together in the files: all of the first one's, then all of the next one's.
    for of_experts, group in groupby(rows, key=lambda row: "{expert}" in row.theirs):
        there = [row for row in group if _evaluate(row.when, fields)]
        for expert in range(config.num_experts if of_experts else 1):
            for row in there:
                theirs = prefixes[0] + row.theirs.format(expert=expert)
                names = (row.ours,) if isinstance(row.ours, str) else row.ours or (row.theirs,)
                for kind in ("weight", "bias") if _evaluate(row.bias, fields) else ("weight",):
                    ours = tuple(f"{prefixes[1]}{name.format(expert=expert)}.{kind}" for name in names)
                    yield TensorRule(theirs=f"{theirs}.{kind}", ours=ours, op=OPS[row.op])


def _evaluate(expression: str | float | None, fields: Mapping[str, Any]) -> Any:
    """Returns the value of `A`, `not A`, `A * B`, `A ** B` or `A / B` (exact): fields or numbers."""
    if not isinstance(expression, str):
        return expression
    match [_value(word, fields) for word in expression.split()]:
        case [value]:
            return value
        case ["not", value]:
            return not value
        case [left, "*", right]:
            return left * right
        case [left, "**", right]:
            return left**right
        case [left, "/", right]:
            if left % right:
                raise UsageError(f"The model's {expression} = {left} / {right} is not a whole number.")
            return left // right
    raise ValueError(f"{expression!r} is none of A, not A, A * B, A ** B and A / B")


def _value(word: str, fields: Mapping[str, Any]) -> Any:
    if word in fields:
        return fields[word]
    if word in ("not", "*", "**", "/"):
        return word
    if word.replace(".", "").isdecimal():
        return float(word) if "." in word else int(word)
    raise ValueError(f"{word!r} is neither a number nor a field{nearest(word, fields)}")
