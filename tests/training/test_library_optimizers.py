"""Muon, Adafactor and 8-bit AdamW: whole matrices, so every layout gives one process's losses; groups by pattern."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from shardline.config import OptimizerConfig, ParameterGroupConfig, UsageError
from shardline.parallel.dealing import deal, largest_first
from shardline.parallel.offload import DeviceMemory
from shardline.training.groups import assign_roles
from shardline.training.kinds import initial_state, make_library_optimizer, require_library
from training.conftest import with_layout
from training.figures import apart, layout_name
from training.jobs import losses, small_model, state_dtypes, state_geometry, straight_and_resumed

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
RATES = {"muon": 3e-3, "adafactor": 0.2}
LAYOUTS = [(2, zero) for zero in (0, 1, 2, 3)] + [(4, 1), (4, 3)]


def optimizing(config, **changes):
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **changes))


@pytest.fixture(scope="module")
def expected(workers, base_config, cache):
    config = with_layout(base_config, zero=0, micro_batch=16, steps=8)
    return {
        name: workers.run(1, losses, optimizing(config, name=name, lr=lr), cache, True) for name, lr in RATES.items()
    }


@pytest.mark.parametrize("name", sorted(RATES))
def test_it_learns(name, expected):
    assert expected[name]["loss"][-1] < expected[name]["loss"][0] - 0.3


@pytest.mark.parametrize("name", sorted(RATES))
@pytest.mark.parametrize(("processes", "zero"), LAYOUTS)
def test_losses_equal_one_process(name, processes, zero, expected, workers, base_config, cache, record_property):
    config = optimizing(with_layout(base_config, zero=zero, micro_batch=4, steps=8), name=name, lr=RATES[name])
    actual = workers.run(processes, losses, config, cache, True)
    where = layout_name(config.parallel, processes)
    record_property(
        "optimizer", {"name": name, "layout": where, "loss": apart(actual, expected[name], "loss", "heldout")}
    )
    for key in ("loss", "heldout"):
        np.testing.assert_allclose(actual[key], expected[name][key], rtol=1e-5, err_msg=key)


PARALLEL = [  # (processes, what `parallel` says)
    (2, {"tensor": 2}),
    (2, {"pipeline": 2}),
    (4, {"tensor": 2, "zero": 1}),
    (4, {"tensor": 2, "zero": 3}),
    (4, {"pipeline": 2, "zero": 2}),
    (4, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}),
    (4, {"zero": 3, "zero_group": 2}),
]


@pytest.mark.parametrize("name", sorted(RATES))
@pytest.mark.parametrize(("processes", "layout"), PARALLEL, ids=str)
def test_losses_equal_one_process_over_other_axes(
    name, processes, layout, expected, workers, base_config, cache, record_property
):
    config = optimizing(with_layout(base_config, zero=0, micro_batch=4, steps=8), name=name, lr=RATES[name])
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **layout))
    actual = workers.run(processes, losses, config, cache, True)
    where = layout_name(config.parallel, processes)
    record_property(
        "optimizer", {"name": name, "layout": where, "loss": apart(actual, expected[name], "loss", "heldout")}
    )
    for key in ("loss", "heldout"):
        np.testing.assert_allclose(actual[key], expected[name][key], rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("zero", [0, 3])
def test_state_is_dealt_out_whole_at_every_stage(zero, workers, base_config, cache):
    config = optimizing(with_layout(base_config, zero=zero, micro_batch=4), name="muon")
    ranks = workers.run_all(2, state_geometry, config, cache)
    first, second = (set(rank) for rank in ranks)
    assert not first & second, "each tensor has one owner"
    muon = "model.layers.0.mlp.up_proj.weight.momentum_buffer"
    assert {**ranks[0], **ranks[1]}[muon] == ((96, 48), (0, 0), (96, 48)), "(whole shape, offsets, local shape)"
    sizes = [sum(np.prod(local) for _, _, local in rank.values()) for rank in ranks]
    assert max(sizes) < 0.6 * sum(sizes)


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    roles = assign_roles(OptimizerConfig(name="muon", lr=1e-3, muon_lr=2e-2), small_model(tied=False))
    kinds = {name: role.kind for name, role in roles.items()}
    assert kinds["model.layers.1.self_attn.q_proj.weight"] == "muon"
    assert kinds["model.embed_tokens.weight"] == kinds["lm_head.weight"] == kinds["model.norm.weight"] == "adamw"
    assert roles["model.layers.1.self_attn.q_proj.weight"].lr_scale == pytest.approx(20.0)
    assert roles["lm_head.weight"].lr_scale == 1.0


def test_muon_takes_the_matrices_of_experts_and_no_table_of_positions():
    model = dataclasses.replace(
        small_model(), num_experts=4, experts_per_token=2, expert_size=16, position="learned", rope=None
    )
    kinds = {name: role.kind for name, role in assign_roles(OptimizerConfig(name="muon"), model).items()}
    experts = [kind for name, kind in kinds.items() if ".experts." in name]
    assert len(experts) >= 2 * 4 * 3
    assert set(experts) == {"muon"}
    assert kinds["model.embed_positions.weight"] == "adamw"


def test_groups_scale_rates_and_set_decay_and_the_first_match_counts():
    groups = (
        ParameterGroupConfig(pattern="*.embed_tokens.*", lr_scale=0.1, weight_decay=0.0),
        ParameterGroupConfig(pattern="model.layers.0.*", freeze=True),
        ParameterGroupConfig(pattern="model.*", lr_scale=2.0),
    )
    roles = assign_roles(OptimizerConfig(weight_decay=0.3, groups=groups), small_model())
    embedding = roles["model.embed_tokens.weight"]
    assert (embedding.lr_scale, embedding.weight_decay) == (0.1, 0.0)
    assert roles["model.layers.0.mlp.up_proj.weight"].frozen
    later = roles["model.layers.1.mlp.up_proj.weight"]
    assert (later.frozen, later.lr_scale, later.weight_decay) == (False, 2.0, 0.3)


PATTERN_FAULTS = {
    ("*.embed_token.*",): r"matches no parameter of the model; the nearest names are .*model.embed_tokens.weight",
    ("model.*", "*.norm.*"): r"groups.1.pattern = '\*.norm.\*' comes too late: an earlier pattern matches model.norm",
}


@pytest.mark.parametrize("patterns", sorted(PATTERN_FAULTS))
def test_a_pattern_that_does_nothing_is_an_error(patterns):
    groups = tuple(ParameterGroupConfig(pattern=pattern) for pattern in patterns)
    with pytest.raises(UsageError, match=PATTERN_FAULTS[patterns]):
        assign_roles(OptimizerConfig(groups=groups), small_model())


def test_freezing_everything_is_an_error():
    with pytest.raises(UsageError, match="nothing to train"):
        assign_roles(OptimizerConfig(groups=(ParameterGroupConfig(pattern="*", freeze=True),)), small_model())


GROUPS = (
    ParameterGroupConfig(pattern="*.embed_tokens.*", lr_scale=0.1),
    ParameterGroupConfig(pattern="model.layers.0.*", freeze=True),
)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_groups_and_frozen_layers_are_the_same_in_every_layout(name, workers, base_config, cache):
    config = optimizing(base_config, name=name, groups=GROUPS)
    expected = workers.run(1, losses, with_layout(config, zero=0, micro_batch=8, steps=5), cache, True)
    ungrouped = optimizing(config, groups=())
    other = workers.run(1, losses, with_layout(ungrouped, zero=0, micro_batch=8, steps=5), cache, True)
    assert abs(other["loss"][-1] - expected["loss"][-1]) > 1e-3
    for zero in (0, 1, 2, 3):
        actual = workers.run(2, losses, with_layout(config, zero=zero, micro_batch=4, steps=5), cache, True)
        np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=1e-5, err_msg=f"ZeRO-{zero}")


@pytest.mark.parametrize("shape", [(8, 6), (6,)])
@pytest.mark.parametrize("kind", ["adamw", "adafactor", "muon"])
def test_our_first_state_is_the_library_s(kind, shape):
    if kind == "muon" and len(shape) == 1:
        shape = (4, 12)
    parameter = nn.Parameter(torch.ones(shape))
    parameter.grad = torch.ones(shape)
    library = make_library_optimizer(kind, OptimizerConfig())
    library.param_groups[0]["params"] = [parameter]
    library.step()
    theirs = library.state[parameter]
    ours = initial_state(kind, parameter.detach(), DeviceMemory(torch.device("cpu")))
    assert {key: value.shape for key, value in ours.items() if value is not None} == {
        key: value.shape for key, value in theirs.items() if value is not None
    }


@pytest.mark.skipif(not HAS_TORCHAO or shutil.which("g++") is None, reason="needs torchao, which compiles its step")
def test_eight_bit_state_is_the_same_in_every_layout(workers, base_config, cache, tmp_path):
    config = optimizing(with_layout(base_config, zero=0, micro_batch=16, steps=6), name="adamw_8bit")
    expected = workers.run(1, losses, config, cache, True)
    assert expected["loss"][-1] < expected["loss"][0] - 0.3
    for zero in (0, 3):
        actual = workers.run(2, losses, with_layout(config, zero=zero, micro_batch=8, steps=6), cache, True)
        np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=1e-4)  # a code can flip by a rounding
    dtypes = workers.run(1, state_dtypes, config, cache)
    assert dtypes["optimizer.model.layers.0.mlp.up_proj.weight.exp_avg.codes"] == "torch.uint8"
    straight, resumed = workers.run(1, straight_and_resumed, config, cache, tmp_path)
    assert straight == resumed


@pytest.mark.skipif(HAS_TORCHAO, reason="torchao is installed")
def test_eight_bit_without_torchao_names_the_line_that_installs_it():
    with pytest.raises(UsageError, match="pip install torchao"):
        require_library("adamw_8bit")


def test_dealing_is_even_and_deterministic():
    owners = deal([8, 4, 4, 2], ranks=2)
    assert owners == [0, 1, 1, 0]
    assert deal([5], ranks=3) == [0]
    assert deal([], ranks=3) == []


def test_a_fraction_takes_the_largest_first():
    assert largest_first([2, 8, 4, 4], fraction=0.4) == {1}
    assert largest_first([2, 8, 4, 4], fraction=0.5) == {1, 2}
    assert largest_first([2, 8, 4, 4], fraction=1.0) == {0, 1, 2, 3}
