"""Reads the YAML config strictly: a key that is not known is an error with file, line and the nearest key.

    config = load_config("run.yaml", ["--parallel.zero", "2", "--train.steps=20"])

Precedence: defaults, then the file, then the overrides. `msgspec` checks the types; this module adds
where in the file a wrong value stands.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from shardline.config.errors import UsageError, nearest
from shardline.config.schema import RunConfig, validate

__all__ = ["dump_config", "iter_fields", "json_schema", "load_config", "parse_overrides"]

Origin = dict[tuple[str, ...], str]


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the resolved config of the YAML file at `path` (None: the defaults) with `overrides` applied.

    `overrides` are command-line words: `--section.field VALUE` or `--section.field=VALUE`.
    Raises `UsageError` for anything that can't be used, naming where it stands.
    """
    values: dict[str, Any] = {}
    origin: Origin = {}
    if path is not None:
        values = _read_yaml(Path(path), origin)
    for keys, value in parse_overrides(overrides):
        _put(values, keys, value, origin)
    _reject_unknown_keys(values, RunConfig, origin)
    try:
        config = _complete(msgspec.convert(values, RunConfig, strict=False))
    except msgspec.ValidationError as error:
        raise UsageError(_locate(str(error), values, origin)) from None
    validate(config)
    return config


def _complete(config: RunConfig) -> RunConfig:
    """msgspec leaves fields that were not given to the class, and would then not write them: set them all."""
    return _completed(config)


def _completed(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_completed(each) for each in value)
    if not dataclasses.is_dataclass(value):
        return value
    return type(value)(**{field.name: _completed(getattr(value, field.name)) for field in dataclasses.fields(value)})


def parse_overrides(words: Sequence[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields (key path, value) for each `--a.b VALUE` or `--a.b=VALUE`; the value is read as YAML."""
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--"):
            raise UsageError(f"Unexpected argument {word!r}; overrides look like --section.field VALUE.")
        name, equals, text = word[2:].partition("=")
        if not equals:
            if not remaining:
                raise UsageError(f"--{name} needs a value, such as --{name} 1.")
            text = remaining.pop(0)
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        yield tuple(name.replace("-", "_").split(".")), value


def dump_config(config: RunConfig) -> str:
    """Returns the config as YAML that `load_config` reads back to an equal config."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


def iter_fields(section: type = RunConfig, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Yields (dotted name, field) for every leaf of the config, in order; a list's elements as `list[].field`."""
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(field.default_factory):
            yield from iter_fields(field.default_factory, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{field.name}", field
            if "element" in field.metadata:
                yield from iter_fields(field.metadata["element"], f"{prefix}{field.name}[].")


def json_schema() -> dict[str, Any]:
    """Returns a JSON schema of the config file, for editors: unknown keys are errors there too."""
    schema = msgspec.json.schema(RunConfig)
    _describe(schema["$defs"], RunConfig)
    for body in schema["$defs"].values():
        body["additionalProperties"] = False
    return json.loads(json.dumps(schema))


def _describe(definitions: dict[str, Any], section: type) -> None:
    for field in dataclasses.fields(section):
        inner = field.metadata.get("element", field.default_factory)
        if dataclasses.is_dataclass(inner):
            _describe(definitions, inner)  # type: ignore[arg-type]
        if not dataclasses.is_dataclass(field.default_factory):
            definitions[section.__name__]["properties"][field.name]["description"] = field.metadata["doc"]


def _read_yaml(path: Path, origin: Origin) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"Can't read the config {path}: {reason}. Pass the path of a YAML file.") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _record_lines(node, (), path, origin)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{path}:{line}: this is not valid YAML: {error.problem}.") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: this is not valid YAML: {error}.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"{path}:1: expected a mapping with keys such as `model:`, got {type(values).__name__}.")
    return values


def _record_lines(node: yaml.Node | None, keys: tuple[str, ...], path: Path, origin: Origin) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, each in enumerate(node.value):
            origin[(*keys, str(index))] = f"{path}:{each.start_mark.line + 1}"
            _record_lines(each, (*keys, str(index)), path, origin)
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        here = (*keys, str(key_node.value))
        line = key_node.start_mark.line + 1
        if here in origin:
            raise UsageError(f"{path}:{line}: {'.'.join(here)} is set twice (first at {origin[here]}); keep one.")
        origin[here] = f"{path}:{line}"
        _record_lines(value_node, here, path, origin)


def _put(values: dict[str, Any], keys: tuple[str, ...], value: Any, origin: Origin) -> None:
    for depth, key in enumerate(keys[:-1], start=1):
        origin.setdefault(keys[:depth], "command line")
        if values.get(key) is None:
            values[key] = {}
        values = values[key]
        if not isinstance(values, dict):
            raise UsageError(f"--{'.'.join(keys)}: {'.'.join(keys[:depth])} is a value, not a section.")
    origin[keys] = "command line"
    values[keys[-1]] = value


def _where(keys: tuple[str, ...], origin: Origin) -> str:
    """Where a key stands, or else the nearest one around it."""
    return next((origin[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in origin), "config")


def _reject_unknown_keys(values: dict[str, Any], section: type, origin: Origin, keys: tuple[str, ...] = ()) -> None:
    fields = {field.name: field for field in dataclasses.fields(section)}
    for key in list(values):
        here = (*keys, str(key))
        where = _where(here, origin)
        if key not in fields:
            name, close = ".".join(here), nearest(str(key), fields)
            raise UsageError(f"{where}: unknown key {name!r}{_elsewhere(str(key), close)}")
        element = fields[key].metadata.get("element")
        if element is not None and isinstance(values[key], list):
            for index, each in enumerate(values[key]):
                _reject_unknown_section(each, element, origin, (*here, str(index)))
        nested = fields[key].default_factory
        if not dataclasses.is_dataclass(nested):
            continue
        if values[key] is None:  # `train:` with nothing below it means the section's defaults
            values[key] = {}
        _reject_unknown_section(values[key], nested, origin, here)  # type: ignore[arg-type]


def _reject_unknown_section(values: Any, section: type, origin: Origin, keys: tuple[str, ...]) -> None:
    if not isinstance(values, dict):
        raise UsageError(f"{_where(keys, origin)}: {'.'.join(keys)} is a section; write its keys below it, one a line.")
    _reject_unknown_keys(values, section, origin, keys)


def _elsewhere(key: str, close: str) -> str:
    """A key that exists in another section is the likeliest meaning: `steps` is `train.steps`."""
    matches = [name for name, _ in iter_fields() if name.rpartition(".")[2] == key]
    return f"; did you mean {matches[0]!r}?" if matches else close


def _locate(message: str, values: dict[str, Any], origin: Origin) -> str:
    text, _, path = message.partition(" - at `$")
    keys = tuple(key or index for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path))
    where = _where(keys, origin)
    value: Any = values
    for key in keys:
        if isinstance(value, list):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, dict) else None
    name = ".".join(keys)
    choices = _choices(name)
    expected = f"expected one of {choices}" if choices else f"{text[:1].lower()}{text[1:]}"
    return f"{where}: {name} = {value!r}: {expected}."


def _choices(name: str) -> str:
    """The allowed words of a `Literal` field, as a user would write them."""
    field = dict(iter_fields()).get(name)
    if field is None:
        return ""
    annotation = typing.get_type_hints(RunConfig if "." not in name else _section_of(name))[field.name]
    if typing.get_origin(annotation) is not typing.Literal:
        return ""
    return ", ".join(str(choice) for choice in typing.get_args(annotation))


def _section_of(name: str) -> type:
    section: type = RunConfig
    for key in name.split(".")[:-1]:
        section = typing.get_type_hints(section)[key]
    return section
