"""The strict loader: what it accepts, and the sentence for what it does not."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import yaml

from shardline.config import (
    InfeasibleError,
    ParameterGroupConfig,
    RunConfig,
    UsageError,
    dump_config,
    iter_fields,
    json_schema,
    load_config,
)


@pytest.fixture
def write(tmp_path):
    def write(text: str):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def test_an_empty_file_is_the_defaults(write):
    assert load_config(write("")) == load_config(None) == RunConfig()


def test_file_then_overrides(write):
    path = write("train: {steps: 7, global_batch: 4}\nmodel: {preset: tiny}\n")
    words = ["--train.steps", "9", "--parallel.data=2", "--optimizer.betas", "[0.8, 0.9]", "--optimizer.lr", "1e-4"]
    config = load_config(path, words)
    assert (config.train.steps, config.train.global_batch, config.parallel.data) == (9, 4, 2)
    assert (config.optimizer.betas, config.optimizer.lr) == ((0.8, 0.9), 1e-4)


def test_dashes_and_underscores_are_the_same_on_the_command_line():
    assert load_config(None, ["--train.micro-batch", "1"]).train.micro_batch == 1


def test_a_section_with_nothing_below_it_has_its_defaults(write):
    assert load_config(write("train:\noptimizer:\n")) == RunConfig()


def test_what_is_dumped_loads_equal(write):
    config = load_config(None, ["--train.seed", "3", "--model.path", "some/folder", "--parallel.zero", "2"])
    assert load_config(write(dump_config(config))) == config


FAULTS = {
    "train:\n  stpes: 3\n": "run.yaml:2: unknown key 'train.stpes'; did you mean 'steps'?",
    "trian: {}\n": "run.yaml:1: unknown key 'trian'; did you mean 'train'?",
    "steps: 3\n": "run.yaml:1: unknown key 'steps'; did you mean 'train.steps'?",
    "parallel:\n  data: 1\n  zero: 4\n": "run.yaml:3: parallel.zero = 4: expected one of 0, 1, 2, 3.",
    "train:\n  steps: many\n": "run.yaml:2: train.steps = 'many': expected `int`, got `str`.",
    "train:\n  steps: -1\n": "run.yaml:2: train.steps = -1: expected `int` >= 0.",
    "train: 3\n": "run.yaml:1: train is a section",
    "train: {steps: 1}\ntrain: {steps: 2}\n": "run.yaml:2: train is set twice (first at",
    "train: {steps: 1\n": "run.yaml:2: this is not valid YAML",
    "- 1\n": "run.yaml:1: expected a mapping",
    "optimizer: {name: adma}\n": "run.yaml:1: optimizer.name = 'adma': expected one of adamw, adafactor, muon",
    "optimizer: {betas: [0.9]}\n": "run.yaml:1: optimizer.betas = [0.9]: expected `array` of length 2, got 1.",
    "optimizer: {betas: [0.9, 1.0]}\n": "optimizer.betas = [0.9, 1.0] must each lie in [0, 1).",
    "parallel: {offload: {optimizer: nvme}}\n": "parallel.offload.optimizer = 'nvme': expected one of none, cpu, disk.",
    "parallel: {offload: {paramz: cpu}}\n": "unknown key 'parallel.offload.paramz'; did you mean 'params'?",
    "optimizer:\n  groups:\n    - pattern: a\n    - pattern: b\n      lr_scal: 2\n": (
        "run.yaml:5: unknown key 'optimizer.groups.1.lr_scal'; did you mean 'lr_scale'?"
    ),
    "optimizer:\n  groups:\n    - pattern: a\n      lr_scale: -1\n": (
        "run.yaml:4: optimizer.groups.0.lr_scale = -1: expected `float` >= 0.0."
    ),
    "optimizer:\n  groups:\n    - lr_scale: 1\n": "run.yaml:3: optimizer.groups.0 = {'lr_scale': 1}: object missing",
    "optimizer:\n  groups: [embed]\n": "run.yaml:2: optimizer.groups.0 is a section; write its keys below it",
    "optimizer:\n  groups: 3\n": "run.yaml:2: optimizer.groups = 3: expected `array`, got `int`.",
    "train: {global_batch: 8, micro_batch: 3}\n": "train.global_batch = 8 is not a multiple of train.micro_batch = 3",
}


@pytest.mark.parametrize("text", sorted(FAULTS))
def test_faults_name_the_place_and_the_nearest_key(text, write):
    with pytest.raises(UsageError) as error:
        load_config(write(text))
    assert FAULTS[text] in str(error.value)


OVERRIDE_FAULTS = {
    ("--train.stpes", "3"): "command line: unknown key 'train.stpes'; did you mean 'steps'?",
    ("--parallel.zero", "9"): "command line: parallel.zero = 9: expected one of 0, 1, 2, 3.",
    ("--train.steps",): "--train.steps needs a value",
    ("train.steps=3",): "Unexpected argument 'train.steps=3'",
    ("--run.deep", "1"): "command line: run = {'deep': 1}: expected `str`, got `object`.",
    ("--train.steps.deep", "1"): "command line: train.steps = {'deep': 1}: expected `int`, got `object`.",
}


@pytest.mark.parametrize("words", sorted(OVERRIDE_FAULTS))
def test_overrides_are_checked_too(words):
    with pytest.raises(UsageError) as error:
        load_config(None, list(words))
    assert OVERRIDE_FAULTS[words] in str(error.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        load_config(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8 text"):
        load_config(tmp_path / "binary.yaml")


def test_every_field_is_documented_and_in_the_schema():
    schema = json_schema()
    sections = {section["title"]: section for section in schema["$defs"].values()}
    for name, field in iter_fields():
        assert field.metadata["doc"], name
    described = [body for section in sections.values() for body in section["properties"].values() if "$ref" not in body]
    assert len(described) == len(list(iter_fields()))
    assert all(body["description"] for body in described)
    assert all(section["additionalProperties"] is False for section in sections.values())


def test_config_is_frozen_and_keyword_only():
    config = RunConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run = "elsewhere"
    with pytest.raises(TypeError):
        RunConfig("positional")
    assert msgspec.to_builtins(config)["train"]["steps"] == config.train.steps


def test_a_list_of_sections_is_read_and_written_whole(write):
    text = "optimizer: {groups: [{pattern: '*norm*', lr_scale: 0.5}, {pattern: b, freeze: true}]}\n"
    config = load_config(write(text))
    assert config.optimizer.groups == (
        ParameterGroupConfig(pattern="*norm*", lr_scale=0.5),
        ParameterGroupConfig(pattern="b", freeze=True),
    )
    assert load_config(write(dump_config(config))) == config
    assert yaml.safe_load(dump_config(config))["optimizer"]["groups"][1] == {
        "pattern": "b",
        "lr_scale": 1.0,
        "weight_decay": None,
        "freeze": True,
    }


def test_offloading_what_a_layout_keeps_whole_is_infeasible_and_names_what_works():
    with pytest.raises(InfeasibleError, match=r"parallel.zero = 1 keeps whole parameters.*set parallel.zero to 3"):
        load_config(None, ["--parallel.offload.params=cpu", "--parallel.zero=1"])
    load_config(None, ["--parallel.offload.params=cpu", "--parallel.zero=3"])
    with pytest.raises(InfeasibleError, match="has none worth moving"):
        load_config(None, ["--parallel.offload.optimizer=disk", "--optimizer.name=adamw_8bit"])


def test_a_section_given_in_part_is_written_whole():
    config = load_config(None, ["--data.sequence_length=128"])
    assert yaml.safe_load(dump_config(config))["data"] == {
        **dataclasses.asdict(load_config(None).data),
        "sequence_length": 128,
    }
