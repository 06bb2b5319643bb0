"""Config keys on the command line: `--section.field VALUE` anywhere among a verb's own words."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from shardline.config import RunConfig, iter_fields

__all__ = ["describe_overrides", "split_overrides"]


def split_overrides(words: Sequence[str], *, flags: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Returns (the verb's own words, the overrides). A flag with a dot or named after a section is an override, unless
    it is one of the verb's own `flags`.

    A mistyped key such as `--train.stpes` is therefore an override too, so that the loader can name the nearest one.
    """
    sections = {field.name for field in dataclasses.fields(RunConfig)}
    own: list[str] = []
    overrides: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, _ = word.removeprefix("--").partition("=")
        if not word.startswith("--") or word.partition("=")[0] in flags or not ("." in name or name in sections):
            own.append(word)
            continue
        overrides.append(word)
        if not equals and remaining:
            overrides.append(remaining.pop(0))
    return own, overrides


def describe_overrides() -> str:
    """Returns the help text of every config key, with its default."""
    lines = ["config keys (set as --KEY VALUE; see also `shardline config show`):"]
    for name, field in iter_fields():
        if "[]" in name:  # what stands in a list is set with the list
            continue
        lines.append(f"  --{name:<27} {field.metadata['doc']} [{_shown(field.default)}]")
    return "\n".join(lines)


def _shown(value: object) -> str:
    return "null" if value is None else str(list(value) if isinstance(value, tuple) else value)
