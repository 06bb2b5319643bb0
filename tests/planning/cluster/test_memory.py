"""The closed form of memory moves as physics says, for every engine."""

from __future__ import annotations

import dataclasses

import pytest

from shardline.config import InfeasibleError, RunConfig, UsageError
from shardline.hardware.catalogue import device, parse_devices
from shardline.models.presets import preset
from shardline.planning.cluster.engines import engine, engine_names
from shardline.planning.cluster.job import MEMORY_PARTS, ClusterLayout, Job
from shardline.planning.cluster.memory import estimate_memory, in_flight, stage_layers, stage_parameters
from shardline.planning.cluster.shape import ModelShape
from shardline.planning.memory import predict

LLAMA = ModelShape.of(preset("llama-3.1-8b"), name="llama-3.1-8b")


def _job(**changes) -> Job:
    layout = changes.pop("layout", ClusterLayout(data=8, zero=3))
    job = Job(
        shape=LLAMA,
        device=device("h100"),
        num_devices=layout.num_devices,
        sequence_length=4096,
        global_batch=8 * layout.data,
        micro_batch=1,
        layout=layout,
        engine="shardline",
    )
    return dataclasses.replace(job, **changes)


def _total(**changes) -> float:
    return estimate_memory(_job(**changes)).expected_bytes


@pytest.mark.parametrize("name", engine_names())
def test_parts_add_up_and_zero_stages_never_cost_more(name: str) -> None:
    totals = []
    for zero in range(4):
        memory = estimate_memory(_job(engine=name, layout=ClusterLayout(data=64, zero=zero), recompute="full"))
        assert set(memory.parts) == set(MEMORY_PARTS)
        assert memory.low_bytes < memory.expected_bytes < memory.high_bytes
        assert all(count >= 0 for count in memory.parts.values())
        # Gradients are those of the peak's moment, which is another one for Shardline's own stages.
        gradients = memory.parts["gradients"] if name != "shardline" else 0.0
        totals.append(memory.parts["weights"] + gradients + memory.parts["optimizer"])
    assert totals[1] < totals[0]
    assert totals[3] < 0.15 * totals[0]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("name", engine_names())
def test_recomputation_trades_memory(name: str) -> None:
    full, none = (_total(engine=name, recompute=kind, micro_batch=4) for kind in ("full", "none"))
    assert full < none


def test_more_rows_longer_rows_and_wider_words_cost_more() -> None:
    assert _total(micro_batch=2) > _total() > _total(sequence_length=2048)
    assert _total(engine="fsdp2", loss="chunked", micro_batch=4) < _total(engine="fsdp2", micro_batch=4)
    assert _total(precision="bf16_pure") < _total(precision="bf16_mixed")
    assert _total(optimizer="adamw_8bit") < _total()
    lora, qlora = (_total(adapter=kind, precision="bf16_pure", recompute="full") for kind in ("lora", "qlora"))
    assert qlora < lora < _total(recompute="full")


def test_offload_moves_bytes_to_the_host() -> None:
    here, there = estimate_memory(_job()), estimate_memory(_job(offload=frozenset({"optimizer"})))
    assert here.host_bytes == 0
    assert there.parts["optimizer"] == 0
    assert there.host_bytes == pytest.approx(8 * LLAMA.parameters, rel=0.01)


def test_stages_hold_all_layers_and_the_ends_once() -> None:
    layout = ClusterLayout(pipeline=5)
    assert sum(stage_layers(LLAMA, layout, rank) for rank in range(5)) == 32
    whole = sum(sum(stage_parameters(LLAMA, layout, rank)) for rank in range(5))
    assert whole == pytest.approx(LLAMA.parameters, rel=1e-5)
    tied = dataclasses.replace(LLAMA, tied=True)
    assert sum(stage_parameters(tied, ClusterLayout(), 0)) == pytest.approx(tied.parameters, rel=1e-5)


def test_few_key_heads_are_copied_to_more_tensor_ranks() -> None:
    eight, sixteen = (stage_parameters(LLAMA, ClusterLayout(tensor=t), 0)[0] * t for t in (8, 16))
    assert sixteen > eight


@pytest.mark.parametrize(
    ("layout", "rank", "expected"),
    [
        (ClusterLayout(), 0, 1),
        (ClusterLayout(pipeline=4), 0, 4),
        (ClusterLayout(pipeline=4), 3, 1),
        (ClusterLayout(pipeline=4, schedule="gpipe"), 3, 16),
        (ClusterLayout(pipeline=4, schedule="interleaved", virtual_stages=2), 0, (6 + 4 + 1) / 2),
    ],
)
def test_passes_in_flight(layout: ClusterLayout, rank: int, expected: float) -> None:
    assert in_flight(layout, rank, 16) == expected


def test_a_closed_form_of_shardlines_states() -> None:
    """ZeRO-3 over 8: 16 bytes an element, of which gradients are there only with several micro-batches."""
    memory = estimate_memory(_job())
    assert memory.parts["weights"] == pytest.approx(4 * LLAMA.parameters / 8, rel=0.01)
    assert memory.parts["optimizer"] == pytest.approx(8 * LLAMA.parameters / 8, rel=0.01)


def test_measures_nest() -> None:
    job = _job(micro_batch=2)
    allocated, reserved, whole = (
        estimate_memory(job, measure=kind).expected_bytes for kind in ("allocated", "reserved", "device")
    )
    assert allocated < reserved < whole


def test_counts_of_presets_are_exact() -> None:
    from shardline.planning.parameters import count_parameters

    for name in ("llama-3.1-8b", "llama-2-70b", "qwen2.5-7b", "mistral-7b", "mixtral-8x7b", "gpt2", "gemma-2-9b"):
        config = preset(name)
        assert ModelShape.of(config).parameters == pytest.approx(count_parameters(config).total, rel=0.002)


def test_usual_shapes_have_the_parameters_asked_for() -> None:
    for count in (125e6, 1.3e9, 7e9, 13e9, 65e9, 175e9, 1e12, 3e12):
        assert ModelShape.from_parameters(count).parameters == pytest.approx(count, rel=0.06)


def test_shapes_from_text() -> None:
    shape = ModelShape.parse("layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256,gated=yes")
    assert shape.parameters == pytest.approx(LLAMA.parameters, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers=32,hidden=4096,head=32", "did you mean 'heads'"),
        ("layers=32,heads=32", "needs hidden"),
        ("layers=x,hidden=4096,heads=32", "whole number"),
        ("layers=-1,hidden=4096,heads=32", "num_layers = -1"),
        ("layers=32,hidden=4096,heads=32,kv_heads=5", "not a multiple of num_kv_heads = 5"),
    ],
)
def test_bad_shapes(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ModelShape.parse(text)
    with pytest.raises(UsageError, match="from 1e6 to 1e14"):
        ModelShape.from_parameters(-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_devices": 16}, "= 8 devices, but there are 16"),
        ({"layout": ClusterLayout(tensor=5)}, "32 heads are not a multiple of tensor = 5"),
        ({"layout": ClusterLayout(pipeline=64)}, "64 stages, but there are 32 layers"),
        ({"global_batch": 30}, "not a multiple of micro_batch 1 x data 8 = 8"),
    ],
)
def test_impossible_layouts_say_the_equation(changes: dict, message: str) -> None:
    with pytest.raises(InfeasibleError, match=message):
        _job(**changes).check()


def test_unknown_names_and_absurd_numbers() -> None:
    with pytest.raises(UsageError, match="did you mean 'megatron'"):
        engine("megatorn")
    with pytest.raises(UsageError, match="micro_batch = 0"):
        _job(micro_batch=0)
    with pytest.raises(UsageError, match="precision 'bf15_mixed'"):
        _job(precision="bf15_mixed")
    with pytest.raises(UsageError, match="offload 'optimiser'"):
        _job(offload=frozenset({"optimiser"}))


def test_on_cores_it_is_what_the_plan_of_this_machine_says() -> None:

    _, cores = parse_devices("cpu:2")
    shape = ModelShape.of(preset("tiny"))
    job = Job(
        shape=shape,
        device=cores,
        num_devices=2,
        sequence_length=512,
        global_batch=8,
        micro_batch=2,
        layout=ClusterLayout(data=2, zero=3),
        precision="fp32",
    )
    run = RunConfig()
    run = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, zero=3))
    expected = predict(preset("tiny"), run, data_ranks=2)
    assert estimate_memory(job).expected_bytes == expected.total_bytes
