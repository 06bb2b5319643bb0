"""What to train and to serve with for a goal, from data: choices in order, packages' health, what runs on a platform.

    found = advise("throughput", device=device("h100"), health=health)
    found.train.chosen, found.serve.chosen, found.serve.passed_over

A choice is passed over, with the reason, where its package is unmaintained or the platform's row in the hardware matrix
says no; then the next one is taken.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import yaml

from shardline.config.errors import UsageError, nearest
from shardline.hardware.health import Health
from shardline.hardware.strict import convert_strictly
from shardline.hardware.tables import Platform, tables

if TYPE_CHECKING:
    from shardline.hardware.catalogue import Device

__all__ = ["Advice", "Choice", "Picked", "Rule", "advise", "goal_names", "goal_question", "packages_of"]

_PLATFORMS = {"cuda": "NVIDIA GPUs", "rocm": "AMD GPUs", "tpu": "TPUs", "mps": "Apple GPUs", "cpu": "CPUs"}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """`package` is its name on the package index, empty where it has none; `framework` its name in the matrix."""

    name: str
    package: str
    framework: str
    why: str
    source: str
    platforms: tuple[str, ...] = ()  # all, where there are none


@dataclass(frozen=True, kw_only=True)
class Avoided:
    name: str
    why: str
    source: str


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
    train: tuple[Choice, ...]
    serve: tuple[Choice, ...]
    avoid: tuple[Avoided, ...]
    turns: tuple[str, ...]
    shardline: Part


@dataclass(frozen=True, kw_only=True)
class Reason:
    text: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    """About writing a framework of one's own."""

    statement: str
    reasons: tuple[Reason, ...]
    unless: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Book:
    """advice.yaml."""

    checked_on: datetime.date
    rule: Rule
    goals: dict[str, Goal]


@dataclass(frozen=True, kw_only=True)
class Picked:
    """What is taken (None: nothing is left), what else would do, and what was passed over, each with its reason."""

    chosen: Choice | None
    others: tuple[Choice, ...]
    passed_over: tuple[tuple[Choice, str], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The answer for one goal; `conflict` says where the device contradicts it."""

    goal: str
    question: str
    platform: str | None
    conflict: str
    train: Picked
    serve: Picked
    avoid: tuple[Avoided, ...]
    turns: tuple[str, ...]
    shardline: Part
    rule: Rule
    health: tuple[Health, ...]
    checked_on: datetime.date


def goal_names() -> tuple[str, ...]:
    return tuple(_book().goals)


def goal_question(goal: str) -> str:
    return _goal(goal).question


def packages_of(goal: str) -> tuple[str, ...]:
    """Returns the packages that advice on a goal speaks of, to look their health up."""
    found = _goal(goal)
    return tuple(dict.fromkeys(each.package for each in (*found.train, *found.serve) if each.package))


def advise(goal: str, *, health: Iterable[Health], device: Device | None = None) -> Advice:
    """Returns the advice; `health` is of the packages that `packages_of` names, those that are missing count as fine.

    Raises `UsageError` for a goal that is not known, with the nearest.
    """
    found = _goal(goal)
    states = {each.package: each for each in health}
    platform = None if device is None else device.kind
    conflict = ""
    if platform is not None and platform not in found.platforms:
        wanted = ", ".join(_PLATFORMS[name] for name in found.platforms)
        assert device is not None
        conflict = f"{device.name} is of {_PLATFORMS[platform]}, and the goal {goal} is for {wanted}"
    # Where goal and device contradict each other, what is asked for is answered, as if there were no device.
    checked = None if conflict else platform
    return Advice(
        goal=goal,
        question=found.question,
        platform=platform,
        conflict=conflict,
        train=_pick(found.train, states, checked),
        serve=_pick(found.serve, states, checked),
        avoid=found.avoid,
        turns=found.turns,
        shardline=found.shardline,
        rule=_book().rule,
        health=tuple(states[name] for name in packages_of(goal) if name in states),
        checked_on=_book().checked_on,
    )


def _pick(choices: tuple[Choice, ...], health: Mapping[str, Health], platform: str | None) -> Picked:
    good: list[Choice] = []
    passed_over: list[tuple[Choice, str]] = []
    notes = []
    for each in choices:
        state = health.get(each.package)
        row = None if platform is None else _support(each.framework, platform)
        if state is not None and state.verdict == "unmaintained":
            passed_over.append((each, f"{each.package} is unmaintained: {state.reason}"))
        elif (row is not None and row.support == "no") or (each.platforms and platform not in (None, *each.platforms)):
            why = f" ({row.note})" if row is not None and row.note else ""
            passed_over.append((each, f"does not run on {_PLATFORMS[platform or '']}{why}"))
        else:
            good.append(each)
            if state is not None and state.verdict == "slow":
                notes.append(f"{each.name}: {each.package} is slow, {state.reason}")
            if row is not None and row.support == "partly":
                notes.append(f"{each.name}: runs partly on {_PLATFORMS[platform or '']}, {row.note or 'see its pages'}")
    return Picked(
        chosen=good[0] if good else None,
        others=tuple(good[1:]),
        passed_over=tuple(passed_over),
        notes=tuple(notes),
    )


def _support(framework: str, platform: str) -> Platform | None:
    """Returns the hardware matrix's row; None where it has none."""
    rows = tables().platforms.rows
    return next((row for row in rows if (row.framework, row.platform) == (framework, platform)), None)


def _goal(name: str) -> Goal:
    goals = _book().goals
    if name not in goals:
        raise UsageError(f"--goal {name!r} is not known{nearest(name, goals)} The goals are {', '.join(goals)}.")
    return goals[name]


@cache
def _book() -> Book:
    text = resources.files("shardline.planning.advice").joinpath("advice.yaml").read_text(encoding="utf-8")
    return convert_strictly(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), Book)
