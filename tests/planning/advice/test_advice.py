"""Advice: what is chosen for each goal, and that packages' health and the platform change it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from pathlib import Path

import pytest

from shardline.cli.main import VERBS
from shardline.config import UsageError
from shardline.hardware.catalogue import device, parse_devices
from shardline.hardware.health import Health, find_health, health_table
from shardline.planning.advice.advice import advise, goal_names, goal_question, packages_of
from shardline.planning.advice.text import advice_lines, advice_to_json

GOALS = ("research", "cheapest", "throughput", "latency", "mobile", "browser", "tpu", "amd", "legacy-tensorflow")
DOCS = Path(__file__).parents[3] / "docs"


def table_health(goal: str) -> tuple[Health, ...]:
    return find_health(packages_of(goal), find=lambda: None)


def test_every_goal_has_an_answer_with_sources() -> None:
    assert goal_names() == GOALS
    for goal in GOALS:
        found = advise(goal, health=table_health(goal))
        assert found.train.chosen is not None
        assert found.serve.chosen is not None
        for each in (found.train.chosen, *found.train.others, found.serve.chosen, *found.serve.others, *found.avoid):
            assert each.why
            assert each.source
        assert len(found.rule.reasons) >= 3
        lines = list(advice_lines(found))
        assert any(line.startswith("Do not write your own framework, unless ") for line in lines)
        assert any("Shardline is" in line for line in lines)
        assert advice_to_json(found)["train"]["chosen"]["name"] == found.train.chosen.name


def test_shardline_is_not_always_the_answer() -> None:
    answers = {goal: advise(goal, health=()).shardline.answer for goal in GOALS}
    assert set(answers.values()) == {"yes", "partly", "no"}
    assert answers["tpu"] == answers["browser"] == "no"


def test_packages_are_known_to_the_table_without_a_network() -> None:
    known = {row.package for row in health_table().rows}
    for goal in GOALS:
        assert set(packages_of(goal)) <= known


def test_an_unmaintained_package_is_passed_over_for_the_next() -> None:
    before = advise("throughput", health=table_health("throughput"))
    assert before.serve.chosen is not None
    assert before.serve.chosen.package == "vllm"
    ended = [
        dataclasses.replace(each, verdict="unmaintained", reason="its team left") if each.package == "vllm" else each
        for each in table_health("throughput")
    ]
    after = advise("throughput", health=ended)
    assert after.serve.chosen is not None
    assert after.serve.chosen.package == "sglang"
    ((choice, why),) = after.serve.passed_over
    assert choice.package == "vllm"
    assert why == "vllm is unmaintained: its team left"
    assert "  not vLLM: vllm is unmaintained: its team left." in list(advice_lines(after))


def test_nothing_is_left_where_all_packages_have_ended() -> None:
    ended = [dataclasses.replace(each, verdict="unmaintained") for each in table_health("amd")]
    found = advise("amd", health=ended)
    assert found.serve.chosen is None
    assert "Serve with nothing of what is known: all of it was passed over." in list(advice_lines(found))


def test_torch_xla_is_passed_over_today() -> None:
    found = advise("tpu", health=table_health("tpu"), device=device("tpu-v5e"))
    assert [choice.package for choice, _ in found.train.passed_over] == ["torch-xla"]
    assert not found.conflict


def test_the_platform_decides_too() -> None:
    nvidia = advise("latency", health=(), device=device("h100")).serve
    amd = advise("latency", health=(), device=device("mi300x")).serve
    assert nvidia.chosen is not None
    assert amd.chosen is not None
    assert nvidia.chosen.framework == "tensorrt-llm"
    assert amd.chosen.framework == "vllm"
    assert [choice.name for choice, _ in amd.passed_over] == ["TensorRT-LLM", "OpenVINO GenAI"]
    _, cores = parse_devices("cpu:2")
    assert any("runs partly on CPUs" in note for note in advise("latency", health=(), device=cores).serve.notes)


def test_a_device_that_contradicts_the_goal_is_named() -> None:
    found = advise("tpu", health=(), device=device("h100"))
    assert found.conflict == "h100-80gb is of NVIDIA GPUs, and the goal tpu is for TPUs"
    assert found.train.chosen is not None
    assert found.train.chosen.framework == "jax"
    assert any(line.startswith("But h100-80gb") for line in advice_lines(found))


def test_commands_exist() -> None:
    for goal in GOALS:
        for command in advise(goal, health=()).shardline.commands:
            program, verb, *words = command.split()
            assert program == "shardline"
            assert verb in VERBS
            parser = argparse.ArgumentParser(allow_abbrev=False)
            importlib.import_module(f"shardline.cli.{verb}").add_arguments(parser)
            parser.parse_args(words)


def test_an_unknown_goal_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"--goal 'troughput' is not known; did you mean 'throughput'\?"):
        advise("troughput", health=())


def test_the_page_says_what_the_data_says() -> None:
    text = (DOCS / "choosing.md").read_text(encoding="utf-8")
    for goal in GOALS:
        found = advise(goal, health=table_health(goal))
        assert found.train.chosen is not None
        assert found.serve.chosen is not None
        row = next(line for line in text.splitlines() if line.startswith(f"| `{goal}` |"))
        assert goal_question(goal) in row
        assert found.train.chosen.name in row
        assert found.serve.chosen.name in row
        assert row.rstrip(" |").endswith(found.shardline.answer)
