"""Advice in words and as JSON.

for line in advice_lines(advice): print(line)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardline.planning.advice.advice import Advice, Choice, Picked

__all__ = ["advice_lines", "advice_to_json"]

_ANSWERS = {
    "yes": "Shardline is the answer here: it",
    "partly": "Shardline is a part of the answer: it",
    "no": "Shardline is not the answer here: it",
}


def advice_lines(advice: Advice) -> Iterator[str]:
    """Yields the advice, its reasons and what it depends on; sources are in brackets."""
    yield f"{advice.goal}: {advice.question}."
    if advice.conflict:
        yield f"But {advice.conflict}. What follows is for the goal."
    yield from _side("Train with", advice.train)
    yield from _side("Serve with", advice.serve)
    part = advice.shardline
    yield f"{_ANSWERS[part.answer]} {part.part}."
    yield from (f"  {command}" for command in part.commands)
    for each in advice.avoid:
        yield f"Avoid {each.name}: {each.why} [{each.source}]."
    for turn in advice.turns:
        yield f"It turns {turn}."
    for state in advice.health:
        yield f"{state.package}: {state.verdict}; {state.reason} ({state.checked})."
    rule = advice.rule
    yield f"{rule.statement}, unless {', or '.join(rule.unless)}:"
    yield from (f"  {reason.text} [{reason.source}]" for reason in rule.reasons)


def _side(verb: str, picked: Picked) -> Iterator[str]:
    if picked.chosen is None:
        yield f"{verb} nothing of what is known: all of it was passed over."
    else:
        yield f"{verb} {picked.chosen.name}: {picked.chosen.why} [{picked.chosen.source}]."
    for each in picked.others:
        yield f"  or {each.name}: {each.why} [{each.source}]."
    for each, why in picked.passed_over:
        yield f"  not {each.name}: {why}."
    for note in picked.notes:
        yield f"  mind {note}."


def advice_to_json(advice: Advice) -> dict[str, Any]:
    return {
        "goal": advice.goal,
        "question": advice.question,
        "platform": advice.platform,
        "conflict": advice.conflict or None,
        "train": _picked(advice.train),
        "serve": _picked(advice.serve),
        "avoid": [dataclasses.asdict(each) for each in advice.avoid],
        "turns": list(advice.turns),
        "shardline": dataclasses.asdict(advice.shardline),
        "rule": dataclasses.asdict(advice.rule),
        "health": [dataclasses.asdict(each) for each in advice.health],
        "checked_on": advice.checked_on.isoformat(),
    }


def _picked(picked: Picked) -> dict[str, Any]:
    def of(choice: Choice) -> dict[str, Any]:
        return dataclasses.asdict(choice)

    return {
        "chosen": None if picked.chosen is None else of(picked.chosen),
        "others": [of(each) for each in picked.others],
        "passed_over": [{**of(each), "reason": why} for each, why in picked.passed_over],
        "notes": list(picked.notes),
    }
