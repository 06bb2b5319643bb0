"""Learning-rate schedules as functions of the step, and which parameters are decayed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardline.config import OptimizerConfig, RunConfig
from shardline.models.decoder import Decoder
from shardline.parallel.data import clip_gradients, gradient_norm, parallelize
from shardline.parallel.grid import Layout
from shardline.training.groups import assign_roles
from shardline.training.optimizer import build_optimizer, learning_rate
from training.jobs import small_model


def rates(schedule: str, steps: int = 100, **options: float) -> list[float]:
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=10, **options)
    return [learning_rate(config, step=step, steps=steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_climbs_linearly_to_the_peak(schedule):
    assert rates(schedule)[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])


def test_cosine_falls_monotonically_to_its_floor_at_the_last_step():
    values = rates("cosine", min_lr_fraction=0.1)[10:]
    assert values == sorted(values, reverse=True)
    assert values[0] == pytest.approx(1.0)
    assert values[-1] == pytest.approx(0.1)
    assert values[len(values) // 2] == pytest.approx(0.55, abs=0.02)


def test_wsd_stays_and_then_falls_linearly():
    values = rates("wsd", decay_fraction=0.2, min_lr_fraction=0.0)
    assert values[10:79] == [1.0] * 69
    assert values[-1] == pytest.approx(0.0)
    assert values[89] == pytest.approx(0.5)


def test_constant_stays():
    assert rates("constant")[10:] == [1.0] * 90


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("steps", [1, 2, 10, 11, 12])
def test_short_runs_have_positive_finite_rates(schedule, steps):
    assert all(0 <= rate <= 1.0 for rate in rates(schedule, steps=steps))


def test_no_warm_up_starts_at_the_peak():
    config = OptimizerConfig(lr=0.5, warmup_steps=0)
    assert learning_rate(config, step=0, steps=10) == 0.5


def test_matrices_are_decayed_and_vectors_are_not():
    decoder = Decoder(small_model())
    ranks = parallelize(
        decoder,
        layers=[],
        layout=Layout(data=1),
        mesh=None,
        precision="fp32",
        device=torch.device("cpu"),
        fill=lambda: decoder.initialize(seed=0),
    )
    config = RunConfig(optimizer=OptimizerConfig(weight_decay=0.3))
    optimizer = build_optimizer(config, ranks, decoder, roles=assign_roles(config.optimizer, decoder.config))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(decoder.parameters()))
    for name, parameter in decoder.named_parameters():
        assert decay[id(parameter)] == (0.0 if name.endswith("norm.weight") else 0.3), name


def test_clipping_scales_to_the_limit_and_copies_count_once():
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.full((3,), 2.0), torch.full((2, 2), 1.0)

    def norm(shares: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> float:
        return gradient_norm(dict(zip(parameters, shares, strict=True)), total=lambda squared: squared)

    assert norm() == pytest.approx(4.0)
    assert norm((0.5, 0.25, 1.0)) == pytest.approx(7.0**0.5)
    clip_gradients(parameters, norm=norm(), max_norm=0.0)
    assert parameters[0].grad[0] == 2.0
    clip_gradients(parameters, norm=norm(), max_norm=1.0)
    assert norm() == pytest.approx(1.0, rel=1e-5)
    clip_gradients(parameters, norm=norm(), max_norm=5.0)
    assert norm() == pytest.approx(1.0, rel=1e-5)
