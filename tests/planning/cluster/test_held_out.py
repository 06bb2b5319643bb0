"""The planner on published runs that none of its constants was fitted to."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from shardline.planning.cluster.scoring import score
from shardline.planning.cluster.truth import COLUMNS, Prediction, predict_row, read_rows

HELD_OUT = Path(__file__).parents[1] / "held_out.csv"
CALIBRATION = HELD_OUT.with_name("plan_truth.csv")
MEASURED = ("measured_mem_gib", "measured_tokens_per_s_per_gpu", "fits")
# Runs that ran out of memory and that the planner says fit: (source, model, devices, sequence, micro-batch) and why.
SAID_TO_FIT = {
    ("litgpt resource tables", "Llama-2-13B", "2", "1304", "1"): "tight; FSDP 1 gathers frozen layers with adapters",
    ("GPT-NeoX at Lambda", "GPT-NeoX-20B", "24", "2048", "4"): "tight: 42 GiB expected, of which 7 the allocator's",
    ("GPT-NeoX issue", "GPT-NeoX-13B", "8", "2048", "1"): "tight; its recomputation is chosen so that it fits",
    ("unsloth benchmarks", "Llama-3.3-70B", "1", "8192", "1"): "tight; 6916 tokens fitted",
    ("unsloth benchmarks", "Llama-3.3-70B", "1", "1024", "1"): "tight; adapters of rank 32, which no column says",
    ("stanford_alpaca issue", "LLaMA-7B", "4", "512", "3"): "FSDP 1 gathered offloaded layers without a limit",
    ("ColossalAI issue", "Llama-2-7B", "8", "4096", "16"): "held whole attention scores, which no column says",
    ("NeMo Automodel pull request", "Llama-3.3-70B", "32", "1024", "4"): "FSDP 2, which is read as Megatron",
}


@cache
def held_out() -> tuple[tuple[dict[str, str], Prediction], ...]:
    return tuple((row, predict_row(row)) for row in read_rows(HELD_OUT))


def summary() -> dict:
    pairs = held_out()
    return score([row for row, _ in pairs], [prediction for _, prediction in pairs])


def test_every_row_is_predicted_or_says_why_not() -> None:
    assert len(held_out()) >= 171
    for row, prediction in held_out():
        assert tuple(row) == COLUMNS
        assert prediction.memory_gib or len(prediction.skipped or "") > 20, row


def test_rows_name_their_source_and_measure_something() -> None:
    for row, _ in held_out():
        assert row["source"]
        assert row["url_or_repo_path"]
        assert any(row[name] for name in MEASURED), row
        assert row["fits"] in ("yes", "oom"), row


def test_no_row_is_one_that_constants_were_fitted_to() -> None:
    names = tuple(name for name in COLUMNS if name not in ("source", "url_or_repo_path", "year", "notes", "params_b"))
    known = {tuple(row[name] for name in names) for row in read_rows(CALIBRATION)}
    assert not [row for row, _ in held_out() if tuple(row[name] for name in names) in known]


def test_memory_that_ran_out_is_not_said_to_fit() -> None:
    said = {
        (row["source"], row["model"], row["n_gpus"], row["seq"], row["micro_batch"])
        for row, prediction in held_out()
        if row["fits"] == "oom" and prediction.fits
    }
    assert said <= set(SAID_TO_FIT)
    assert summary()["num_out_of_memory"] >= 20


def test_shares_near_what_was_measured() -> None:
    memory, tokens = summary()["memory"]["all"], summary()["tokens_per_s"]["all"]
    assert memory["count"] >= 48
    assert memory["within_20"] >= 0.79
    assert tokens["count"] >= 122
    assert tokens["within_20"] >= 0.63
