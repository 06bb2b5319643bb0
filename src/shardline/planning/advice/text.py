"""Advice in words and as JSON.

for line in advice_lines(advice, width=console.width): console.print(line)
"""

from __future__ import annotations

import dataclasses
import datetime
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shardline.planning.advice.measured import speeds
from shardline.planning.advice.picks import PLATFORMS

if TYPE_CHECKING:
    from rich.text import Text

    from shardline.planning.advice.advice import Advice, Here
    from shardline.planning.advice.book import Choice, Reason
    from shardline.planning.advice.picks import Picked

__all__ = ["advice_lines", "advice_to_json"]

_ANSWERS = {
    "yes": "Shardline is the answer here: ",
    "partly": "Shardline is a part of the answer: ",
    "no": "Shardline is not the answer here: ",
}


def advice_lines(advice: Advice, *, width: int | None = None) -> Iterator[Text]:
    """Yields the advice as lines for a `rich` console, folded to `width` columns; commands are never folded."""
    from rich.text import Text

    for words, style, margin in _lines(advice):
        rows = [words]
        if width is not None and style != "cyan":
            rows = textwrap.wrap(
                words,
                max(width, 40),
                initial_indent=" " * margin,
                subsequent_indent=" " * (margin + 2),
                break_long_words=False,
                break_on_hyphens=False,
            )
        else:
            rows = [" " * margin + words]
        for row in rows:
            yield Text(row, style=style)


def _lines(advice: Advice) -> Iterator[tuple[str, str, int]]:
    """Yields (words, style, margin)."""
    yield f"{advice.goal}: {advice.question}", "bold", 0
    if advice.conflict:
        yield f"But {advice.conflict}. What follows is for the goal.", "bold yellow", 0
    for each in advice.cautions:
        yield f"{each.text} [{each.source}].", "yellow", 0
    yield from _side("Train with", advice.train, advice.checked_on)
    yield from _side("Serve with", advice.serve, advice.checked_on)
    if advice.measured:
        yield f"You measured {_speeds(advice)}.", "", 0
    if advice.here is not None:
        yield from _on_the_device(advice.here)
    yield f"{_ANSWERS[advice.shardline.answer]}{advice.shardline.part}.", "bold", 0
    for command in advice.shardline.commands:
        yield command, "cyan", 2
    for each in advice.avoid:
        yield f"Avoid {each.name}: {each.why} [{each.source}].", "", 0
    for turn in advice.turns:
        yield f"This turns {turn}.", "", 0
    yield from ((words, "dim", 0) for words in _health(advice))
    rule = advice.rule
    yield f"{rule.statement}, unless {'; or '.join(rule.unless)}:", "bold", 0
    yield from _reasons(rule.reasons, advice.checked_on)
    yield f"Sources without a date were read on {advice.checked_on}.", "dim", 0


def _side(verb: str, picked: Picked, checked_on: datetime.date) -> Iterator[tuple[str, str, int]]:
    if picked.chosen is None:
        yield f"{verb} nothing of what is known: all of it was passed over.", "bold", 0
    else:
        yield f"{verb} {picked.chosen.name}", "bold green", 0
        if picked.because:
            yield f"{picked.because}.", "yellow", 2
        yield from _reasons(picked.chosen.why, checked_on)
        for command in picked.chosen.run:
            yield command, "cyan", 4
    for each in picked.others:
        yield f"or {each.name}: {each.why[0].text}.", "", 2
    for each, why in picked.passed_over:
        if picked.because.startswith(f"{each.name} comes first"):
            continue  # said already
        yield f"not {each.name}: {why}.", "red", 2
    for note in picked.notes:
        yield f"mind {note}.", "yellow", 2


def _reasons(reasons: Sequence[Reason], checked_on: datetime.date) -> Iterator[tuple[str, str, int]]:
    for each in reasons:
        date = "" if each.date == checked_on else f", {each.date}"
        yield f"- {each.text} [{each.source}{date}]", "", 2


def _on_the_device(here: Here) -> Iterator[tuple[str, str, int]]:
    chosen = {
        "train with": here.train.chosen,
        "serve with": here.serve.chosen,
    }
    words = ", ".join(f"{verb} {'nothing of it' if one is None else one.name}" for verb, one in chosen.items())
    yield f"On {here.device}, of all this: {words}.", "bold yellow", 0
    rows = "; ".join(f"{row.framework}: {row.support}{f' ({row.note})' if row.note else ''}" for row in here.rows)
    if rows:
        yield f"{PLATFORMS[here.platform]} run {rows}.", "", 2
    yield f"Goals for it: {', '.join(here.goals)}.", "", 2


def _speeds(advice: Advice) -> str:
    found = speeds(advice.measured)
    unit = "tokens/s" if all(each.tokens_per_s is not None for each in advice.measured) else "steps/s"
    best = max(found.values())
    return ", ".join(f"{name} at {speed:,.4g} {unit} ({speed / best:.0%})" for name, speed in found.items())


def _health(advice: Advice) -> Iterator[str]:
    """Yields what is active; what is not stands beside the choice that it speaks against."""
    active = [f"{each.package} ({each.age})" for each in advice.health if each.verdict == "active"]
    told = sorted({each.checked for each in advice.health if each.checked})
    if active:
        yield f"Released within half a year: {', '.join(active)}; {', '.join(told)}."


def advice_to_json(advice: Advice) -> dict[str, Any]:
    here = advice.here
    return {
        "goal": advice.goal,
        "question": advice.question,
        "platform": advice.platform,
        "conflict": advice.conflict or None,
        "here": None
        if here is None
        else {
            "device": here.device,
            "platform": here.platform,
            "train": _picked(here.train),
            "serve": _picked(here.serve),
            "matrix": [dataclasses.asdict(row) for row in here.rows],
            "goals": list(here.goals),
        },
        "train": _picked(advice.train),
        "serve": _picked(advice.serve),
        "cautions": [_plain(each) for each in advice.cautions],
        "avoid": [_plain(each) for each in advice.avoid],
        "turns": list(advice.turns),
        "shardline": dataclasses.asdict(advice.shardline),
        "measured": [dataclasses.asdict(each) for each in advice.measured],
        "rule": _plain(advice.rule),
        "health": [dataclasses.asdict(each) for each in advice.health],
        "checked_on": advice.checked_on.isoformat(),
    }


def _picked(picked: Picked) -> dict[str, Any]:
    def of(choice: Choice) -> dict[str, Any]:
        return _plain(choice)

    return {
        "chosen": None if picked.chosen is None else of(picked.chosen),
        "because": picked.because or None,
        "others": [of(each) for each in picked.others],
        "passed_over": [{**of(each), "reason": why} for each, why in picked.passed_over],
        "notes": list(picked.notes),
    }


def _plain(value: Any) -> Any:
    """Returns a dataclass as JSON values: tuples as lists, dates as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value.isoformat() if isinstance(value, datetime.date) else value
