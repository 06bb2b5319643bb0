"""The doctor's rules, read from rules/*.yaml.

    for rule in rules(): print(rule.id, rule.verdict, rule.source)

A rule says of which line of the report it speaks, when it holds (see `conditions`), what that means and how to mend it.
Of the rules of one `group` only the first that holds is told: the others would follow from it. A rule with `each` is
asked of every GPU, every framework or every package, with facts of their own.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from shardline.hardware.strict import convert_strictly, load_tables

__all__ = ["FILES", "Rule", "Verdict", "rules"]

Verdict = Literal["ok", "warn", "fail"]

FILES = ("host", "nvidia", "others", "packages", "health")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`sentence` and `fix` are templates over the facts; `fix` is a command, or a page."""

    id: str
    line: str
    when: dict[str, dict[str, Any]]
    verdict: Literal["warn", "fail"]
    sentence: str
    fix: str
    source: str
    date: datetime.date
    each: Literal["gpu", "framework", "package"] | None = None
    group: str | None = None


@cache
def rules() -> tuple[Rule, ...]:
    """Returns all rules, in the order in which they are asked."""
    found: list[Rule] = []
    for name in FILES:
        found += convert_strictly(load_tables(f"rules/{name}.yaml"), tuple[Rule, ...])
    return tuple(found)
