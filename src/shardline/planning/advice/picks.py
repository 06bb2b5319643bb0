"""Which choice is taken: the first that runs at a place and is looked after, or one that was measured to be faster.

found = pick(goal.serve, health, Place(platform="cuda", capability="9.0"))
found.chosen, found.because, found.passed_over
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardline.hardware.conditions import version_key
from shardline.hardware.health import Health
from shardline.hardware.tables import Platform, tables, wheel_for_capability
from shardline.planning.advice.book import Choice

__all__ = ["PLATFORMS", "Picked", "Place", "not_there", "pick"]

PLATFORMS = {"cuda": "NVIDIA GPUs", "rocm": "AMD GPUs", "tpu": "TPUs", "mps": "Apple GPUs", "cpu": "CPUs"}
FASTER = 1.1  # from here on a measured difference is one


@dataclass(frozen=True, kw_only=True)
class Picked:
    """What is taken (None: nothing is left), what else would do, and what was passed over, each with its reason.

    `because` says why it is not the goal's first choice; empty where it is.
    """

    chosen: Choice | None
    because: str
    others: tuple[Choice, ...]
    passed_over: tuple[tuple[Choice, str], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where things are to run; without a platform nothing is asked of it."""

    platform: str | None = None
    capability: str = ""


def pick(
    choices: tuple[Choice, ...],
    health: Mapping[str, Health],
    place: Place,
    *,
    measured: Mapping[str, float] | None = None,
    speed_decides: bool = False,
) -> Picked:
    good: list[Choice] = []
    slow: list[Choice] = []
    against: dict[str, str] = {}
    for each in choices:
        state = health.get(each.health_name)
        why_not = not_there(each, place)
        if why_not:
            against[each.name] = why_not
        elif state is not None and state.verdict == "unmaintained":
            against[each.name] = f"{each.health_name} is unmaintained: {state.reason}"
        elif state is not None and state.verdict == "slow" and not each.slow_ok:
            against[each.name] = f"{each.health_name} is slow: {state.reason}"
            slow.append(each)
        else:
            good.append(each)
    left = good or slow[:1]
    if not good and slow:
        del against[slow[0].name]
    because = ""
    if left and left[0] != choices[0]:
        because = f"{choices[0].name} comes first for this goal, but {against[choices[0].name]}"
    if speed_decides and measured and (faster := _fastest(left, measured)) is not None:
        because = faster[1]
        left = [faster[0], *(each for each in left if each != faster[0])]
    notes = [note for each in left for note in _notes(each, health.get(each.health_name), place)]
    if not good and slow:
        notes.append(f"{slow[0].name}: nothing is left that is looked after better")
    return Picked(
        chosen=left[0] if left else None,
        because=because,
        others=tuple(left[1:]),
        passed_over=tuple((each, against[each.name]) for each in choices if each.name in against),
        notes=tuple(notes),
    )


def not_there(choice: Choice, place: Place) -> str:
    """Returns why a choice does not run at a place; empty where it does, or where nothing is known against it."""
    if place.platform is None:
        return ""
    where = PLATFORMS[place.platform]
    row = _row(choice.framework, place.platform)
    if row is not None and row.support == "no":
        return f"does not run on {where}" + (f" ({row.note})" if row.note else "")
    if choice.platforms and place.platform not in choice.platforms:
        return f"does not run on {where}"
    oldest = choice.min_capability if place.platform == "cuda" and place.capability else ""
    if oldest and version_key(place.capability) < version_key(oldest):
        return f"needs compute capability {oldest}, and this is {place.capability}"
    return ""


def _notes(choice: Choice, state: Health | None, place: Place) -> Iterable[str]:
    if state is not None and state.verdict == "slow":
        fine = f"; {choice.slow_ok}" if choice.slow_ok else ""
        yield f"{choice.name}: {choice.health_name} is slow: {state.reason}{fine}"
    if state is not None and state.verdict == "unknown":
        yield f"{choice.name}: nothing is known of the health of {choice.health_name}"
    if place.platform is None:
        return
    row = _row(choice.framework, place.platform)
    if row is not None and row.support == "partly":
        where = PLATFORMS[place.platform]
        yield f"{choice.name}: {row.framework} runs partly on {where}: {row.note or 'see its pages'}"
    if place.platform == "cuda" and choice.framework == "torch" and place.capability:
        wheel = wheel_for_capability(place.capability)
        newest = max(version_key(each.torch) for each in tables().torch_wheels.rows)
        if wheel is not None and version_key(wheel[0]) < newest:
            yield (
                f"{choice.name}: PyTorch's newest wheel with code for compute capability {place.capability} is "
                f"{wheel[0]}, for CUDA {wheel[1]}"
            )


def _fastest(left: Sequence[Choice], measured: Mapping[str, float]) -> tuple[Choice, str] | None:
    """Returns (choice, why) of one that is faster by more than chance than the first, by the user's measurements."""
    if not left or left[0].framework not in measured:
        return None
    first = left[0]
    best = max((each for each in left if each.framework in measured), key=lambda each: measured[each.framework])
    ratio = measured[best.framework] / measured[first.framework]
    if ratio < FASTER:
        return None
    return (
        best,
        f"you measured {best.framework} at {ratio:.2f} times {first.framework}'s speed, and speed is money here",
    )


def _row(framework: str, platform: str) -> Platform | None:
    """Returns the hardware matrix's row; None where it has none."""
    rows = tables().platforms.rows
    return next((row for row in rows if (row.framework, row.platform) == (framework, platform)), None)
