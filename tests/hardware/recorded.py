"""Machines written by hand in machines/*.yaml: a healthy one of each kind, and many with one known fault each.

A file says what it is `about`, and either holds a whole `machine`, or a `base` and what to `change` in it. `expect`
lists each rule that must speak, with its verdict, words of the reason and of the fix; no other may.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from shardline.hardware.machine import Machine, machine_from

FOLDER = Path(__file__).parent / "machines"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def description(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def values(name: str) -> dict[str, Any]:
    """The machine's facts as plain values."""
    found = description(name)
    return found["machine"] if "machine" in found else _merged(values(found["base"]), found["change"])


def machine(name: str) -> Machine:
    return machine_from(values(name), where=name)


def _merged(base: Any, change: Any) -> Any:
    """A dict changes a dict by its keys, and a list by the numbers of its items; anything else is replaced."""
    if isinstance(base, list) and isinstance(change, dict):
        return [_merged(item, change[number]) if number in change else item for number, item in enumerate(base)]
    if isinstance(base, dict) and isinstance(change, dict):
        return {**base, **{key: _merged(base.get(key), inner) for key, inner in change.items()}}
    return change
