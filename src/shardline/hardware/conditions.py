"""The small language in which a rule says when it holds: facts by name, each with one or more tests.

    when:
      memory_available_gib: {below: 4, at_least: 1}
      torch_cuda: {known: true}
      gpu_capability: {older_than: "8.0"}

All tests of all facts have to hold. A fact that is not known (None) passes no test but `known: false` and `is: null`,
so that a machine is never blamed for what nobody looked at. A value `$name` stands for the fact of that name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["TESTS", "holds", "names_in", "version_key"]


def version_key(version: str) -> tuple[int, ...]:
    """`"580.65.06"` -> (580, 65, 6); what follows the numbers (`+cu130`, `rc1`) does not count."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


TESTS: dict[str, Any] = {
    "is": lambda fact, value: fact == value,
    "is_not": lambda fact, value: fact != value,
    "below": lambda fact, value: fact < value,
    "at_least": lambda fact, value: fact >= value,
    "in": lambda fact, value: fact in value,
    "contains": lambda fact, value: value in fact,
    "lacks_one_of": lambda fact, value: not set(value) <= set(fact),
    "lacks_all_of": lambda fact, value: not set(value) & set(fact),
    "older_than": lambda fact, value: version_key(fact) < version_key(value),
    "at_least_version": lambda fact, value: version_key(fact) >= version_key(value),
    "matches": lambda fact, value: re.search(value, fact) is not None,
}


def holds(when: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]) -> bool:
    """Returns whether `facts` pass every test of `when`; a name that is no fact is a mistake in the rule."""
    return all(
        _passes(facts[name], test, _resolve(value, facts))
        for name, tests in when.items()
        for test, value in tests.items()
    )


def names_in(when: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Returns the facts that `when` speaks of; raises `ValueError` for a test that does not exist."""
    found = set(when)
    for tests in when.values():
        for test, value in tests.items():
            if test not in TESTS and test != "known":
                raise ValueError(f"there is no test {test!r}; the tests are known, {', '.join(TESTS)}")
            if isinstance(value, str) and value.startswith("$"):
                found.add(value[1:])
    return found


def _passes(fact: Any, test: str, value: Any) -> bool:
    if test == "known":
        return (fact is not None) == value
    if test == "is" and value is None:
        return fact is None
    if fact is None or value is None:
        return False
    return TESTS[test](fact, value)


def _resolve(value: Any, facts: Mapping[str, Any]) -> Any:
    return facts[value[1:]] if isinstance(value, str) and value.startswith("$") else value
