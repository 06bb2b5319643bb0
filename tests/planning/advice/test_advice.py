"""Advice: what is chosen for each goal, and that packages' health, the platform and measurements change it."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
from pathlib import Path

import pytest

from shardline.cli.main import VERBS
from shardline.config import UsageError
from shardline.hardware.catalogue import device, parse_devices
from shardline.hardware.health import Health, find_health, health_table
from shardline.hardware.strict import StrictError, convert_strictly
from shardline.hardware.tables import tables
from shardline.planning.advice.advice import Advice, advise, goal_names, goal_question, packages_of
from shardline.planning.advice.book import Book, Choice, book
from shardline.planning.advice.measured import Measured, read_measurements
from shardline.planning.advice.picks import PLATFORMS, Picked
from shardline.planning.advice.text import advice_lines, advice_to_json

GOALS = ("research", "cheapest", "throughput", "latency", "mobile", "browser", "tpu", "amd", "legacy-tensorflow")
ROOT = Path(__file__).parents[3]


def table_health(goal: str) -> tuple[Health, ...]:
    return find_health(packages_of(goal), find=lambda: None)


def health_with(goal: str, **verdicts: str) -> list[Health]:
    """The table's health, but for some packages."""
    names = {name.replace("_", "-"): verdict for name, verdict in verdicts.items()}
    assert set(names) <= set(packages_of(goal))
    return [
        dataclasses.replace(each, verdict=names.get(each.package, "active"), reason="its team left")
        for each in table_health(goal)
    ]


def chosen(picked: Picked) -> Choice:
    assert picked.chosen is not None
    return picked.chosen


def lines(advice: Advice) -> list[str]:
    return [line.plain.strip() for line in advice_lines(advice)]


@pytest.mark.parametrize("goal", GOALS)
def test_every_goal_has_an_answer_with_reasons_sources_and_dates(goal):
    found = advise(goal, health=table_health(goal))
    picked = (found.train, found.serve)
    choices = [each for side in picked for each in (chosen(side), *side.others, *(one for one, _ in side.passed_over))]
    for each in choices:
        assert each.why
        for reason in each.why:
            assert reason.text
            assert reason.source
            assert reason.date <= found.checked_on
    assert sum(len(chosen(side).why) for side in picked) >= 2, "several reasons"
    assert found.turns
    assert all(each.why and each.source for each in found.avoid)
    text = lines(found)
    assert f"Train with {chosen(found.train).name}" in text
    assert f"Serve with {chosen(found.serve).name}" in text
    assert any(line.startswith("Do not write your own framework, unless ") for line in text)
    assert any(line.startswith("Shardline is") for line in text)
    values = json.loads(json.dumps(advice_to_json(found)))
    assert values["serve"]["chosen"]["name"] == chosen(found.serve).name
    assert values["serve"]["chosen"]["why"][0]["date"]


def test_the_goals_are_the_nine():
    assert goal_names() == GOALS


def test_what_must_stay_true_of_the_first_choices():
    first = {goal: advise(goal, health=[]) for goal in GOALS}
    assert "vLLM" in chosen(first["throughput"].serve).name
    assert chosen(first["latency"].serve).framework == "tensorrt-llm"
    assert chosen(first["mobile"].serve).framework == "executorch"
    assert {each.framework for each in first["mobile"].serve.others} >= {"litert", "llama.cpp"}
    assert chosen(first["browser"].serve).framework == "webllm"
    assert {each.framework for each in first["browser"].serve.others} >= {"onnxruntime-web"}
    assert chosen(first["tpu"].train).framework == "jax"
    assert chosen(first["amd"].serve).framework == "vllm"
    assert chosen(first["cheapest"].serve).framework == "llama.cpp"
    assert "TensorFlow Serving" in chosen(first["legacy-tensorflow"].serve).name


def test_shardline_is_not_always_the_answer():
    answers = {goal: advise(goal, health=()).shardline.answer for goal in GOALS}
    assert set(answers.values()) == {"yes", "partly", "no"}
    assert answers["tpu"] == answers["browser"] == answers["mobile"] == "no"


def test_the_data_hang_together():
    known = {row.package for row in health_table().rows}
    platforms = set(PLATFORMS)
    assert {row.platform for row in tables().platforms.rows} == platforms
    for name, goal in book().goals.items():
        assert set(packages_of(name)) <= known, "offline too"
        assert set(goal.platforms) <= platforms
        for side in (goal.train, goal.serve):
            assert len({each.name for each in side}) == len(side)
            assert len({each.health_name for each in side}) > 1, f"{name}: nobody to run up"
            for each in side:
                assert each.health_name, f"{name}: {each.name} has no health"
                assert bool(each.package) != bool(each.release)
                assert set(each.platforms) <= platforms
    for caution in book().cautions:
        assert caution.platform in platforms
        assert set(caution.goals) <= set(GOALS)


def test_own_documents_that_are_cited_exist():
    goals = book().goals.values()
    sources = [reason.source for goal in goals for each in (*goal.train, *goal.serve) for reason in each.why]
    sources += [each.source for goal in goals for each in goal.avoid]
    sources += [each.source for each in (*book().rule.reasons, *book().cautions)]
    words = [word.strip(",;") for source in sources for word in source.split()]
    own = {word for word in words if word.startswith("docs/")} - {"docs/android.md", "docs/user-guide"}
    assert len(own) > 5
    for path in own:
        assert (ROOT / path).exists(), path
    for path in {word for word in words if word.startswith("hardware/")}:
        assert (ROOT / "src" / "shardline" / path).exists(), path


def test_an_unknown_key_is_an_error():
    values = {"checked_on": datetime.date(2026, 12, 1), "rule": {"statment": "x"}, "cautions": [], "goals": {}}
    with pytest.raises(StrictError, match="Unknown key 'statment' in rule; did you mean 'statement'"):
        convert_strictly(values, Book)


@pytest.mark.parametrize("verdict", ["slow", "unmaintained"])
def test_a_package_that_is_not_looked_after_is_passed_over_for_the_next(verdict):
    assert chosen(advise("throughput", health=health_with("throughput")).serve).package == "vllm"
    found = advise("throughput", health=health_with("throughput", vllm=verdict))
    assert chosen(found.serve).package == "sglang"
    assert found.serve.because == f"vLLM comes first for this goal, but vllm is {verdict}: its team left"
    assert [(each.package, why) for each, why in found.serve.passed_over] == [
        ("vllm", f"vllm is {verdict}: its team left")
    ]
    assert f"{found.serve.because}." in lines(found)
    assert "Serve with SGLang" in lines(found)


def test_the_last_one_is_taken_if_it_is_slow_and_never_if_it_is_unmaintained():
    verdicts = {"torch": "unmaintained", "maxtext": "slow", "torchtitan": "unmaintained"}
    found = advise("throughput", health=health_with("throughput", **verdicts), device=device("h100"))
    assert chosen(found.train).package == "maxtext"
    assert any("nothing is left that is looked after better" in note for note in found.train.notes)
    verdicts["maxtext"] = "unmaintained"
    found = advise("throughput", health=health_with("throughput", **verdicts), device=device("h100"))
    assert found.train.chosen is None
    assert "Train with nothing of what is known: all of it was passed over." in lines(found)
    assert [each.package for each, _ in found.train.passed_over] == ["torch", "torchtitan", "maxtext"]


def test_few_releases_do_not_matter_where_the_data_say_why():
    health = health_with("legacy-tensorflow", keras="slow", tensorflow="slow", transformers="unmaintained")
    found = advise("legacy-tensorflow", health=health)
    assert chosen(found.train).package == "tensorflow"
    assert sum("what works is only kept alive" in line for line in lines(found)) == 1
    assert [each.package for each, _ in found.train.passed_over] == ["keras", "transformers"]


def test_today_by_the_dated_table():
    found = advise("tpu", health=table_health("tpu"), device=device("tpu-v5e"))
    assert [each.package for each, _ in found.train.passed_over] == ["torch-xla"]
    assert "torch-tpu" in [each.package for each in found.train.others]
    assert not found.conflict
    latency = advise("latency", health=table_health("latency"), device=device("h100"))
    assert chosen(latency.serve).package == "vllm", "TensorRT-LLM's last release that is no candidate is of 2026-04"
    assert "TensorRT-LLM comes first for this goal, but tensorrt-llm is slow" in latency.serve.because


def test_what_is_on_other_registries_has_a_health_too():
    found = advise("browser", health=table_health("browser"))
    (web_llm,) = (each for each in found.health if each.package == "@mlc-ai/web-llm")
    assert (web_llm.verdict, web_llm.last_release) == ("active", "2026-10-11")
    assert web_llm.checked.startswith("npm, seen on ")
    ended = [*table_health("browser"), dataclasses.replace(web_llm, verdict="unmaintained", reason="its team left")]
    assert chosen(advise("browser", health=ended).serve).name == "transformers.js on ONNX Runtime Web"


def test_a_package_that_nobody_knows_is_taken_and_said_to_be_unknown():
    unknown = Health(
        package="vllm", verdict="unknown", reason="", fix="", age="", days=None,
        last_version=None, last_release=None, checked="",
    )  # fmt: skip
    found = advise("throughput", health=[unknown])
    assert chosen(found.serve).package == "vllm"
    assert "vLLM: nothing is known of the health of vllm" in found.serve.notes


def test_the_hardware_matrix_decides_too():
    nvidia = advise("latency", health=(), device=device("h100")).serve
    amd = advise("latency", health=(), device=device("mi300x"))
    assert chosen(nvidia).framework == "tensorrt-llm"
    assert chosen(amd.serve).framework == "vllm"
    assert ("TensorRT-LLM", "does not run on AMD GPUs (NVIDIA only)") in [
        (each.name, why) for each, why in amd.serve.passed_over
    ]
    assert any("the goal `amd` says more" in line for line in lines(amd))


def test_a_cpu_is_told_what_it_is_for():
    _, cores = parse_devices("cpu:2")
    found = advise("throughput", health=(), device=cores)
    assert any(line.startswith("A CPU trains tests and models") for line in lines(found))
    assert any(line.startswith("For many users a CPU is the wrong device") for line in lines(found))
    assert any("vllm runs partly on CPUs: its CPU build" in note for note in found.serve.notes)
    assert "SGLang" in [each.name for each, _ in found.serve.passed_over]


def test_an_old_card_is_told_which_wheel_and_which_runtime_still_take_it():
    found = advise("throughput", health=(), device=device("V100-32GB"))
    assert chosen(found.serve).framework == "llama.cpp"
    assert found.serve.because.endswith("needs compute capability 7.5, and this is 7.0")
    assert any("compute capability 7.0 is 2.14, for CUDA 12.6" in note for note in found.train.notes)
    assert "not SGLang: needs compute capability 7.5, and this is 7.0." in lines(found)
    assert sum("this is 7.0" in line for line in lines(found)) == 2, "one line for each that is passed over"
    new = advise("throughput", health=(), device=device("h100"))
    assert not any("newest wheel" in note for note in new.train.notes)


def test_a_device_that_contradicts_the_goal_is_named_and_what_it_does_is_said():
    found = advise("tpu", health=table_health("tpu"), device=device("h100"))
    assert found.conflict == "h100-80gb is of NVIDIA GPUs, and the goal tpu is for TPUs"
    assert chosen(found.train).framework == "jax"
    assert chosen(found.serve).package == "vllm-torchtpu"
    here = found.here
    assert here is not None
    assert chosen(here.train).name == "JAX with MaxText"
    assert here.serve.chosen is None
    assert "throughput" in here.goals
    assert "tpu" not in here.goals
    assert {(row.framework, row.support) for row in here.rows} >= {("jax", "yes"), ("vllm", "yes")}
    text = lines(found)
    assert any(line.startswith("But h100-80gb") for line in text)
    assert "On h100-80gb, of all this: train with JAX with MaxText, serve with nothing of it." in text
    assert any("jax: yes (with its cuda12 or cuda13 plugin)" in line for line in text)
    assert advice_to_json(found)["here"]["platform"] == "cuda"


def test_a_goal_for_one_platform_takes_its_rows_without_a_device():
    found = advise("amd", health=())
    assert found.platform is None
    assert any("jax runs partly on AMD GPUs" in note for note in found.train.notes)


def test_shardline_is_no_answer_where_it_does_not_run():
    found = advise("research", health=(), device=device("tpu-v5e"))
    assert found.shardline.answer == "no"
    assert "does not run on TPUs" in found.shardline.part
    assert "Shardline" not in chosen(found.train).name
    assert advise("research", health=(), device=device("h100")).shardline.answer == "yes"


def test_a_phone_is_not_asked_what_the_training_device_runs():
    found = advise("mobile", health=(), device=device("tpu-v5e"))
    assert chosen(found.serve).name == "ExecuTorch"
    assert chosen(found.train).name == "transformers with PEFT (LoRA)"


def test_measurements_are_shown_and_decide_where_speed_is_money():
    measured = (
        Measured(framework="torch", tokens_per_s=1000.0),
        Measured(framework="mlx", tokens_per_s=1500.0),
        Measured(framework="mlx", tokens_per_s=1200.0),
    )
    cheap = advise("cheapest", health=(), measured=measured)
    assert chosen(cheap.train).framework == "mlx"
    assert cheap.train.because == "you measured mlx at 1.50 times torch's speed, and speed is money here"
    assert "You measured torch at 1,000 tokens/s (67%), mlx at 1,500 tokens/s (100%)." in lines(cheap)
    research = advise("research", health=(), measured=measured)
    assert chosen(research.train).framework == "torch", "speed does not decide for research"
    near = (Measured(framework="torch", tokens_per_s=1000.0), Measured(framework="mlx", tokens_per_s=1050.0))
    assert chosen(advise("cheapest", health=(), measured=near).train).framework == "torch"


def test_a_file_of_measurements(tmp_path):
    path = tmp_path / "measured.json"
    path.write_text('{"results": [{"framework": "torch", "step_s": 0.5, "mode": "eager"}]}')
    assert read_measurements(path) == (Measured(framework="torch", step_s=0.5),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "has no list `results`"),
        ('{"results": []}', "has no list `results`"),
        ('{"results": [{"step_s": 1}]}', r"results\[0\] does not name its `framework`"),
        ('{"results": [{"framework": "jax"}]}', "neither tokens_per_s nor step_s"),
        ('{"results": [{"framework": "jax", "step_s": -1}]}', "step_s is -1.*above 0"),
        ('{"results": [{"framework": "jax", "tokens_per_s": NaN}]}', "tokens_per_s is nan"),
        (
            '{"results": [{"framework": "jax", "step_s": 1}, {"framework": "torch", "tokens_per_s": 9}]}',
            "all of them in one",
        ),
    ],
)
def test_a_wrong_file_of_measurements_is_said_to_be(tmp_path, text, says):
    path = tmp_path / "measured.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        read_measurements(path)


@pytest.mark.parametrize("name", [None, "h100", "mi300x", "tpu-v5e", "cpu:2"])
def test_commands_exist(name):
    where = None if name is None else parse_devices(name)[1]
    for goal in GOALS:
        found = advise(goal, health=(), device=where)
        commands = [*found.shardline.commands, *(word for side in (found.train, found.serve) for word in _run(side))]
        ours = [command for command in commands if command.startswith("shardline ")]
        assert ours
        for command in ours:
            assert "{" not in command
            _, verb, *words = command.split()
            assert verb in VERBS
            parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
            importlib.import_module(f"shardline.cli.{verb}").add_arguments(parser)
            args = parser.parse_args(words)
            if getattr(args, "devices", None):
                parse_devices(args.devices)


def _run(side: Picked) -> list[str]:
    return [command for each in (chosen(side), *side.others) for command in each.run]


def test_commands_name_the_device_that_was_given():
    (command,) = advise("throughput", health=(), device=device("mi300x")).shardline.commands
    assert "--devices 8xmi300x" in command.lower()


def test_an_unknown_goal_names_the_nearest():
    with pytest.raises(UsageError, match=r"--goal 'troughput' is not known; did you mean 'throughput'\?"):
        advise("troughput", health=())
    with pytest.raises(UsageError, match=r"--goal 'xyzzy' is not known; choose one of amd, browser"):
        packages_of("xyzzy")


def test_lines_are_folded_to_a_terminal_but_commands_are_not():
    found = advise("throughput", health=table_health("throughput"), device=device("h100"))
    rows = [line.plain for line in advice_lines(found, width=80)]
    long = [row for row in rows if len(row) > 80]
    assert long
    assert all(row.strip().startswith("shardline ") or "http" in row for row in long)


def test_the_page_says_what_the_data_says():
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    for goal in GOALS:
        found = advise(goal, health=table_health(goal))
        row = next(line for line in text.splitlines() if line.startswith(f"| `{goal}` |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells == [
            f"`{goal}`",
            goal_question(goal),
            chosen(found.train).name,
            chosen(found.serve).name,
            found.shardline.answer,
        ]
