"""Whether a package is still looked after: the age of its last release, and what is known besides.

    for each in find_health(["torch", "jax-metal"], index=find_index()): print(each.package, each.verdict, each.reason)

active        a release within 180 days
slow          within 540
unmaintained  none for longer, archived by the index's own word, or a citation in health.yaml says so
unknown       neither the index nor the table knows the package

Nothing here fails for want of a network: what the index does not tell comes from health.yaml, with its date, and a
package is judged by its age on that date, not by the table's.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from shardline.hardware.package_index import Index, IndexSilentError, Release, find_index
from shardline.hardware.strict import convert_strictly, load_tables

__all__ = ["Health", "begin_health", "find_health", "health_table", "judge"]

ACTIVE_DAYS, SLOW_DAYS = 180, 540
DEADLINE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Known:
    """A row of health.yaml; `verdict` is set where a citation (`reason`, `source`) overrides the age."""

    package: str
    version: str
    released: datetime.date
    verdict: str | None = None
    reason: str = ""
    instead: str = ""  # what to use in its place
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class HealthTable:
    checked: datetime.date
    rows: tuple[Known, ...]


@dataclass(frozen=True, kw_only=True)
class Health:
    """One package's state. `age` is words ("3 months"), `checked` says who told and when."""

    package: str
    verdict: str
    reason: str
    fix: str
    age: str
    days: int | None
    last_version: str | None
    last_release: str | None
    checked: str

    def facts(self) -> dict[str, Any]:
        """Returns the facts that rules speak of."""
        return {
            "health_name": self.package,
            "health_verdict": self.verdict,
            "health_reason": self.reason,
            "health_fix": self.fix,
        }


@cache
def health_table() -> HealthTable:
    return convert_strictly(load_tables("health.yaml"), HealthTable)


def find_health(
    packages: Iterable[str],
    *,
    find: Callable[[], Index | None] = find_index,
    today: datetime.date | None = None,
    deadline_s: float = DEADLINE_S,
) -> tuple[Health, ...]:
    """Returns the state of each package; `find` gives the index to ask (`lambda: None`: the table alone).

    All are asked at once; those not answered within `deadline_s` come from the table.
    """
    return begin_health(packages, find=find, deadline_s=deadline_s)(today)


def begin_health(
    packages: Iterable[str], *, find: Callable[[], Index | None] = find_index, deadline_s: float = DEADLINE_S
) -> Callable[[datetime.date | None], tuple[Health, ...]]:
    """Asks as `find_health` does and returns at once; what it returns waits for the rest of the time and judges."""
    names = list(packages)
    answers: dict[str, Release] = {}
    asking = threading.Thread(target=_ask_each, args=(names, find, answers), daemon=True)
    asking.start()
    deadline = time.monotonic() + deadline_s

    def finish(today: datetime.date | None = None) -> tuple[Health, ...]:
        asking.join(max(0.0, deadline - time.monotonic()))
        known = {row.package: row for row in health_table().rows}
        day = today or datetime.date.today()
        return tuple(judge(name, answers.get(name), known.get(name), today=day) for name in names)

    return finish


def judge(package: str, release: Release | None, known: Known | None, *, today: datetime.date) -> Health:
    """Returns the state of a package from what the index told (None: nothing) and what the table knows."""
    if release is not None:
        version, date, on, checked = release.version, release.date, today, f"index of {today}"
    elif known is not None:
        on = health_table().checked
        version, date, checked = known.version, known.released, f"table of {on}"
    else:
        return Health(
            package=package,
            verdict="unknown",
            reason="neither the package index nor the table tells",
            fix="",
            age="",
            days=None,
            last_version=None,
            last_release=None,
            checked="",
        )
    days = (on - date).days
    last = f"the last release, {version}, is of {date}, {_age(days)} ago"
    verdict = "active" if days < ACTIVE_DAYS else "slow" if days <= SLOW_DAYS else "unmaintained"
    reason = last
    if known is not None and known.verdict is not None:
        verdict, reason = known.verdict, f"{known.reason} ({known.source}); {last}"
    elif release is not None and release.status in ("archived", "deprecated"):
        verdict, reason = "unmaintained", f"the package index calls it {release.status}; {last}"
    instead = f"Use {known.instead}." if known is not None and known.instead else ""
    return Health(
        package=package,
        verdict=verdict,
        reason=reason,
        fix=instead or f"Look for a successor, and run: pip uninstall {package}",
        age=_age(days),
        days=days,
        last_version=version,
        last_release=date.isoformat(),
        checked=checked,
    )


def _ask_each(names: Sequence[str], find: Callable[[], Index | None], answers: dict[str, Release]) -> None:
    """Asks on threads that end with the process: a server that never answers must not keep the verb."""

    def ask(index: Index, name: str) -> None:
        try:
            answers[name] = index.last_release(name)
        except IndexSilentError:
            return  # the table has the word then

    index = find()
    if index is None:
        return
    threads = [threading.Thread(target=ask, args=(index, name), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _age(days: int) -> str:
    if days < 60:
        return f"{max(days, 0)} days"
    return f"{days / 30.44:.0f} months" if days < 730 else f"{days / 365.25:.1f} years"
