"""The published runs, read once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from shardline.planning.cluster.truth import Prediction, predict_row, read_rows

PATH = Path(__file__).parents[1] / "plan_truth.csv"


@cache
def rows() -> tuple[dict[str, str], ...]:
    return tuple(read_rows(PATH))


@cache
def predictions() -> tuple[Prediction, ...]:
    return tuple(predict_row(row) for row in rows())


def of_source(name: str) -> list[tuple[dict[str, str], Prediction]]:
    return [
        (row, prediction)
        for row, prediction in zip(rows(), predictions(), strict=True)
        if row["source"].startswith(name)
    ]
