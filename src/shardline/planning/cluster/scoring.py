"""How good predictions of published runs are.

rows = read_rows("tests/planning/plan_truth.csv")
summary = score(rows, [predict_row(row) for row in rows])
summary["memory"]["known"]["within_10"], summary["wrongly_fits"], summary["sources"]["torchtitan"]["memory"]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardline.config.errors import UsageError
from shardline.planning.cluster.truth import Prediction, known_settings, number, predict_row, read_rows

__all__ = ["errors_of", "kendall_tau", "predict_file", "score"]

_COLUMNS = {"memory": "measured_mem_gib", "tokens_per_s": "measured_tokens_per_s_per_gpu"}


def predict_file(path: str) -> dict[str, Any]:
    """Returns {"rows": [..], "summary": {..}} of a CSV file of published runs, rows numbered from 0 in its order."""
    rows = read_rows(path)
    predictions = [predict_row(row) for row in rows]
    return {
        "rows": [prediction.to_json(index) for index, prediction in enumerate(predictions)],
        "summary": score(rows, predictions),
    }


def errors_of(kind: str, rows: Sequence[dict[str, str]], predictions: Sequence[Prediction]) -> list[tuple[int, float]]:
    """Returns (row, predicted / measured - 1) of "memory" or "tokens_per_s", where both are there."""
    found = []
    for index, (row, prediction) in enumerate(zip(rows, predictions, strict=True)):
        got = prediction.memory_gib if kind == "memory" else prediction.tokens_per_s_per_device
        measured = _measured(row, _COLUMNS[kind])
        if measured and got is not None:
            found.append((index, got / measured - 1))
    return found


def _measured(row: dict[str, str], column: str) -> float:
    """Returns a figure of a row, 0 where there is none that can be read."""
    try:
        return number(row.get(column))
    except UsageError:
        return 0.0


def score(rows: Sequence[dict[str, str]], predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Returns shares of rows within 10 and 20 %, over all, over those whose settings are known, and by source; which
    out-of-memory rows are said to fit, and which fitting ones are not; and the BLOOM sweep's rank correlation."""
    summary: dict[str, Any] = {"num_rows": len(rows), "sources": {}}
    for kind in _COLUMNS:
        errors = errors_of(kind, rows, predictions)
        known = [error for index, error in errors if known_settings(rows[index])]
        summary[kind] = {"all": _shares([error for _, error in errors]), "known": _shares(known)}
        for index, error in errors:
            summary["sources"].setdefault(rows[index].get("source", ""), {}).setdefault(kind, []).append(error)
    summary["sources"] = {
        name: {kind: _shares(errors) for kind, errors in kinds.items()} for name, kinds in summary["sources"].items()
    }
    fits = [row.get("fits", "") for row in rows]
    said = [prediction.fits for prediction in predictions]
    summary["wrongly_fits"] = [i for i, fit in enumerate(fits) if fit in ("oom", "no") and said[i]]
    summary["wrongly_out_of_memory"] = [i for i, fit in enumerate(fits) if fit == "yes" and said[i] is False]
    summary["num_fitting"] = sum(fit == "yes" for fit in fits)
    summary["num_out_of_memory"] = sum(fit in ("oom", "no") for fit in fits)
    summary["skipped"] = sum(prediction.skipped is not None for prediction in predictions)
    summary["bloom_tau"] = _sweep(rows, predictions)
    return summary


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Returns the rank correlation of (measured, predicted) pairs, over those whose measurements differ."""
    agree = count = 0
    for i, (measured, predicted) in enumerate(pairs):
        for other_measured, other_predicted in pairs[:i]:
            if measured != other_measured:
                count += 1
                sign = (measured - other_measured) * (predicted - other_predicted)
                agree += (sign > 0) - (sign < 0)
    return agree / count if count else None


def _sweep(rows: Sequence[dict[str, str]], predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Returns the rank correlation over layouts of one model on the same devices; what doesn't fit makes no tokens."""
    pairs, timed = [], []
    for row, prediction in zip(rows, predictions, strict=True):
        if not row.get("source", "").startswith("BigScience BLOOM") or row.get("hidden") != "14336":
            continue
        got = prediction.tokens_per_s_per_device or 0.0
        measured = _measured(row, _COLUMNS["tokens_per_s"])
        pairs.append((measured, got if prediction.fits else 0.0))
        if measured:
            timed.append((measured, got))
    return {
        "layouts": len(pairs),
        "tau": kendall_tau(pairs),
        "timed_layouts": len(timed),
        "tau_of_timed": kendall_tau(timed),
    }


def _shares(errors: Sequence[float]) -> dict[str, Any]:
    if not errors:
        return {"count": 0, "within_10": None, "within_20": None, "median": None, "bias": None}
    sizes = sorted(abs(error) for error in errors)
    return {
        "count": len(sizes),
        "within_10": sum(size <= 0.1 for size in sizes) / len(sizes),
        "within_20": sum(size <= 0.2 for size in sizes) / len(sizes),
        "median": sizes[len(sizes) // 2],
        "bias": sum(errors) / len(errors),
    }
