"""The search: what it answers, why not the others, and that it is quick."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from shardline.config import InfeasibleError, UsageError
from shardline.config.loader import load_config
from shardline.hardware.catalogue import device
from shardline.models.presets import preset
from shardline.planning.cluster.explain import found_lines, found_to_json
from shardline.planning.cluster.search import search
from shardline.planning.cluster.shape import ModelShape
from shardline.planning.cluster.space import Asked, outside, parse_layout

LLAMA = ModelShape.of(preset("llama-3.1-8b"), name="llama-3.1-8b")


def asked(**changes: Any) -> Asked:
    return Asked(
        **{
            "shape": LLAMA,
            "device": device("h100"),
            "num_devices": 8,
            "sequence_length": 8192,
            "global_batch": 64,
            **changes,
        }
    )


def test_the_answer_fits_and_nothing_that_fits_is_clearly_faster():
    found = search(asked(), top=10_000)
    assert found.best is not None
    assert found.best.memory.verdict == "fits"
    assert found.ranked[0] is found.best
    assert max(each.speed for each in found.ranked) <= 1.01 * found.best.speed
    assert all(each.job.layout.num_devices == 8 for each in found.ranked)


def test_why_not_the_obvious_ones():
    found = search(asked(num_devices=16, global_batch=128))
    why = {name: text for name, _, text in found.alternatives}
    assert "GiB of 79.1" in why["plain data parallelism"]
    assert "exposed communication" in why["tensor parallelism in the node"]
    assert why["tensor 16"].startswith("crosses nodes: ")


def test_what_is_given_is_kept():
    found = search(asked(fixed=parse_layout("tp=4,zero=1"), micro_batch=2, recompute="full"))
    for each in found.ranked:
        assert (each.job.layout.tensor, each.job.layout.zero, each.job.micro_batch) == (4, 1, 2)
        assert each.job.recompute == "full"
    assert not found.alternatives


def layouts(**changes: Any) -> list[Any]:
    return [each.job.layout for each in search(asked(**changes), top=100_000).ranked]


def test_schedules_of_a_pipeline_are_tried_as_far_as_the_engine_has_them():
    ours = {(each.schedule, each.virtual_stages) for each in layouts(fixed={"pipeline": 4})}
    assert ours == {("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble_v", 2)}
    assert {each.schedule for each in layouts(fixed={"pipeline": 4}, engine="deepspeed")} == {"1f1b"}
    given = parse_layout("pp=4,schedule=interleaved,vpp=8")
    assert {each.virtual_stages for each in layouts(fixed=given)} == {8}
    # Interleaving takes micro-batches in groups as large as the pipeline.
    for each in search(asked(fixed=given), top=1000).ranked:
        assert each.job.num_micro_batches % 4 == 0


def test_more_stages_on_a_rank_make_the_bubble_smaller():
    found = {}
    for schedule in ("1f1b", "interleaved", "zero_bubble_v"):
        fixed = {"pipeline": 4, "tensor": 2, "zero": 0, "schedule": schedule}
        best = search(asked(fixed=fixed, micro_batch=1, recompute="full", device=device("h200"))).ranked[0]
        found[schedule] = best.time.parts["bubble"]
    assert found["zero_bubble_v"] < found["interleaved"] < found["1f1b"]


def test_only_axes_that_an_engine_has_are_tried():
    for each in layouts(engine="torchtune", sequence_length=2048):
        assert each.tensor == each.pipeline == each.context == 1
    long: dict[str, Any] = {"sequence_length": 65536, "global_batch": 8}
    assert {each.context for each in layouts(**long)} == {1}
    assert {each.context for each in layouts(**long, engine="fsdp2")} >= {1, 2, 4}
    mixture = ModelShape.of(preset("mixtral-8x7b"))
    many: dict[str, Any] = {"shape": mixture, "num_devices": 64, "sequence_length": 4096}
    assert {each.expert for each in layouts(**many)} == {1}
    assert {each.expert for each in layouts(**many, engine="megatron")} >= {2, 4, 8}


def test_what_the_engine_lacks_is_said_and_calculated():
    found = search(asked(fixed={"context": 2}))
    assert found.best is not None
    assert any("Shardline does not train with context = 2" in line for line in found_lines(found))
    assert "As a config:" not in list(found_lines(found))
    assert outside(asked(engine="megatron", fixed={"zero": 3})) == ["ZeRO-3"]
    assert outside(asked(precision="fp8_mixed", optimizer="sgd")) == ["precision fp8_mixed", "optimizer sgd"]
    assert not outside(asked(fixed={"zero": 3, "pipeline": 2}))


def test_experts_are_not_shared_out_twice():
    """Each of 8 ranks with an eighth of the experts has all of their optimizer's state to itself."""
    mixture = ModelShape.of(preset("mixtral-8x7b"))
    common: dict[str, Any] = {"shape": mixture, "engine": "megatron", "micro_batch": 1, "offload": frozenset()}
    optimizer = {}
    for expert in (1, 8):
        fixed = {"expert": expert, "tensor": 1, "pipeline": 1, "zero": 1, "context": 1}
        optimizer[expert] = search(asked(**common, fixed=fixed)).ranked[0].memory.parts["optimizer"]
    assert optimizer[8] == pytest.approx(optimizer[1])


def test_states_go_to_the_host_only_where_nothing_fits_without():
    given: dict[str, Any] = {"device": device("rtx-4090"), "num_devices": 2, "sequence_length": 2048}
    found = search(asked(**given))
    assert found.best is not None
    assert found.best.job.offload
    assert any("in the host's memory nothing fits" in reason for reason in found_to_json(found)["reasons"])
    forbidden = search(asked(**given, offload=frozenset()))
    assert forbidden.best is None
    assert any("--offload" in change for change in forbidden.changes)
    assert not search(asked()).best.job.offload  # pyrefly: ignore


def test_passes_of_a_step_are_kept():
    for each in search(asked(num_micro_batches=8), top=1000).ranked:
        assert each.job.num_micro_batches == 8


def test_days_and_cost_of_a_token_budget():
    found = search(asked(tokens=1e12, price=2.0))
    assert found.best is not None
    seconds = 1e12 / (8 * found.best.speed)
    assert found.days == pytest.approx(seconds / 86400)
    assert found.cost == pytest.approx(seconds / 3600 * 8 * 2)
    assert any("1e+12 tokens take" in line for line in found_lines(found))
    assert search(asked()).days is None


def test_megatron_has_no_stage_above_1_and_deepspeed_none_in_a_pipeline():
    megatron = search(asked(engine="megatron"), top=10_000)
    assert {each.job.layout.zero for each in megatron.ranked} <= {0, 1}
    deepspeed = search(asked(engine="deepspeed"), top=10_000)
    assert {each.job.layout.zero for each in deepspeed.ranked if each.job.layout.pipeline > 1} <= {0, 1}


def test_a_13b_model_on_cards_of_32_gb_needs_its_state_shared():
    """Plain data parallelism fits on no number of them."""
    shape = ModelShape.from_parameters(13e9)
    common: dict[str, Any] = {"shape": shape, "device": device("v100-32gb"), "sequence_length": 2048}
    for count in (1, 8, 64):
        fixed = {"tensor": 1, "pipeline": 1, "zero": 0}
        found = search(asked(**common, num_devices=count, global_batch=8 * count, precision="fp16_mixed", fixed=fixed))
        assert found.best is None
    alone = search(asked(**common, num_devices=1, global_batch=8, precision="fp16_mixed", offload=frozenset()))
    assert alone.best is None
    assert any("devices" in change for change in alone.changes)
    eight: dict[str, Any] = {**common, "num_devices": 8, "global_batch": 64, "precision": "fp16_mixed"}
    # Published experience: ZeRO-2 with the optimizer in the host's memory trains there.
    fixed = {"tensor": 1, "pipeline": 1, "zero": 2}
    offloaded = search(asked(**eight, engine="deepspeed", fixed=fixed, offload=frozenset({"optimizer"})))
    assert offloaded.best is not None
    assert search(asked(**eight, engine="deepspeed", fixed=fixed, offload=frozenset())).best is None
    found = search(asked(**eight, engine="deepspeed"))
    assert found.best is not None
    why = {name: text for name, _, text in found.alternatives}
    assert why["plain data parallelism"].endswith("on any number of devices")
    for name in ("tensor parallelism in the node", "a pipeline without tensor parallelism"):
        match = re.search(r"alone it takes (\d+) devices", why[name])
        assert match is not None
        assert 8 < int(match[1]) < 24  # 16 bytes a parameter are 193 GiB of 31.7 each


def test_the_changes_named_do_help():
    given: dict[str, Any] = {"recompute": "none", "device": device("rtx-4090")}
    found = search(asked(**given, num_devices=1, global_batch=8, micro_batch=8))
    assert found.best is None
    assert found_to_json(found)["fits"] is False
    bigger = next(change for change in found.changes if " devices" in change)
    count = int(bigger.split()[0])
    assert bigger.startswith(f"{count} devices, recomputing what has to be")
    assert search(asked(**{**given, "recompute": None}, num_devices=count, global_batch=8 * count)).best is not None


def test_a_thousand_devices_take_less_than_two_seconds():
    started_s = time.process_time()
    found = search(asked(num_devices=1024, global_batch=2048))
    assert found.best is not None
    assert time.process_time() - started_s < 2


@pytest.mark.parametrize(
    ("changes", "equation"),
    [
        ({"fixed": {"tensor": 3}}, "tensor 3 = 3, which does not make 8 devices"),
        (
            {"fixed": {"data": 2, "tensor": 2, "pipeline": 1}},
            "data 2 x tensor 2 x pipeline 1 = 4, which does not make 8 devices",
        ),
        (
            {"num_devices": 64, "fixed": {"tensor": 64}, "global_batch": 64},
            "32 heads are not a multiple of tensor = 64",
        ),
        ({"num_devices": 64, "fixed": {"pipeline": 64}}, "pipeline = 64 stages are more than the 32 layers"),
        (
            {"global_batch": 7, "fixed": {"data": 8}},
            "micro_batch 1 x up to 8 data ranks x 1 micro-batches; make it a multiple of 8",
        ),
    ],
    ids=str,
)
def test_impossible_layouts_say_their_equation(changes: dict[str, Any], equation: str):
    with pytest.raises(InfeasibleError) as error:
        search(asked(**changes))
    assert equation in str(error.value)


@pytest.mark.parametrize("text", ["up=2", "tp=0", "tp=-1", "tp=x", "zero=4", "tp"])
def test_layouts_that_are_none_are_refused(text: str):
    with pytest.raises(UsageError, match="--layout: "):
        parse_layout(text)


def test_the_config_that_is_printed_loads(tmp_path):
    piped = {"num_devices": 64, "global_batch": 256}
    schedules = [parse_layout(f"pp=4,tp=2,schedule={name}") for name in ("1f1b", "interleaved", "zero_bubble_v")]
    moved: dict[str, Any] = {"offload": frozenset({"optimizer", "parameters"}), "fixed": {"zero": 3}}
    for changes in ({}, moved, *({**piped, "fixed": fixed} for fixed in schedules)):
        lines = list(found_lines(search(asked(**changes))))
        start = lines.index("As a config:") + 1
        text = "\n".join(line[2:] for line in lines[start:] if line.startswith("  "))
        (tmp_path / "run.yaml").write_text(text + "\n")
        config = load_config(str(tmp_path / "run.yaml"), [])
        assert config.data.sequence_length == 8192
        assert config.train.global_batch == changes.get("global_batch", 64)
        assert config.parallel.schedule == changes.get("fixed", {}).get("schedule", "1f1b")
        assert (config.parallel.offload.params == "cpu") == ("offload" in changes)
