"""The user's own measurements, which stand above everybody else's: a JSON file of frameworks and their speeds.

    {"results": [{"framework": "torch", "tokens_per_s": 5200.0}, {"framework": "jax", "tokens_per_s": 6100.0}]}

    measured = read_measurements("measured.json")
    speeds(measured)                               # {"torch": 5200.0, "jax": 6100.0}

`step_s` in place of `tokens_per_s` will do where every result has it. Other keys are left to whoever wrote them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.config.errors import UsageError

__all__ = ["Measured", "read_measurements", "speeds"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One training run of one model on this user's machine."""

    framework: str
    tokens_per_s: float | None = None
    step_s: float | None = None


def read_measurements(path: str | Path) -> tuple[Measured, ...]:
    """Returns the results of a file; raises `UsageError` where it has another form or figures that can't be."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror}); give a file of measurements.") from None
    except ValueError:
        raise UsageError(f"{path} is not JSON; give a file of measurements.") from None
    results = values.get("results") if isinstance(values, dict) else None
    if not isinstance(results, list) or not results:
        raise UsageError(f"{path} has no list `results`; it holds framework and tokens_per_s of each run.")
    found = tuple(_one(each, f"{path}, results[{number}]") for number, each in enumerate(results))
    if not speeds(found):
        raise UsageError(f"{path} gives some results in tokens_per_s and others in step_s; give all of them in one.")
    return found


def speeds(measured: Iterable[Measured]) -> dict[str, float]:
    """Returns the best speed of each framework in tokens/s, or in steps/s where a result has no tokens/s."""
    rows = tuple(measured)
    in_tokens = all(each.tokens_per_s is not None for each in rows)
    if not in_tokens and any(each.step_s is None for each in rows):
        return {}
    found: dict[str, float] = {}
    for each in rows:
        speed = (each.tokens_per_s or 0.0) if in_tokens else 1 / (each.step_s or math.inf)
        found[each.framework] = max(speed, found.get(each.framework, 0.0))
    return found


def _one(values: Any, where: str) -> Measured:
    if not isinstance(values, dict) or not isinstance(values.get("framework"), str):
        raise UsageError(f"{where} does not name its `framework`.")
    figures = {}
    for name in ("tokens_per_s", "step_s"):
        value = values.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UsageError(f"{where}: {name} is {value!r}; it is a number above 0.")
        figures[name] = float(value)
    if not figures:
        raise UsageError(f"{where} has neither tokens_per_s nor step_s.")
    return Measured(framework=values["framework"], **figures)
