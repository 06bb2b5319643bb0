"""Layouts: the equation that must hold, and what is said when it does not."""

from __future__ import annotations

import dataclasses

import pytest

from parity.jobs import gate_model
from shardline.config import InfeasibleError, ParallelConfig, TrainConfig
from shardline.parallel.division import check_tensor_parallel
from shardline.parallel.grid import Layout
from shardline.parallel.world import read_environment


def test_auto_takes_what_is_left():
    layout = Layout.resolve(ParallelConfig(zero=3), world_size=6)
    assert (layout.data, layout.num_ranks, layout.zero) == (6, 6, 3)
    assert str(layout) == "data 6 x tensor 1 x pipeline 1, ZeRO-3"


def test_the_failing_equation_is_filled_in():
    with pytest.raises(InfeasibleError, match=r"= 4 x 1 x 1 = 4 processes, but 2 were started; start 4 \(--nproc 4\)"):
        Layout.resolve(ParallelConfig(data=4), world_size=2)
    with pytest.raises(InfeasibleError, match=r"parallel\.tensor x parallel\.pipeline = 1 x 2"):
        Layout.resolve(ParallelConfig(pipeline=2), world_size=3)


@pytest.mark.parametrize(("ranks", "batch", "micro", "expected"), [(1, 8, 2, 4), (2, 8, 2, 2), (4, 8, 2, 1)])
def test_accumulation_is_derived(ranks, batch, micro, expected):
    train = TrainConfig(global_batch=batch, micro_batch=micro)
    assert Layout(data=ranks).accumulation(train) == expected


def test_a_batch_that_does_not_divide_names_one_that_does():
    train = TrainConfig(global_batch=8, micro_batch=2)
    with pytest.raises(InfeasibleError, match=r"= 3 x 2 = 6; set train\.global_batch to 6"):
        Layout(data=3).accumulation(train)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (3, 4, 1)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, (5, 8, 1)),
        ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, (0, 2, 0)),
        ({"RANK": "1"}, (0, 1, 0)),
    ],
)
def test_who_am_i_from_torchrun_or_slurm(environment, expected):
    assert read_environment(environment) == expected


def test_dense_layers_beside_experts_count_too():
    model = gate_model(tied=True)
    mixed = dataclasses.replace(
        model, num_heads=8, num_experts=4, experts_per_token=2, expert_size=64, intermediate_size=5, dense_layers=(0,)
    )
    with pytest.raises(InfeasibleError, match=r"5 inner features in parts of 2 reach only 3 .*; set .*tensor to 2\."):
        check_tensor_parallel(mixed, size=4)
    check_tensor_parallel(mixed, size=2)
    check_tensor_parallel(dataclasses.replace(mixed, dense_layers=()), size=4)
