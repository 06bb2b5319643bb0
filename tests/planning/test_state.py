"""The optimizer state that a plan counts is the state that the optimizers make."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hardware.machines import GIB, machine
from shardline.config import RunConfig, load_config
from shardline.models.config import DecoderConfig
from shardline.models.decoder import Decoder
from shardline.models.presets import preset
from shardline.parallel.offload import DeviceMemory
from shardline.planning import state as planned
from shardline.planning.explain import plan_lines
from shardline.planning.memory import predict
from shardline.planning.parameters import count_parameters
from shardline.planning.search import make_plan
from shardline.planning.state import offload_notes, optimizer_state
from shardline.training import bucketed
from shardline.training.groups import assign_roles
from shardline.training.kinds import initial_state
from training.jobs import small_model

MODEL = small_model(tied=False)
MIXTURE = dataclasses.replace(MODEL, num_experts=4, experts_per_token=2, expert_size=32)


def _config(*words: str) -> RunConfig:
    return load_config(None, words)


@pytest.mark.parametrize("model", [MODEL, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_bytes_are_those_of_the_tensors(name: str, precision: str, model: DecoderConfig) -> None:
    config = _config(f"--optimizer.name={name}", f"--train.precision={precision}")
    memory, roles = DeviceMemory(torch.device("cpu")), assign_roles(config.optimizer, model)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    with torch.device("meta"):
        parameters = dict(Decoder(model).named_parameters())
    counted = factors = 0
    for key, parameter in parameters.items():
        like = torch.empty(parameter.shape)
        for part, tensor in initial_state(roles[key].kind, like, memory, dtype=dtype).items():
            if part in ("row_var", "col_var"):
                factors += tensor.nbytes
            elif tensor.ndim:
                counted += tensor.nbytes
    state = optimizer_state(model, config, data_ranks=1, zero=0)
    assert state.kept_bytes == counted
    assert factors < 0.15 * 4 * count_parameters(model).total, "what the plan leaves out for Adafactor is small"


@pytest.mark.parametrize("name", ["muon", "adamw_8bit"])
def test_whole_matrices_are_dealt_out_at_every_stage(name: str) -> None:
    config = _config(f"--optimizer.name={name}")
    alone = optimizer_state(preset("smollm2-135m"), config, data_ranks=1, zero=0).kept_bytes
    for zero in (0, 1, 2, 3):
        shared = optimizer_state(preset("smollm2-135m"), config, data_ranks=4, zero=zero).kept_bytes
        assert alone / 4 <= shared < alone / 2.8, "the embedding alone is more than a quarter"


def test_less_state_takes_less_memory() -> None:
    def total(*words: str) -> int:
        return predict(preset("smollm2-135m"), _config(*words), data_ranks=1).total_bytes

    names = ("adamw", "muon", "adamw_8bit", "adafactor")
    totals = [total(f"--optimizer.name={name}") for name in names]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 4
    assert total("--train.precision=bf16_pure") < total("--train.precision=bf16")


def test_state_on_disk_is_not_in_memory_but_for_a_bucket() -> None:
    model = preset("smollm2-135m")
    plain = optimizer_state(model, _config(), data_ranks=1, zero=0)
    for fraction in (0.5, 1.0):
        config = _config("--parallel.offload.optimizer=disk", f"--parallel.offload.optimizer_fraction={fraction}")
        state = optimizer_state(model, config, data_ranks=1, zero=0)
        assert state.kept_bytes + state.moved_bytes == plain.kept_bytes
        assert fraction * plain.kept_bytes <= state.moved_bytes < (fraction + 0.2) * plain.kept_bytes
        assert state.bucket_bytes == 32 << 20
    freed = predict(model, _config(), data_ranks=1).total_bytes - predict(model, config, data_ranks=1).total_bytes
    assert freed > 0.9 * plain.kept_bytes


def test_the_bucket_is_the_optimizer_s() -> None:
    assert planned._BUCKET_ELEMENTS == bucketed.BUCKET_ELEMENTS


def test_offload_to_the_cpu_frees_a_gpu_and_nothing_here() -> None:
    model, config = preset("smollm2-135m"), _config("--parallel.offload.optimizer=cpu")
    here = optimizer_state(model, config, data_ranks=1, zero=0)
    assert (here.moved_bytes, here.kept_bytes) == (0, 8 * count_parameters(model).total)
    there = optimizer_state(model, config, data_ranks=1, zero=0, on_gpu=True)
    assert (there.moved_bytes, there.kept_bytes) == (here.kept_bytes, 0)


def test_a_plan_says_what_offload_moves_or_that_it_gains_nothing() -> None:
    here = machine(memory_available_bytes=48 * GIB)
    plan = make_plan(
        preset("smollm2-135m"), _config("--parallel.offload.optimizer=disk"), num_processes=1, machine=here
    )
    assert any("1.00 GiB of 1.00 GiB of optimizer state per process lie in files" in line for line in plan_lines(plan))
    useless = _config("--parallel.offload.optimizer=cpu", "--parallel.offload.params=cpu", "--parallel.zero=3")
    (note,) = offload_notes(preset("tiny"), useless, here, data_ranks=1)
    assert note.startswith("offload.optimizer and offload.params = cpu: this machine has no GPU")
