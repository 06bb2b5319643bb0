"""Score the planner on published runs, and write docs/plan-accuracy.md with its plot.

python bench/plan_truth.py                     # a table in the terminal
python bench/plan_truth.py --write             # docs/plan-accuracy.md and docs/plan-accuracy.svg too
python bench/plan_truth.py --rows memory       # every row's figure

Leaving a source out: its runs are predicted as those of an engine of the same family that was fitted without them.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from plan_truth_page import page, plot

from shardline.planning.cluster.engines import Engine, engine, replaced
from shardline.planning.cluster.scoring import errors_of, score
from shardline.planning.cluster.truth import known_settings, predict_row, read_rows

ROOT = Path(__file__).parents[1]
TRUTH = ROOT / "tests" / "planning" / "plan_truth.csv"
# Each family's plainest engine stands for an engine whose runs are left out; its fitted constants are fitted again.
FAMILIES = {
    "fsdp2": ("shardline", "fsdp2", "fsdp1", "torchtitan", "torchtune", "transformers", "litgpt", "composer", "jax"),
    "megatron": ("megatron", "megatron-bridge", "megatron-deepspeed", "deepspeed", "alpa"),
}
FITTED = {
    "memory": ("logits", "norm_rms", "norm_compiled", "working", "fragments"),
    "tokens_per_s": ("matmul", "attention", "traffic_eager", "traffic_compiled", "link"),
}
STEPS = (0.7, 0.85, 0.93, 1.0, 1.08, 1.2, 1.4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/plan-accuracy.md and its plot")
    parser.add_argument("--rows", choices=sorted(FITTED), help="list every row")
    args = parser.parse_args()
    rows = read_rows(TRUTH)
    predictions = [predict_row(row) for row in rows]
    summary = score(rows, predictions)
    left_out = cross_validate(rows)
    print_summary(summary, left_out)
    if args.rows:
        for index, error in errors_of(args.rows, rows, predictions):
            row = rows[index]
            mark = "known" if known_settings(row) else "     "
            print(
                f"{index:4d} {mark} {error:+7.1%}  {row['source'][:28]:28s} {row['model'][:18]:18s} {row['hardware']}"
            )
    if args.write:
        docs = ROOT / "docs"
        (docs / "plan-accuracy.svg").write_text(plot(rows, predictions), encoding="utf-8")
        (docs / "plan-accuracy.md").write_text(page(rows, predictions, summary, left_out), encoding="utf-8")
        print(f"wrote {docs / 'plan-accuracy.md'} and its plot")


def cross_validate(rows: Sequence[dict[str, str]]) -> dict[str, dict[str, Any]]:
    """Returns source -> the score of its rows when neither they nor an engine of their own were fitted to."""
    found = {}
    for source in dict.fromkeys(row["source"] for row in rows):
        held = [row for row in rows if row["source"] == source]
        predictions = [predict_row(row) for row in held]
        engines = {prediction.job.engine for prediction in predictions if prediction.job}
        if not engines:
            continue
        family = next(name for name, members in FAMILIES.items() if engines & set(members))
        others = [row for row in rows if row["source"] != source and _family_of(row) == family]
        plain = engine(family)
        for kind, fields in FITTED.items():
            plain = fit(plain, FAMILIES[family], fields, kind, others)
        with replaced({name: dataclasses.replace(plain, name=name) for name in engines}):
            found[source] = score(held, [predict_row(row) for row in held])
    return found


def _family_of(row: dict[str, str]) -> str | None:
    job = predict_row(row).job
    return next((name for name, members in FAMILIES.items() if job and job.engine in members), None)


def fit(
    start: Engine, members: Sequence[str], fields: Sequence[str], kind: str, rows: Sequence[dict[str, str]]
) -> Engine:
    """Returns an engine whose `fields` make these rows' runs agree best when it stands for all of the family."""
    rows = [row for row in rows if known_settings(row)]

    def loss(candidate: Engine) -> float:
        with replaced({name: dataclasses.replace(candidate, name=name) for name in members}):
            errors = errors_of(kind, rows, [predict_row(row) for row in rows])
        return sum(min(abs(math.log(1 + error)), 0.5) for _, error in errors) / max(1, len(errors))

    best = start
    for field in fields:
        tries = [dataclasses.replace(best, **{field: getattr(best, field) * step}) for step in STEPS]
        best = min(enumerate(tries), key=lambda each: (loss(each[1]), abs(each[0] - 3)))[1]
    return best


def print_summary(summary: dict[str, Any], left_out: dict[str, dict[str, Any]]) -> None:
    def line(name: str, shares: dict[str, Any]) -> None:
        if shares["count"]:
            print(
                f"  {name[:36]:36s} {shares['count']:4d}  10 %: {shares['within_10']:4.0%}"
                f"  20 %: {shares['within_20']:4.0%}  median {shares['median']:5.1%}  bias {shares['bias']:+6.1%}"
            )

    for kind in FITTED:
        print(kind)
        for name in ("all", "known"):
            line(name, summary[kind][name])
        for source, kinds in summary["sources"].items():
            if kind in kinds:
                line(source, kinds[kind])
        print("  leaving the source out")
        for source, held in left_out.items():
            line(source, held[kind]["all"])
    print(f"out-of-memory rows said to fit: {summary['wrongly_fits']} of {summary['num_out_of_memory']}")
    print(f"fitting rows said not to: {len(summary['wrongly_out_of_memory'])} of {summary['num_fitting']}")
    print(f"BLOOM sweep: {summary['bloom_tau']}")


if __name__ == "__main__":
    main()
