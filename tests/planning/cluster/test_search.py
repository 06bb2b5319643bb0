"""The search: what it answers, why not the others, and that it is quick."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shardline.config import InfeasibleError, UsageError
from shardline.config.loader import load_config
from shardline.hardware.catalogue import device
from shardline.models.presets import preset
from shardline.planning.cluster.explain import found_lines, found_to_json
from shardline.planning.cluster.search import Asked, parse_layout, search
from shardline.planning.cluster.shape import ModelShape

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
    alone = search(asked(**common, num_devices=1, global_batch=8, precision="fp16_mixed"))
    assert alone.best is None
    assert any("devices" in change for change in alone.changes)
    assert search(asked(**common, num_devices=8, global_batch=64, precision="fp16_mixed")).best is not None


def test_the_changes_named_do_help():
    given: dict[str, Any] = {"recompute": "none", "device": device("rtx-4090")}
    found = search(asked(**given, num_devices=1, global_batch=8, micro_batch=8))
    assert found.best is None
    assert found_to_json(found)["fits"] is False
    bigger = next(change for change in found.changes if " devices" in change)
    count = int(bigger.split()[0])
    assert bigger == f"{count} devices, recomputing what has to be"
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
        ({"global_batch": 7, "fixed": {"data": 8}}, "must be a multiple of micro_batch x data, for example 8"),
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
    for changes in ({}, {"num_devices": 64, "global_batch": 256, "fixed": {"pipeline": 4, "tensor": 2}}):
        lines = list(found_lines(search(asked(**changes))))
        start = lines.index("As a config:") + 1
        text = "\n".join(line[2:] for line in lines[start:] if line.startswith("  "))
        (tmp_path / "run.yaml").write_text(text + "\n")
        config = load_config(str(tmp_path / "run.yaml"), [])
        assert config.data.sequence_length == 8192
        assert config.train.global_batch == changes.get("global_batch", 64)
