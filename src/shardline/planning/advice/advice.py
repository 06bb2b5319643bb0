"""What to train and to serve with for a goal, from data: choices in order, packages' health, what runs on a platform.

    names = packages_of("throughput")
    found = advise("throughput", health=find_health(names), device=device("h100"))
    found.train.chosen, found.serve.chosen, found.serve.because, found.serve.passed_over

A choice is passed over, with the reason, where the hardware matrix or its own row says that it does not run on the
platform, or where its package is unmaintained or slow; then the next one is taken. A slow one is taken all the same
where the data say why that does not matter there, or where nothing else is left; an unmaintained one never.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardline.config.errors import UsageError, nearest
from shardline.hardware.health import Health, Known, judge
from shardline.hardware.tables import Platform, tables
from shardline.planning.advice.book import Avoided, Caution, Choice, Goal, Part, Rule, book
from shardline.planning.advice.measured import Measured, speeds
from shardline.planning.advice.picks import PLATFORMS, Picked, Place, not_there, pick

if TYPE_CHECKING:
    from shardline.hardware.catalogue import Device

__all__ = ["Advice", "Here", "advise", "goal_names", "goal_question", "packages_of"]


@dataclass(frozen=True, kw_only=True)
class Here:
    """What a device that contradicts the goal does of it, the matrix's rows on it, and the goals that are for it."""

    device: str
    platform: str
    train: Picked
    serve: Picked
    rows: tuple[Platform, ...]
    goals: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The answer for one goal; `conflict` says where the device contradicts it, `here` what that device does."""

    goal: str
    question: str
    platform: str | None
    conflict: str
    here: Here | None
    train: Picked
    serve: Picked
    cautions: tuple[Caution, ...]
    avoid: tuple[Avoided, ...]
    turns: tuple[str, ...]
    shardline: Part
    measured: tuple[Measured, ...]
    rule: Rule
    health: tuple[Health, ...]
    checked_on: datetime.date


def goal_names() -> tuple[str, ...]:
    return tuple(book().goals)


def goal_question(goal: str) -> str:
    return _goal(goal).question


def packages_of(goal: str) -> tuple[str, ...]:
    """Returns the packages that advice on a goal speaks of, to look their health up in one call."""
    found = _goal(goal)
    return tuple(dict.fromkeys(each.package for each in (*found.train, *found.serve) if each.package))


def advise(
    goal: str, *, health: Iterable[Health], device: Device | None = None, measured: Sequence[Measured] = ()
) -> Advice:
    """Returns the advice; `health` is of the packages that `packages_of` names, those that are missing count as fine.

    `measured` are the user's own measurements of training. Raises `UsageError` for a goal that is not known.
    """
    found = _goal(goal)
    states = _recorded(found) | {each.package: each for each in health}
    place = Place() if device is None else Place(platform=device.kind, capability=device.capability)
    conflict = device is not None and device.kind not in found.platforms
    alone = found.platforms[0] if len(found.platforms) == 1 else None
    # Where goal and device contradict each other, the goal is answered, and beside it what the device does.
    goal_place = Place(platform=alone) if conflict or device is None else place
    train, serve = _sides(found, states, goal_place, measured)
    return Advice(
        goal=goal,
        question=found.question,
        platform=place.platform,
        conflict=_conflict(goal, found, device) if device is not None and conflict else "",
        here=_here(found, device, states, place, measured) if device is not None and conflict else None,
        train=_with_devices(train, found, None if conflict else device),
        serve=_with_devices(serve, found, None if conflict else device),
        cautions=tuple(each for each in book().cautions if each.platform == place.platform and goal in each.goals),
        avoid=found.avoid,
        turns=found.turns,
        shardline=_part(found, None if conflict else device, goal_place, train, serve),
        measured=tuple(measured),
        rule=book().rule,
        health=tuple(
            states[name]
            for name in dict.fromkeys(each.health_name for each in (*found.train, *found.serve))
            if name in states
        ),
        checked_on=book().checked_on,
    )


def _sides(
    goal: Goal, health: Mapping[str, Health], place: Place, measured: Sequence[Measured]
) -> tuple[Picked, Picked]:
    train = pick(goal.train, health, place, measured=speeds(measured), speed_decides=goal.speed_decides)
    return train, pick(goal.serve, health, Place() if goal.serve_on else place)


def _here(goal: Goal, device: Device, health: Mapping[str, Health], place: Place, measured: Sequence[Measured]) -> Here:
    train, serve = _sides(goal, health, place, measured)
    frameworks = {each.framework for each in (*goal.train, *goal.serve)}
    return Here(
        device=device.name,
        platform=device.kind,
        train=_with_devices(train, goal, device),
        serve=_with_devices(serve, goal, device),
        rows=tuple(
            row for row in tables().platforms.rows if row.platform == device.kind and row.framework in frameworks
        ),
        goals=tuple(name for name, each in book().goals.items() if device.kind in each.platforms and not each.serve_on),
    )


def _conflict(name: str, goal: Goal, device: Device) -> str:
    wanted = ", ".join(PLATFORMS[each] for each in goal.platforms)
    return f"{device.name} is of {PLATFORMS[device.kind]}, and the goal {name} is for {wanted}"


def _part(goal: Goal, device: Device | None, place: Place, train: Picked, serve: Picked) -> Part:
    """Returns Shardline's part, which is none but the plan where it runs on neither side."""
    ours = {each.name for each in (*goal.train, *goal.serve) if "Shardline" in each.name}
    absent = {each.name for each in (*goal.train, *goal.serve) if each.name in ours and not_there(each, place)}
    part = goal.shardline
    if ours and ours == absent and place.platform is not None:
        part = Part(
            answer="no",
            part=f"it does not run on {PLATFORMS[place.platform]}, and only plans for what is in its catalogue",
            commands=("shardline plan MODEL --devices {devices}",),
        )
    return dataclasses.replace(part, commands=_filled(part.commands, goal, device))


def _with_devices(picked: Picked, goal: Goal, device: Device | None) -> Picked:
    def filled(choice: Choice) -> Choice:
        return dataclasses.replace(choice, run=_filled(choice.run, goal, device))

    return dataclasses.replace(
        picked,
        chosen=None if picked.chosen is None else filled(picked.chosen),
        others=tuple(filled(each) for each in picked.others),
        passed_over=tuple((filled(each), why) for each, why in picked.passed_over),
    )


def _filled(commands: tuple[str, ...], goal: Goal, device: Device | None) -> tuple[str, ...]:
    from shardline.hardware.catalogue import device_names

    text = goal.devices
    if device is not None and device.kind == "cpu":
        text = f"cpu:{device.devices_per_node}"
    elif device is not None:
        text = f"{device.devices_per_node}x{device.name}" if device.name in device_names() else "this"
    return tuple(command.replace("{devices}", text) for command in commands)


def _recorded(goal: Goal) -> dict[str, Health]:
    """Returns the health of what is not on Python's package index, from the last release that was seen of it."""
    found = {}
    for each in (*goal.train, *goal.serve):
        if each.release is not None:
            known = Known(package=each.release.name, version=each.release.version, released=each.release.date)
            state = judge(known.package, None, known, today=book().checked_on)
            found[known.package] = dataclasses.replace(
                state, checked=f"{each.release.registry}, seen on {book().checked_on}"
            )
    return found


def _goal(name: str) -> Goal:
    goals = book().goals
    if name not in goals:
        raise UsageError(f"--goal {name!r} is not known{nearest(name, goals)}")
    return goals[name]
