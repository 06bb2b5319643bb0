"""The layouts of a plan, the choice and its reasons, and what is said when nothing fits."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from hardware.machines import GIB, machine
from shardline.cli.main import main
from shardline.config import InfeasibleError, RunConfig, load_config
from shardline.models.presets import preset
from shardline.planning.explain import plan_lines, plan_table
from shardline.planning.search import Plan, make_plan

SMOLLM = preset("smollm2-135m")


def _plan(*words: str, num_processes: int = 2, available_gib: float = 48, model: Any = SMOLLM) -> Plan:
    here = machine(memory_available_bytes=int(available_gib * GIB))
    return make_plan(model, _config(*words), num_processes=num_processes, machine=here)


def _config(*words: str) -> RunConfig:
    return load_config(None, words)


def test_candidates_are_every_stage_with_every_micro_batch_that_divides() -> None:
    plan = _plan("--train.global_batch=12", "--train.micro_batch=2")
    assert {(c.zero, c.micro_batch, c.num_micro_batches) for c in plan.layouts} == {
        (zero, size, 6 // size) for zero in (0, 1, 2, 3) for size in (1, 2, 3, 6)
    }
    assert all(c.reason for c in plan.layouts)
    assert plan.budget_bytes == 24 * GIB


def test_with_room_it_sends_the_least() -> None:
    plan = _plan()
    assert plan.chosen is not None
    assert (plan.chosen.zero, plan.chosen.micro_batch) == (0, 2)
    assert plan.configured is plan.chosen
    plan.require()
    sent = {c.zero: c.sent_bytes for c in plan.layouts if c.micro_batch == 4}
    parameters = 4 * plan.num_parameters // 2
    assert sent == {0: 2 * parameters, 1: 3 * parameters, 2: 2 * parameters, 3: 3 * parameters}


def test_accumulation_makes_sharded_layouts_send_more() -> None:
    plan = _plan("--train.global_batch=16", "--train.micro_batch=2")
    sent = {c.zero: c.sent_bytes for c in plan.layouts if c.micro_batch == 2}
    assert 2 * sent[2] == 5 * sent[0]
    assert sent[3] == 6 * sent[0]


def test_with_less_room_it_shards() -> None:
    roomy = _plan("--train.micro_batch=1", num_processes=8, available_gib=400)
    sizes = {c.zero: c.prediction.high_bytes for c in roomy.layouts if c.micro_batch == 1}
    assert sizes[2] < sizes[0]
    between = (sizes[2] + sizes[0]) / 2 * 8 / GIB
    plan = _plan("--train.micro_batch=1", num_processes=8, available_gib=between)
    assert plan.chosen is not None
    assert plan.chosen.zero == 2  # as little sent as DDP, and less memory
    assert plan.configured.zero == 0
    assert not plan.configured.fits
    with pytest.raises(InfeasibleError, match=r"This fits: --parallel.zero 2 --train.micro_batch 1\."):
        plan.require()


def test_the_largest_micro_batch_that_fits_but_no_larger_than_asked_for() -> None:
    least = min(c.prediction.high_bytes for c in _plan("--train.micro_batch=4").layouts if c.micro_batch == 2)
    plan = _plan("--train.micro_batch=4", available_gib=2 * (least + 1) / GIB)
    assert plan.chosen is not None
    assert plan.chosen.micro_batch == 2
    assert not any(c.fits for c in plan.layouts if c.micro_batch == 4)
    modest = _plan("--train.micro_batch=1")
    assert modest.chosen is not None
    assert modest.chosen.micro_batch == 1
    assert "larger" in next(c.reason for c in modest.layouts if c.micro_batch == 2)


def test_nothing_fits_names_the_numbers_and_three_fixes() -> None:
    plan = _plan("--data.sequence_length=2048", available_gib=3)
    assert plan.chosen is None
    assert "does not fit" in plan.configured.reason
    with pytest.raises(InfeasibleError) as caught:
        plan.require()
    text = str(caught.value)
    assert caught.value.exit_code == 3
    assert "1.5 GiB is there for each (3.0 GiB available / 2)" in text
    assert text.count("would fit") + text.count("The least") + text.count("A machine with") >= 3


def test_what_the_fixes_promise_is_true() -> None:
    text = ""
    try:
        _plan("--data.sequence_length=2048", "--train.micro_batch=4", available_gib=8).require()
    except InfeasibleError as error:
        text = str(error)
    words = text.partition("No layout fits. ")[2].partition(" would fit")[0].split()
    assert "--data.sequence_length" in words
    fixed = _plan("--train.global_batch=8", *words, available_gib=8)
    assert fixed.configured.fits


def test_one_process_keeps_the_simplest_layout() -> None:
    plan = _plan(num_processes=1)
    assert plan.chosen is not None
    assert plan.chosen.zero == 0
    assert "nothing to share" in plan.chosen.reason
    assert all(c.sent_bytes == 0 for c in plan.layouts)


def test_too_few_processes_fill_in_the_equation() -> None:
    with pytest.raises(InfeasibleError, match="= 4 x 1 x 1 = 4 processes, but 2 were started"):
        _plan("--parallel.data=4")


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(InfeasibleError, match="2 x 3 = 6"):
        _plan("--train.global_batch=9", "--train.micro_batch=3")


def test_the_plan_as_json_and_as_text() -> None:
    plan = _plan("--parallel.zero=3")
    result = json.loads(json.dumps(plan.to_json()))
    assert result["fits"] is True
    assert result["layout"]["zero"] == 0
    assert result["configured"]["layout"] == {
        "data": 2,
        "tensor": 1,
        "pipeline": 1,
        "zero": 3,
        "micro_batch": 2,
        "num_micro_batches": 2,
    }
    assert result["memory_gib"]["low"] < result["memory_gib"]["total"] < result["memory_gib"]["high"]
    assert result["machine"]["cpu_name"] == "Example CPU"
    assert result["date"].startswith("20")
    assert len(result["alternatives"]) == len(plan.layouts) - 1
    lines = plan_lines(plan)
    assert sum(line.startswith("why not") for line in lines) == 3
    assert sum(line.startswith("chosen: ") for line in lines) == 1
    assert plan_table(plan).row_count == 4


def test_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "tiny", "--nproc", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_processes"] == 1
    assert main(["plan", "--nproc", "2", "--data.sequence_length", "256"]) == 0
    output = capsys.readouterr().out
    assert "256 tokens" in output
    assert "chosen: ZeRO-" in output
    assert max(map(len, output.splitlines()[1:6])) <= 80


@pytest.mark.parametrize("name", ["gemma-2-27b", "bloom-176b", "glm-4-32b-0414", "opt-66b", "mixtral-8x22b"])
def test_the_verb_for_models_of_every_shape(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.perf_counter()
    assert main(["plan", "--preset", name, "--nproc", "2"]) == 3
    assert time.perf_counter() - began < 3
    printed = capsys.readouterr()
    assert "does not fit: " in printed.out
    assert ("M active" in printed.out) == ("mixtral" in name)
    assert "The least that this model trains in is " in printed.err


def test_the_verb_when_nothing_fits_or_makes_sense(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "llama-70b", "--nproc", "1"]) == 3
    assert "No layout fits" in capsys.readouterr().err
    assert main(["plan", "--preset", "tinny"]) == 2
    assert "tiny" in capsys.readouterr().err
    assert main(["plan", "--nproc", "0"]) == 2
    assert "--nproc 0" in capsys.readouterr().err
