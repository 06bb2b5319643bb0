"""Pure bf16 with stochastic rounding, and fp16 with loss scaling."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardline.config import OptimizerConfig, ShardlineError
from shardline.training.bucketed import BucketedOptimizer, LocalSource
from shardline.training.kinds import make_library_optimizer
from shardline.training.rounding import StochasticRounding, global_index
from shardline.training.scaler import LossScaler
from training.conftest import with_layout
from training.figures import apart, layout_name
from training.jobs import losses, overflowing_steps, scaled_losses, state_dtypes, straight_and_resumed


def precise(config, precision, **optimizer):
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, precision=precision),
        optimizer=dataclasses.replace(config.optimizer, **optimizer),
    )


@pytest.fixture(scope="module")
def fp32(workers, base_config, cache):
    return workers.run(1, losses, with_layout(base_config, zero=0, micro_batch=8, steps=12), cache, True)


def record(record_property, config, processes, actual, fp32):
    """What docs/parity_table.py makes its table of."""
    figures = {"name": config.train.precision, "layout": layout_name(config.parallel, processes)}
    record_property("precision", {**figures, "loss": apart(actual, fp32, "loss")})


def rounded(value: Tensor, *, name: str = "w", step: int = 0, seed: int = 0, index: Tensor | int = 0) -> Tensor:
    target = torch.empty(value.shape, dtype=torch.bfloat16)
    StochasticRounding(seed=seed).copy(value.contiguous(), target, step=step, name=name, index=index)
    return target


def test_rounding_gives_a_neighbour_and_is_right_on_average():
    value = torch.randn(1000).repeat_interleave(1000)
    result = rounded(value).float()
    down = torch.from_numpy(value.numpy().view(np.int32) & -0x10000).view(torch.float32)
    spacing = torch.exp2(torch.floor(torch.log2(value.abs())) - 7)
    assert ((result == down) | ((result - down).abs() == spacing)).all()
    error = ((result - value) / spacing).view(1000, 1000).mean(1)
    assert error.abs().max() < 5 * 0.5 / math.sqrt(1000), "no value is off by more than chance allows"
    assert abs(error.mean()) < 5 * 0.5 / 1000


def test_what_bf16_holds_is_kept():
    value = torch.randn(1000).bfloat16().float()
    assert torch.equal(rounded(value).float(), value)
    assert torch.equal(
        rounded(torch.tensor([0.0, math.inf, -math.inf])).float(), torch.tensor([0.0, math.inf, -math.inf])
    )


def test_bits_differ_by_seed_step_and_name():
    value = torch.full((4096,), 1 + 1 / 256)
    results = [rounded(value), rounded(value, seed=1), rounded(value, step=1), rounded(value, name="v")]
    for first in range(4):
        for second in range(first):
            same = (results[first] == results[second]).float().mean()
            assert 0.45 < same < 0.55


def test_bits_belong_to_the_element_and_not_to_the_part_that_holds_it():
    whole = torch.randn(12, 10)
    expected = rounded(whole)
    for rows, columns in ((slice(0, 5), slice(0, 10)), (slice(5, 12), slice(0, 10)), (slice(3, 9), slice(4, 7))):
        part = whole[rows, columns].contiguous()
        for begin, end in ((0, part.numel()), (3, part.numel() - 2)):
            index = global_index(
                whole.shape,
                offsets=(rows.start, columns.start),
                sizes=part.shape,
                begin=begin,
                end=end,
                device=part.device,
            )
            result = rounded(part.view(-1)[begin:end], index=index)
            assert torch.equal(result, expected[rows, columns].reshape(-1)[begin:end])


def test_elements_beyond_32_bits_have_bits_of_their_own():
    value = torch.full((4096,), 1 + 1 / 256)
    same = (rounded(value) == rounded(value, index=1 << 32)).float().mean()
    assert 0.45 < same < 0.55


class RoundToNearest(StochasticRounding):
    """What pure bf16 would do without the random bits."""

    def copy(self, value: Tensor, target: Tensor, *, step: int, name: str, index: Tensor | int) -> None:
        target.copy_(value)


@pytest.mark.parametrize(("rounding", "moves"), [(StochasticRounding(seed=0), True), (RoundToNearest(seed=0), False)])
def test_without_stochastic_rounding_small_updates_are_lost(rounding, moves):
    """Weights of 1 go to 0.9 by steps of 1/1000, a quarter of bf16's spacing there."""
    weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    config = OptimizerConfig(lr=1e-3, betas=(0.9, 0.95))
    options = {"kind": "adamw", "lr": config.lr, "lr_scale": 1.0, "weight_decay": 0.0}
    optimizer = BucketedOptimizer(
        [{"params": [weight], "names": ["w"], **options}],
        source=LocalSource({"w": weight}, {}),
        libraries={"adamw": make_library_optimizer("adamw", config)},
        device=weight.device,
        rounding=rounding,
    )
    for step in range(150):
        weight.grad = (weight.detach().float() - 0.9).bfloat16()
        optimizer.step_index = step
        optimizer.step()
    assert (weight.float().mean().item() == pytest.approx(0.9, abs=0.005)) is moves
    assert (weight == 1).all().item() is not moves


@pytest.mark.parametrize(("processes", "zero"), [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_pure_bf16_learns_as_fp32_does_and_holds_nothing_larger(
    processes, zero, fp32, workers, base_config, cache, record_property
):
    config = precise(with_layout(base_config, zero=zero, micro_batch=8, steps=12), "bf16_pure")
    actual = workers.run(processes, losses, config, cache, True)
    record(record_property, config, processes, actual, fp32)
    np.testing.assert_allclose(actual["loss"], fp32["loss"], rtol=1e-2)
    assert actual["loss"][-1] < actual["loss"][0] - 0.2
    dtypes = workers.run(processes, state_dtypes, config, cache)
    assert {dtype for name, dtype in dtypes.items() if not name.endswith(".step")} == {"torch.bfloat16"}


@pytest.mark.parametrize("precision", ["bf16_pure", "fp16", "bf16"])
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "zero": 3}], ids=str)
def test_half_precision_over_other_axes(layout, precision, fp32, workers, base_config, cache, record_property):
    config = precise(with_layout(base_config, zero=0, micro_batch=4, steps=12), precision)
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **layout))
    processes = 4 if "zero" in layout else 2
    job, *words = (scaled_losses, 2.0**12) if precision == "fp16" else (losses, True)
    actual = workers.run(processes, job, config, cache, *words)
    record(record_property, config, processes, actual, fp32)
    np.testing.assert_allclose(actual["loss"], fp32["loss"], rtol=1e-2)
    assert actual["loss"] != fp32["loss"]


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_whole_matrix_optimizers_in_pure_bf16(name, workers, base_config, cache):
    config = precise(with_layout(base_config, zero=3, micro_batch=8, steps=8), "bf16_pure", name=name, lr=3e-3)
    actual = workers.run(2, losses, config, cache, True)
    expected = workers.run(1, losses, precise(config, "fp32"), cache, True)
    np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=1e-2)


@pytest.mark.parametrize("precision", ["bf16_pure", "fp16"])
def test_a_resumed_run_continues_bit_for_bit(precision, workers, base_config, cache, tmp_path):
    config = precise(with_layout(base_config, zero=3, micro_batch=8, steps=6), precision)
    straight, resumed = workers.run(2, straight_and_resumed, config, cache, tmp_path)
    assert straight == resumed


@pytest.mark.parametrize(("processes", "zero"), [(1, 0), (2, 1), (2, 3)])
def test_fp16_stays_near_fp32(processes, zero, fp32, workers, base_config, cache, record_property):
    config = precise(with_layout(base_config, zero=zero, micro_batch=8, steps=12), "fp16")
    actual = workers.run(processes, scaled_losses, config, cache, 2.0**12)
    record(record_property, config, processes, actual, fp32)
    assert actual["num_skipped"] == 0
    np.testing.assert_allclose(actual["loss"], fp32["loss"], rtol=5e-3)
    assert actual["loss"] != fp32["loss"], "fp16 was not used"


@pytest.mark.parametrize(("processes", "zero"), [(1, 0), (2, 0), (2, 3)])
def test_overflow_leaves_the_step_out_on_all_ranks_and_lowers_the_scale(processes, zero, workers, base_config, cache):
    config = precise(with_layout(base_config, zero=zero, micro_batch=8, steps=20), "fp16")
    told, *others = workers.run_all(processes, overflowing_steps, config, cache)
    left_out = [norm is None for norm in told["grad_norm"]]
    assert left_out[0]
    assert not all(left_out)
    assert told["skipped"] == np.cumsum(left_out).tolist()
    assert told["scale"] == [2.0 ** (30 - sum(left_out[:step])) for step in range(20)]
    assert told["unchanged"] == left_out
    for other in others:  # a rank may hold a shard that a step does not move
        assert {**other, "unchanged": left_out} == told


def test_the_scale_grows_after_an_interval_without_overflow():
    scaler = LossScaler(initial=8.0, growth_interval=3)
    assert [scaler.update(finite=True) for _ in range(3)] == [True] * 3
    assert scaler.scale == 16.0
    assert not scaler.update(finite=False)
    assert (scaler.scale, scaler.skipped_steps) == (8.0, 1)
    for _ in range(2):
        scaler.update(finite=True)
    assert scaler.scale == 8.0, "an overflow starts the interval anew"


def test_no_scale_helps_a_model_that_overflows_itself():
    scaler = LossScaler(initial=2.0)
    scaler.update(finite=False)
    with pytest.raises(ShardlineError, match=r"train\.precision bf16"):
        scaler.update(finite=False)
