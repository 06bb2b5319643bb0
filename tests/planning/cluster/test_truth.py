"""Predictions of published runs meet the targets, and rows are read as they are meant."""

from __future__ import annotations

import csv
import random
import timeit
from pathlib import Path

import pytest

from planning.cluster.published import PATH, of_source, predictions, rows
from shardline.config import UsageError
from shardline.planning.cluster.memory import estimate_memory
from shardline.planning.cluster.scoring import kendall_tau, predict_file, score
from shardline.planning.cluster.time import estimate_time
from shardline.planning.cluster.truth import COLUMNS, known_settings, predict_row


def test_memory_targets() -> None:
    known = score(rows(), predictions())["memory"]["known"]
    assert known["count"] >= 60
    assert known["within_10"] >= 0.75
    assert known["within_20"] >= 0.95


def test_verdict_targets() -> None:
    summary = score(rows(), predictions())
    assert summary["num_out_of_memory"] == 12
    assert summary["wrongly_fits"] == []
    assert len(summary["wrongly_out_of_memory"]) <= 0.1 * summary["num_fitting"]


def test_throughput_targets() -> None:
    tokens = score(rows(), predictions())["tokens_per_s"]
    assert tokens["known"]["count"] >= 100
    assert tokens["known"]["within_20"] >= 0.75
    assert tokens["all"]["within_20"] >= 0.75


def test_rank_order_of_the_bloom_sweep() -> None:
    sweep = score(rows(), predictions())["bloom_tau"]
    assert (sweep["layouts"], sweep["timed_layouts"]) == (15, 12)
    assert sweep["tau"] >= 0.6
    every = [
        (float(row["measured_tokens_per_s_per_gpu"]), prediction.tokens_per_s_per_device or 0.0)
        for row, prediction in of_source("BigScience BLOOM")
        if row["measured_tokens_per_s_per_gpu"]
    ]
    assert (kendall_tau(every) or 0) >= 0.6


def test_kendall_tau() -> None:
    assert kendall_tau([(1, 10), (2, 20), (3, 30)]) == 1
    assert kendall_tau([(1, 30), (2, 20), (3, 10)]) == -1
    assert kendall_tau([(1, 10), (2, 30), (3, 20)]) == pytest.approx(1 / 3)
    assert kendall_tau([(1, 10)]) is None


def test_skipped_rows_say_why_and_are_few() -> None:
    skipped = [prediction.skipped for prediction in predictions() if prediction.skipped]
    assert all(len(why) > 20 for why in skipped)
    assert len(skipped) <= 8


def test_the_file_mode_numbers_rows_in_order() -> None:
    result = predict_file(str(PATH))
    assert [row["row"] for row in result["rows"]] == list(range(208))
    assert set(result["rows"][0]) >= {"row", "memory_gib", "tokens_per_s_per_device", "fits", "skipped"}
    assert result["summary"]["num_rows"] == 208


def test_a_file_without_needed_columns_is_refused(tmp_path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["model", "n_gpus"], ["x", "1"]])
    with pytest.raises(UsageError, match="no column 'hardware'"):
        predict_file(str(path))
    with pytest.raises(UsageError, match="can't be read"):
        predict_file(str(tmp_path / "absent.csv"))


def test_a_row_of_an_unknown_publisher_is_predicted_too() -> None:
    row = {
        "hardware": "8x A100 80GB", "model": "Llama-3-8B", "n_gpus": "8", "layers": "32", "hidden": "4096",
        "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "128256", "seq": "4096", "micro_batch": "1",
        "global_batch": "64",
        "precision": "bf16 mixed", "tp": "1", "pp": "1", "dp": "8", "zero_stage": "3", "recompute": "full",
    }  # fmt: skip
    prediction = predict_row(row)
    assert prediction.job is not None
    assert prediction.job.engine == "fsdp2"
    assert prediction.fits
    assert 20 < (prediction.memory_gib or 0) < 45
    assert 1500 < (prediction.tokens_per_s_per_device or 0) < 4500
    slower = predict_row({**row, "hardware": "8x V100 32GB"})
    assert (slower.tokens_per_s_per_device or 0) < 0.6 * (prediction.tokens_per_s_per_device or 0)


def test_known_settings_need_recomputation_zero_and_dtype() -> None:
    row = {"recompute": "full", "zero_stage": "1", "precision": "bf16", "n_gpus": "8", "dp": "8"}
    assert known_settings(row)
    for name in ("recompute", "zero_stage", "precision"):
        assert not known_settings({**row, name: ""})
    assert known_settings({**row, "zero_stage": "", "n_gpus": "1", "dp": "1"})


def test_an_estimate_takes_microseconds() -> None:
    job = next(prediction.job for _, prediction in of_source("BigScience BLOOM") if prediction.job)
    runs = 200
    seconds = min(timeit.repeat(lambda: (estimate_memory(job), estimate_time(job)), number=runs, repeat=3)) / runs
    assert seconds < 1e-3  # 100 microseconds on an idle machine


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "many"}, "'many' is no number"),
        ({"hidden": "", "params_b": ""}, "neither the model's dimensions nor its number of parameters"),
        ({"engine": "deepsped"}, "did you mean 'deepspeed'"),
    ],
)
def test_a_row_that_makes_no_sense_is_skipped_with_the_reason(changes: dict, message: str) -> None:
    row = {**rows()[12], **changes}
    prediction = predict_row(row)
    assert prediction.memory_gib is None
    assert message in (prediction.skipped or "")


ODD = (
    "", "0", "-1", "abc", "~7", "13B", "1e400", "nan", "3 (fsdp)", "1-2", "8x", "BF16", "TPU v4-512", "MI250X",
    "T4 16GB",
    "unknown", "4096x2", "1,024", "full (every layer)", "none/selective", "99999999999", "3.5",
)  # fmt: skip


def test_one_bad_row_spoils_no_other(tmp_path: Path) -> None:
    chosen = random.Random(7)
    spoiled = []
    for _ in range(600):
        row = dict(chosen.choice(rows()))
        for name in chosen.sample(COLUMNS, chosen.choice((1, 2, 3))):
            row[name] = chosen.choice(ODD)
        spoiled.append(row)
    path = tmp_path / "runs.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({name: row.get(name, "") for name in COLUMNS} for row in spoiled)
    found = predict_file(str(path))
    assert len(found["rows"]) == 600
    assert 0 < found["summary"]["skipped"] < 300
    for row in found["rows"]:
        assert row["skipped"] or row["memory_gib"] is not None
        assert row["memory_gib"] is None or row["memory_gib"] >= 0
    path.write_bytes(b"\xff\xfe\x00hardware")
    with pytest.raises(UsageError, match="is no CSV file in UTF-8"):
        predict_file(str(path))
