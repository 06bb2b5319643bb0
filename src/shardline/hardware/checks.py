"""What a machine's facts mean: checks in lines, each with a verdict, the facts, the reason and the fix.

    machine = probe(with_torch=True, with_devices=True)
    checks = examine(machine)
    console.print(checks_text(checks))

The rules are data (`shardline.hardware.rules`); here they are asked, and their answers put in order and shown.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardline.hardware.conditions import holds
from shardline.hardware.facts import framework_facts, gpu_facts, machine_facts
from shardline.hardware.lines import LINES
from shardline.hardware.machine import Machine
from shardline.hardware.rules import Rule, Verdict, rules

if TYPE_CHECKING:
    from rich.text import Text

    from shardline.hardware.health import Health

__all__ = ["Check", "Verdict", "checks_text", "examine", "to_json", "verdict_of"]

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_GPUS = "\0"  # stands for the GPUs of a sentence until those with the same sentence are known


@dataclass(frozen=True, kw_only=True)
class Check:
    """One statement. `rule` is stable, for scripts; `source` says where it is known from."""

    name: str
    verdict: Verdict
    facts: str
    reason: str = ""  # why it is not ok
    fix: str = ""  # what to do about it
    rule: str = ""
    source: str = ""


def examine(machine: Machine, *, health: Sequence[Health] = ()) -> tuple[Check, ...]:
    """Returns the checks in the order of the lines: one for a line that is ok, else one for each of its faults."""
    facts = machine_facts(machine)
    subjects: dict[str | None, list[dict[str, Any]]] = {
        None: [{}],
        "gpu": gpu_facts(machine, facts),
        "framework": framework_facts(machine),
        "package": [each.facts() for each in health],
    }
    found: dict[str, list[Check]] = {}
    told: set[str] = set()
    for rule in rules():
        if rule.group in told:
            continue
        guilty = [{**facts, **own} for own in subjects[rule.each] if holds(rule.when, {**facts, **own})]
        if guilty and rule.group is not None:
            told.add(rule.group)
        for reason, fix in _statements(rule, guilty, num_gpus=facts["num_gpus"]):
            check = Check(
                name=rule.line,
                verdict=rule.verdict,
                facts="",
                reason=reason,
                fix=fix,
                rule=rule.id,
                source=f"{rule.source} ({rule.date})",
            )
            found.setdefault(rule.line, []).append(check)
    described = [(name, describe(machine, facts)) for name, describe in LINES]
    described.append(("health", _health_line(health)))
    return tuple(
        check for name, text in described for check in _line(name, text, found.get(name, [])) if check is not None
    )


def verdict_of(checks: Iterable[Check]) -> Verdict:
    """Returns the worst verdict among `checks`."""
    verdicts = {check.verdict for check in checks}
    return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"


def checks_text(checks: Sequence[Check], *, width: int | None = None) -> Text:
    """Returns the checks, coloured, for a `rich` console: one line each, or wrapped under itself at `width` columns."""
    from rich.text import Text

    margin = 6 + max((len(check.name) for check in checks), default=0) + 2
    lines = []
    previous = ""
    for check in checks:
        text = Text.assemble((check.verdict.ljust(6), _COLOURS[check.verdict]), (check.name.ljust(margin - 6), "bold"))
        facts = check.facts if check.name != previous else ""  # which are the same for all faults of a line
        previous = check.name
        if width is None or width < margin + 24:
            told = f"{check.reason}. {check.fix}".rstrip() if check.reason else ""
            text.append(": ".join(words for words in (facts, told) if words))
        else:
            rows = [*_wrap(facts, width - margin, "dim" if check.reason else "")]
            if check.reason:
                rows += _wrap(f"{check.reason}.", width - margin, _COLOURS[check.verdict])
            if check.fix:
                rows += _wrap(f"-> {check.fix}", width - margin, "cyan", indent="   ")
            for number, (row, style) in enumerate(rows):
                text.append(f"\n{' ' * margin}" if number else "").append(row, style)
        lines.append(text)
    return Text("\n").join(lines)


def to_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Returns the checks as JSON values, in order."""
    keys = ("name", "verdict", "facts", "reason", "fix", "rule", "source")
    return [{key: getattr(check, key) for key in keys} for check in checks]


def _wrap(text: str, width: int, style: str, *, indent: str = "") -> list[tuple[str, str]]:
    """Returns (row, style) of each row. Commands and paths stay whole, so that they can be copied."""
    rows = textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [(row, style) for row in rows]


def _statements(rule: Rule, guilty: Sequence[Mapping[str, Any]], *, num_gpus: int) -> list[tuple[str, str]]:
    """Returns (reason, fix) of each subject, those of equal GPUs in one."""
    groups: dict[tuple[str, str], list[int]] = {}
    for facts in guilty:
        named = {**facts, "gpus": _GPUS}
        words = rule.sentence.format_map(named).rstrip("."), rule.fix.format_map(named)  # others' words end in one
        groups.setdefault(words, []).append(facts.get("gpu", 0))
    return [
        (reason.replace(_GPUS, _gpus(numbers, num_gpus)), fix.replace(_GPUS, _gpus(numbers, num_gpus)))
        for (reason, fix), numbers in groups.items()
    ]


def _gpus(numbers: Sequence[int], of: int) -> str:
    if len(numbers) == of and of > 1:
        return f"each of the {of} GPUs"
    return f"GPU{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _line(name: str, text: str, faults: Sequence[Check]) -> list[Check | None]:
    if not faults:
        return [Check(name=name, verdict="ok", facts=text) if text else None]
    worst_first = sorted(faults, key=lambda check: check.verdict != "fail")
    return [dataclasses.replace(each, facts=text) for each in worst_first]


def _health_line(health: Sequence[Health]) -> str:
    """Names of each verdict; empty where no package was asked about."""
    parts = []
    for verdict in ("active", "slow", "unmaintained"):
        of_it = [each for each in health if each.verdict == verdict]
        names = [f"{each.package} ({each.age})" if each.age else each.package for each in of_it]
        if names:
            parts.append(f"{verdict}: {', '.join(names)}")
    sources = {each.checked for each in health if each.checked}
    return "; ".join(parts) + (f"; {', '.join(sorted(sources))}" if sources else "")
