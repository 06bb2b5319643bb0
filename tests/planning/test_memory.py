"""Predicted memory: what must hold for every model, and one real run."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardline.config import RunConfig, load_config
from shardline.models.presets import preset
from shardline.planning.memory import PARTS, predict
from shardline.planning.parameters import count_parameters

BENCH = Path(__file__).parents[2] / "bench" / "plan_memory.py"
SMOLLM = preset("smollm2-135m")


def _config(*words: str) -> RunConfig:
    return load_config(None, words)


def test_parts_sum_to_the_total_within_the_band() -> None:
    prediction = predict(SMOLLM, _config(), data_ranks=2)
    assert list(prediction.parts()) == list(PARTS)
    assert sum(prediction.parts().values()) == prediction.total_bytes
    assert prediction.low_bytes < prediction.total_bytes < prediction.high_bytes
    as_json = prediction.to_json()
    assert as_json["total"] == pytest.approx(sum(as_json["parts"].values()))


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m", "llama-3.1-8b"])
def test_states_shrink_as_the_stage_says(name: str) -> None:
    """ZeRO, figure 1: the optimizer state from stage 1 on, gradients from 2, parameters at 3 (fp32: 8, 4, 4 bytes)."""
    model, ranks = preset(name), 4
    total = count_parameters(model).total
    zero = [predict(model, _config(), data_ranks=ranks, zero=stage) for stage in (0, 1, 2, 3)]
    assert zero[0].optimizer_bytes == 8 * total
    assert zero[1].optimizer_bytes == pytest.approx(8 * total / ranks, rel=0.2)  # whole tensors are dealt out
    assert zero[2].optimizer_bytes == zero[3].optimizer_bytes == pytest.approx(8 * total / ranks, rel=1e-6)
    assert zero[2].weights_bytes == zero[3].weights_bytes == 4 * total // ranks
    assert zero[2].gradients_bytes < zero[1].gradients_bytes
    assert zero[3].communication_bytes < zero[2].communication_bytes


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_save_needs_a_copy_only_in_the_background(zero: int) -> None:
    """The copies of all ranks together are one state, 12 bytes a parameter with AdamW; no rank gathers the model."""
    model, ranks = preset("llama-3.1-8b"), 4
    total, largest = count_parameters(model).total, max(count_parameters(model).tensors)
    foreground = predict(model, _config(), data_ranks=ranks, zero=zero)
    background = predict(model, _config("--checkpoint.asynchronous=true"), data_ranks=ranks, zero=zero)
    assert foreground.phase != "save"
    assert foreground.checkpoint_bytes == 0
    assert background.phase == foreground.phase
    assert background.total_bytes - foreground.total_bytes == background.checkpoint_bytes
    assert background.checkpoint_bytes == pytest.approx(12 * total / ranks + 3 * 4 * largest, rel=1e-6)


def test_one_process_shares_nothing_at_any_stage() -> None:
    totals = {predict(SMOLLM, _config(), data_ranks=1, zero=stage).total_bytes for stage in (0, 1, 2, 3)}
    assert len(totals) == 1


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_more_rows_and_longer_rows_take_more(zero: int, precision: str) -> None:
    def total(micro_batch: int, length: int) -> int:
        words = [f"--train.micro_batch={micro_batch}", f"--data.sequence_length={length}"]
        config = _config(*words, f"--train.precision={precision}", "--train.global_batch=64")
        return predict(SMOLLM, config, data_ranks=2, zero=zero).total_bytes

    sizes = [total(1, 512), total(2, 512), total(2, 1024), total(4, 2048)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 4


def test_more_ranks_take_less_under_zero_3() -> None:
    sizes = [predict(preset("llama-3.1-8b"), _config(), data_ranks=n, zero=3).total_bytes for n in (2, 4, 8, 16)]
    assert sizes == sorted(sizes, reverse=True)


def test_a_wide_vocabulary_never_holds_all_logits() -> None:
    words = ["--train.micro_batch=8", "--data.sequence_length=2048"]
    prediction = predict(preset("llama-3.2-1b"), _config(*words), data_ranks=1)
    assert prediction.logits_bytes < 8 * 2048 * 128256 * 4 / 10


def test_the_prediction_of_a_real_run(tmp_path: Path) -> None:
    """A process of the benchmark: `tiny` in one process. The base was measured on Linux with the CPU build."""
    if platform.system() != "Linux" or torch.version.cuda is not None:
        pytest.skip("the base of Python and torch differs here")
    case = {"model": "tiny", "processes": 1, "zero": 0, "micro_batch": 4, "sequence_length": 256}
    command = [sys.executable, str(BENCH), "--work", json.dumps(case), "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    measured = json.loads(done.stdout.splitlines()[-1])["peak"]
    config = _config("--train.micro_batch=4", "--train.global_batch=4", "--data.sequence_length=256")
    assert predict(preset("tiny"), config, data_ranks=1).total_bytes == pytest.approx(measured, rel=0.15)
