"""What is known of each goal: advice.yaml and rule.yaml, read strictly.

book().goals["throughput"].serve[0].name       # "vLLM"
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from shardline.hardware.strict import convert_strictly

__all__ = ["Avoided", "Book", "Caution", "Choice", "Goal", "Part", "Reason", "Release", "Rule", "book"]


@dataclass(frozen=True, kw_only=True)
class Reason:
    """`date` is the source's own, or the day on which it was read."""

    text: str
    source: str
    date: datetime.date


@dataclass(frozen=True, kw_only=True)
class Release:
    """The last release that was seen of what is not on Python's package index."""

    registry: str
    name: str
    version: str
    date: datetime.date


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A framework to train with or a runtime to serve with. The fields are explained at the top of advice.yaml."""

    name: str
    framework: str
    why: tuple[Reason, ...]
    package: str = ""
    platforms: tuple[str, ...] = ()
    min_capability: str = ""
    slow_ok: str = ""
    release: Release | None = None
    run: tuple[str, ...] = ()

    @property
    def health_name(self) -> str:
        """Under which its health is known."""
        return self.package or (self.release.name if self.release is not None else "")


@dataclass(frozen=True, kw_only=True)
class Avoided:
    name: str
    why: str
    source: str
    date: datetime.date


@dataclass(frozen=True, kw_only=True)
class Part:
    """Whether Shardline is the answer ("yes", "partly", "no"), and what it does."""

    answer: str
    part: str
    commands: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Goal:
    question: str
    platforms: tuple[str, ...]
    devices: str
    train: tuple[Choice, ...]
    serve: tuple[Choice, ...]
    avoid: tuple[Avoided, ...]
    turns: tuple[str, ...]
    shardline: Part
    serve_on: str = ""
    speed_decides: bool = False


@dataclass(frozen=True, kw_only=True)
class Rule:
    """About writing a framework of one's own."""

    statement: str
    reasons: tuple[Reason, ...]
    unless: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Caution:
    """What is said for `goals` on a platform, whatever is chosen."""

    platform: str
    goals: tuple[str, ...]
    text: str
    source: str
    date: datetime.date


@dataclass(frozen=True, kw_only=True)
class Book:
    checked_on: datetime.date
    rule: Rule
    cautions: tuple[Caution, ...]
    goals: dict[str, Goal]


@cache
def book() -> Book:
    values = {**_load("advice.yaml"), **_load("rule.yaml")}
    _set_dates(values, values["checked_on"])
    return convert_strictly(values, Book)


def _load(name: str) -> dict[str, Any]:
    text = resources.files("shardline.planning.advice").joinpath(name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _set_dates(values: Any, checked_on: datetime.date) -> None:
    """Gives what names a source without a date the day on which it was read."""
    if isinstance(values, dict):
        if "source" in values:
            values.setdefault("date", checked_on)
        for each in values.values():
            _set_dates(each, checked_on)
    elif isinstance(values, list):
        for each in values:
            _set_dates(each, checked_on)
