"""The closed form of time moves as physics says."""

from __future__ import annotations

import dataclasses

import pytest

from shardline.hardware.catalogue import device
from shardline.models.presets import preset
from shardline.planning.cluster.engines import engine, engine_names
from shardline.planning.cluster.job import TIME_PARTS, ClusterLayout, Job, Time
from shardline.planning.cluster.products import product_efficiency
from shardline.planning.cluster.shape import ModelShape
from shardline.planning.cluster.time import collective_rate, estimate_time

LLAMA = ModelShape.of(preset("llama-3.1-8b"), name="llama-3.1-8b")


def _time(**changes) -> Time:
    layout = changes.pop("layout", ClusterLayout(data=8, zero=3))
    job = Job(
        shape=LLAMA,
        device=device("a100"),
        num_devices=layout.num_devices,
        sequence_length=4096,
        global_batch=8 * layout.data,
        micro_batch=1,
        layout=layout,
        engine="megatron",
    )
    return estimate_time(dataclasses.replace(job, **changes))


@pytest.mark.parametrize("name", engine_names())
def test_parts_add_up_to_a_possible_rate(name: str) -> None:
    time = _time(engine=name)
    assert set(time.parts) == set(TIME_PARTS)
    assert time.step_s == pytest.approx(sum(time.parts.values()))
    assert time.tokens_per_s_per_device * time.step_s == pytest.approx(8 * 4096)
    assert 0.2 < (time.mfu or 0) < 0.75
    assert (time.mfu_causal or 0) < (time.mfu or 0)


def test_mfu_has_a_peak_of_its_own_type_or_is_absent() -> None:
    assert _time(device=device("v100-32gb")).mfu is None  # it has no bf16
    assert _time(device=device("v100-32gb"), precision="fp16_mixed").mfu is not None
    assert _time(device=device("h100"), precision="fp8_mixed").peak_dtype == "fp8"


def test_recomputation_costs_about_a_forward_pass() -> None:
    slower = _time(recompute="full").step_s / _time().step_s
    assert 1.2 < slower < 1.4


def test_the_bubble_is_p_minus_1_over_v_m() -> None:
    even = dataclasses.replace(LLAMA, vocab_size=64)  # no stage has more to do than another
    plain = _time(shape=even, layout=ClusterLayout(pipeline=8), global_batch=32)
    many = _time(shape=even, layout=ClusterLayout(pipeline=8), global_batch=128)
    work = many.step_s - many.parts["bubble"] - many.parts["pipeline"] - many.parts["optimizer"]
    assert plain.parts["bubble"] == pytest.approx(many.parts["bubble"], rel=1e-6)
    assert many.parts["bubble"] / work == pytest.approx(7 / 128, rel=0.02)
    head = _time(layout=ClusterLayout(pipeline=8), global_batch=128)
    assert head.parts["compute"] > 1.3 * many.parts["compute"]  # the last stage, which has the head, sets the pace
    split = ClusterLayout(pipeline=8, virtual_stages=4, schedule="interleaved")
    assert _time(shape=even, layout=split, global_batch=32).parts["bubble"] == pytest.approx(
        plain.parts["bubble"] / 4, rel=1e-6
    )


def test_tensor_ranks_across_nodes_are_slow() -> None:
    within = _time(layout=ClusterLayout(tensor=8), num_nodes=1)
    across = _time(layout=ClusterLayout(tensor=8), num_nodes=2)
    assert across.parts["tensor"] > 1.4 * within.parts["tensor"]
    far = _time(layout=ClusterLayout(tensor=8), num_nodes=8)
    assert far.parts["tensor"] > 5 * within.parts["tensor"]


def test_a_slow_network_shows_with_zero_3_and_little_work() -> None:
    layout = ClusterLayout(data=64, zero=3)
    fast, slow = (_time(layout=layout, global_batch=64, link_between=rate) for rate in (25e9, 0.5e9))
    assert slow.parts["data"] > 10 * fast.parts["data"]
    hidden = _time(layout=ClusterLayout(data=64, zero=1), global_batch=64, link_between=0.5e9)
    assert hidden.parts["data"] < slow.parts["data"]


def test_a_ring_over_nodes_uses_all_ports_of_its_ranks() -> None:
    job = Job(
        shape=LLAMA, device=device("a100"), num_devices=64, sequence_length=4096, global_batch=64, micro_batch=1,
        layout=ClusterLayout(data=64), engine="megatron",
    )  # fmt: skip
    kind = engine("megatron")
    whole = collective_rate(job, kind, ranks=64, stride=1)
    one = collective_rate(job, kind, ranks=8, stride=8)
    assert whole == pytest.approx(8 * one)
    assert collective_rate(job, kind, ranks=8, stride=1) == pytest.approx(300e9 * kind.link)


def test_offload_shows_as_traffic_and_faster_devices_are_faster() -> None:
    assert _time(offload=frozenset({"optimizer"})).parts["offload"] > 0
    assert _time(device=device("h100")).step_s < 0.6 * _time().step_s
    assert _time(device=device("h100"), precision="fp8_mixed").step_s < _time(device=device("h100")).step_s


def test_products_lose_to_tiles_depth_and_boundaries() -> None:
    aligned = product_efficiency(4096, 1728, 13824, 108)
    unaligned = product_efficiency(4096, 1800, 14400, 108)
    assert aligned > 1.2 * unaligned
    assert product_efficiency(8192, 8192, 8192, 108) > product_efficiency(8192, 8192, 256, 108)
    assert product_efficiency(16, 8192, 8192, 108) < 0.5 * product_efficiency(8192, 8192, 8192, 108)
    assert 0.85 < product_efficiency(8192, 8192, 8192, 108) <= 1


def test_experts_cost_more_than_their_flops_say() -> None:
    mixtral = ModelShape.of(preset("mixtral-8x7b"))
    dense = dataclasses.replace(mixtral, num_experts=0, experts_per_token=0, ffn_size=2 * 14336)
    assert dense.matmul_parameters == pytest.approx(mixtral.matmul_parameters, rel=0.01)
    assert _time(shape=mixtral).step_s > _time(shape=dense).step_s
    spread = _time(shape=mixtral, layout=ClusterLayout(data=64, zero=1, expert=64))
    assert spread.parts["tensor"] > 0
