"""The layouts of a plan, the choice and its reasons, and what is said when nothing fits."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import pytest
import yaml

from hardware.machines import GIB, machine
from shardline.cli.main import main
from shardline.config import InfeasibleError, RunConfig, load_config
from shardline.models.presets import preset
from shardline.parallel.grid import Layout
from shardline.planning.explain import plan_lines, plan_table, short_name, shown
from shardline.planning.layouts import check_layout, require_layout, with_option
from shardline.planning.search import Candidate, Plan, make_plan

SMOLLM = preset("smollm2-135m")


def _plan(*words: str, num_processes: int = 2, available_gib: float = 48, model: Any = SMOLLM) -> Plan:
    here = machine(memory_available_bytes=int(available_gib * GIB))
    return make_plan(model, _config(*words), num_processes=num_processes, machine=here)


def _config(*words: str) -> RunConfig:
    return load_config(None, words)


def _over_data(plan: Plan, *, micro_batch: int) -> list[Candidate]:
    """Candidates that only share out rows, and recompute nothing."""
    found = [c for c in plan.layouts if c.option.axes[1:] == (1, 1) and c.option.recompute == "none"]
    return [c for c in found if c.micro_batch == micro_batch]


def test_candidates_are_every_stage_with_every_micro_batch_that_divides() -> None:
    plan = _plan("--train.global_batch=12", "--train.micro_batch=2")
    over_data = [c for c in plan.layouts if c.option.axes == (2, 1, 1)]
    assert {(c.zero, c.micro_batch, c.num_micro_batches, c.option.recompute) for c in over_data} == {
        (zero, size, 6 // size, recompute)
        for zero in (0, 1, 2, 3)
        for size in (1, 2, 3, 6)
        for recompute in ("none", "selective", "full")
    }
    assert all(c.reason for c in plan.layouts)
    assert len({c.option for c in plan.layouts}) == len(plan.layouts)
    assert plan.budget_bytes == 24 * GIB


def test_candidates_are_every_way_to_share_out_the_processes() -> None:
    """SmolLM has 9 heads, so no 2 or 4 tensor ranks; another model has them."""
    words = ("--train.global_batch=16",)
    assert {c.option.axes for c in _plan(*words, num_processes=8).layouts} == {
        (8, 1, 1),
        (4, 1, 2),
        (2, 1, 4),
        (1, 1, 8),
    }
    plan = _plan(*words, num_processes=8, model=preset("llama-3.2-1b"))
    assert {c.option.axes for c in plan.layouts} == {
        (d, t, p) for d in (1, 2, 4, 8) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if d * t * p == 8
    }
    assert all(c.layout.sequence_parallel == (c.layout.tensor > 1) for c in plan.layouts)
    for candidate in plan.layouts:  # each of them can be asked for, and runs
        config = with_option(plan.run, candidate.option)
        layout = Layout.resolve(config.parallel, world_size=8)
        assert dataclasses.replace(layout, zero=candidate.zero) == candidate.layout
        check_layout(config, plan.model, layout)


def test_a_search_over_64_processes_is_quick() -> None:
    words = ("--train.global_batch=512", "--train.micro_batch=4", "--data.sequence_length=4096")
    began = time.perf_counter()
    plan = _plan(*words, num_processes=64, available_gib=64 * 80, model=preset("llama-3.1-8b"))
    assert time.perf_counter() - began < 2 * 3, "2 s on an idle core"
    assert len(plan.layouts) > 500
    assert plan.chosen is not None
    assert plan.chosen.prediction.high_bytes <= plan.budget_bytes
    assert plan.chosen.step.total_s <= 1.02 * min(
        c.step.total_s for c in plan.layouts if c.fits and c.micro_batch <= plan.run.train.micro_batch
    )


def test_with_room_it_sends_the_least() -> None:
    plan = _plan()
    assert plan.chosen is not None
    assert (plan.chosen.zero, plan.chosen.micro_batch) == (0, 2)
    assert plan.configured is plan.chosen
    plan.require()
    sent = {c.zero: c.sent_bytes for c in _over_data(plan, micro_batch=4)}
    parameters = 4 * plan.num_parameters // 2
    assert sent == {0: 2 * parameters, 1: 3 * parameters, 2: 2 * parameters, 3: 3 * parameters}


def test_accumulation_makes_sharded_layouts_send_more() -> None:
    plan = _plan("--train.global_batch=16", "--train.micro_batch=2")
    sent = {c.zero: c.sent_bytes for c in _over_data(plan, micro_batch=2)}
    assert 2 * sent[2] == 5 * sent[0]
    assert sent[3] == 6 * sent[0]


def test_with_less_room_it_shards() -> None:
    roomy = _plan("--train.micro_batch=1", num_processes=8, available_gib=400)
    sizes = {c.zero: c.prediction.high_bytes for c in _over_data(roomy, micro_batch=1)}
    assert sizes[2] < sizes[0]
    between = (sizes[2] + sizes[0]) / 2 * 8 / GIB
    plan = _plan("--train.micro_batch=1", num_processes=8, available_gib=between)
    assert plan.chosen is not None
    assert plan.chosen.zero in (1, 2)
    assert plan.configured.zero == 0
    assert not plan.configured.fits
    with pytest.raises(InfeasibleError, match=r"This fits: --parallel.zero [12] --train.micro_batch 1"):
        plan.require()


def test_with_hardly_any_room_it_recomputes_or_leaves_the_data_axis() -> None:
    model = preset("llama-3.2-1b")
    words = ("--train.micro_batch=4", "--train.global_batch=32")
    plain = _over_data(_plan(*words, num_processes=8, available_gib=4000, model=model), micro_batch=1)
    least = min(c.prediction.high_bytes for c in plain)
    plan = _plan(*words, num_processes=8, available_gib=0.9 * least * 8 / GIB, model=model)
    assert plan.chosen is not None
    assert plan.chosen.option.recompute != "none" or plan.chosen.option.axes != (8, 1, 1)
    asked = make_plan(model, plan.chosen_config, num_processes=8, machine=plan.machine)
    assert asked.configured.fits
    assert asked.configured.prediction == plan.chosen.prediction


def test_no_micro_batch_larger_than_asked_for() -> None:
    modest = _plan("--train.micro_batch=1")
    assert modest.chosen is not None
    assert modest.chosen.micro_batch == 1
    assert all("larger" in c.reason for c in modest.layouts if c.micro_batch == 2 and c.fits)
    tight = min(c.prediction.high_bytes for c in _plan("--train.micro_batch=4").layouts if c.micro_batch == 2)
    plan = _plan("--train.micro_batch=4", available_gib=2 * (tight + 1) / GIB)
    assert plan.chosen is not None
    assert plan.chosen.micro_batch <= 2


def test_nothing_fits_names_the_numbers_and_three_fixes() -> None:
    plan = _plan("--data.sequence_length=2048", available_gib=3, model=preset("llama-3.2-1b"))
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
        _plan("--data.sequence_length=8192", "--train.micro_batch=4", available_gib=6).require()
    except InfeasibleError as error:
        text = str(error)
    words = text.partition("No layout fits. ")[2].partition(" would fit")[0].split()
    assert "--data.sequence_length" in words
    fixed = _plan("--train.global_batch=8", *words, available_gib=6)
    assert fixed.configured.fits


def test_one_process_keeps_the_simplest_layout() -> None:
    plan = _plan(num_processes=1)
    assert plan.chosen is not None
    assert plan.chosen.zero == 0
    assert plan.chosen.option.recompute == "none"
    assert all(c.sent_bytes == 0 for c in plan.layouts)
    asked = _plan("--parallel.zero=3", num_processes=1)
    assert asked.configured.zero == 3
    assert asked.configured.prediction == plan.chosen.prediction


def test_processes_on_other_machines_do_not_share_this_one_s_memory() -> None:
    here = machine(memory_available_bytes=48 * GIB)
    plan = make_plan(SMOLLM, _config("--train.micro_batch=1"), num_processes=8, machine=here, processes_here=2)
    assert plan.budget_bytes == 24 * GIB


IMPOSSIBLE = {
    "heads": (("--parallel.tensor=4",), 4, "heads are not a multiple of parallel.tensor = 4"),
    "depth": (("--parallel.pipeline=32",), 32, "but the model has only 30 layers"),
    "sequence": (
        ("--parallel.tensor=3", "--parallel.sequence_parallel=true"),
        3,
        "data.sequence_length = 512 is not a multiple of parallel.tensor = 3",
    ),
    "processes": (("--parallel.tensor=3", "--parallel.pipeline=2"), 4, "4 processes are not a multiple of"),
    "too many": (("--parallel.data=4",), 2, "= 4 x 1 x 1 = 4 processes, but 2 were started"),
    "batch": (("--train.global_batch=9", "--train.micro_batch=3"), 2, "2 x 3 = 6"),
    "groups": (
        ("--parallel.pipeline=4", "--parallel.schedule=interleaved", "--train.global_batch=12"),
        4,
        "takes micro-batches in groups of parallel.pipeline = 4",
    ),
    "group": (("--parallel.zero=3", "--parallel.zero_group=3"), 4, "not a multiple of parallel.zero_group = 3"),
    "micro-batches": (("--parallel.micro_batches=7",), 2, "2 x 2 x 7 = 28 rows, but train.global_batch = 8"),
    "stages": (("--parallel.pipeline=2", "--parallel.virtual_stages=3"), 2, "puts one stage on a rank"),
    "a prime number": ((), 31, "is not a multiple of data ranks x train.micro_batch = 31 x 2"),
}


@pytest.mark.parametrize("name", sorted(IMPOSSIBLE))
def test_an_impossible_layout_is_told_with_the_nearest_that_works(name: str) -> None:
    words, num_processes, equation = IMPOSSIBLE[name]
    with pytest.raises(InfeasibleError) as caught:
        _plan(*words, num_processes=num_processes)
    text = str(caught.value)
    assert equation in text
    _, _, lines = text.partition(f"The nearest layout that works with {num_processes} processes:\n")
    fields = yaml.safe_load(lines)
    found = [f"--{section}.{key}={str(value).lower()}" for section in fields for key, value in fields[section].items()]
    assert require_layout(SMOLLM, _config(*words, *found), num_processes=num_processes).num_ranks == num_processes


def test_the_nearest_layout_keeps_what_it_can() -> None:
    def nearest(*words: str, num_processes: int) -> dict[str, Any]:
        with pytest.raises(InfeasibleError) as caught:
            _plan(*words, num_processes=num_processes)
        return yaml.safe_load(str(caught.value).partition("processes:\n")[2])

    found = nearest("--parallel.tensor=2", "--parallel.pipeline=2", "--parallel.zero=3", num_processes=8)
    assert found == {"parallel": {"data": 4, "tensor": 1, "pipeline": 2, "zero": 3, "schedule": "1f1b"}}
    found = nearest("--train.global_batch=4", "--train.micro_batch=2", num_processes=4)
    assert found == {"parallel": {"data": 4, "tensor": 1, "pipeline": 1, "zero": 0}, "train": {"micro_batch": 1}}


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
    assert len(result["alternatives"]) == 4  # the other stages, and two pipeline ranks
    assert result["num_candidates"] == len(plan.layouts)
    assert result["step_s"]["total"] == pytest.approx(sum(v for k, v in result["step_s"].items() if k != "total"))
    lines = plan_lines(plan)
    assert sum(line.startswith("why not") for line in lines) == 4
    assert sum(line.startswith("chosen: ") for line in lines) == 1
    assert "to take it: --parallel.zero 0 --train.micro_batch 2" in lines
    assert plan_table(plan).row_count == 5


def test_a_plan_of_all_axes_as_json_and_as_text() -> None:
    words = ("--parallel.tensor=2", "--parallel.pipeline=2", "--parallel.sequence_parallel=true", "--parallel.zero=3")
    more = ("--parallel.schedule=interleaved", "--parallel.activation_checkpointing=full", "--parallel.zero_group=2")
    plan = _plan(*words, *more, "--train.global_batch=32", num_processes=16, model=preset("llama-3.2-1b"))
    layout = json.loads(json.dumps(plan.to_json()))["configured"]["layout"]
    assert layout == {
        "data": 4,
        "tensor": 2,
        "pipeline": 2,
        "zero": 3,
        "micro_batch": 2,
        "num_micro_batches": 4,
        "zero_group": 2,
        "sequence_parallel": True,
        "schedule": "interleaved",
        "virtual_stages": 2,
        "activation_checkpointing": "full",
    }
    assert plan.configured.name == (
        "data 4 x tensor 2 x pipeline 2, ZeRO-3 over 2 ranks, sequence parallel, interleaved, micro-batch 2, full "
        "recomputation"
    )
    names = [short_name(each) for each in shown(plan)]
    assert "d4 t2 p2 Z3 full" in names
    assert len(names) == len(set(names))


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
