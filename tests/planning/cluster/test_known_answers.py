"""Answers that others have published, from first principles."""

from __future__ import annotations

import dataclasses

import pytest

from planning.cluster.published import of_source
from shardline.hardware.catalogue import device
from shardline.planning.cluster.job import ClusterLayout, Job
from shardline.planning.cluster.known_states import deepspeed_zero2_bytes, deepspeed_zero3_bytes, zero_paper_bytes
from shardline.planning.cluster.memory import activation_bytes, estimate_memory, in_flight
from shardline.planning.cluster.shape import ModelShape

GIB = 1 << 30


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_of_seven_and_a_half_billion_on_64(stage: int, gigabytes: float) -> None:
    assert zero_paper_bytes(7.5e9, ranks=64, stage=stage) / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("parameters", "optimizer", "zero_init", "host", "gpu"),
    [
        (True, True, True, 71.71, 0.12),
        (True, True, False, 127.48, 0.12),
        (False, True, True, 63.74, 0.79),
        (False, True, False, 127.48, 0.79),
        (False, False, True, 1.47, 6.10),
        (False, False, False, 127.48, 6.10),
    ],
)
def test_deepspeeds_table_of_t5_3b(parameters: bool, optimizer: bool, zero_init: bool, host: float, gpu: float) -> None:
    """2,851 M parameters, 32.9 M in the largest layer, one node of eight."""
    got_host, got_gpu = deepspeed_zero3_bytes(
        2851.6e6, 32.9e6, gpus=8, offload_parameters=parameters, offload_optimizer=optimizer, zero_init=zero_init
    )
    assert got_host / GIB == pytest.approx(host, rel=0.005)
    assert got_gpu / GIB == pytest.approx(gpu, abs=0.01)


def test_deepspeeds_zero_2_estimate_after_its_formula_was_mended() -> None:
    host, gpu = deepspeed_zero2_bytes(2851.6e6, gpus=8, offload_optimizer=True)
    assert (host / GIB, gpu / GIB) == (pytest.approx(127.48, rel=0.005), pytest.approx(5.31, abs=0.01))
    assert deepspeed_zero2_bytes(2851.6e6, gpus=8)[1] == pytest.approx(2851.6e6 * (2 + 18 / 8))


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "batch", "layout", "gib"),
    [
        (48, 6144, 64, 4, ClusterLayout(tensor=8, sequence_parallel=True), 9.5625),
        (
            96,
            12288,
            96,
            1,
            ClusterLayout(tensor=8, pipeline=8, virtual_stages=3, schedule="interleaved", sequence_parallel=True),
            12.3515625,
        ),
        (128, 25600, 160, 1, ClusterLayout(tensor=8, pipeline=64, sequence_parallel=True), 26.5625),
    ],
)
def test_activations_of_korthikantis_figure_1(
    layers: int, hidden: int, heads: int, batch: int, layout: ClusterLayout, gib: float
) -> None:
    """arXiv:2205.05198: 34 s b h / t a layer with tensor and sequence parallelism, attention recomputed."""
    shape = ModelShape.filled(num_layers=layers, hidden_size=hidden, num_heads=heads)
    held, shared = activation_bytes(shape, sequence_length=2048, dropout=True)
    assert held + shared - 4 * heads == 34 * hidden
    per_layer = (held + shared - 4 * heads) / layout.tensor * 2048 * batch
    got = per_layer * layers / layout.pipeline * in_flight(layout, 0, 512)
    assert got / GIB == pytest.approx(gib, rel=1e-3)


def test_activations_without_sequence_parallelism_or_recomputation() -> None:
    shape = ModelShape.filled(num_layers=48, hidden_size=6144, num_heads=64)
    held, shared = activation_bytes(shape, sequence_length=2048, flash=False, dropout=True)
    assert (held + shared / 8) * 2048 * 4 * 48 / GIB == pytest.approx(59.25, rel=1e-3)


def test_megatrons_states_are_those_of_figure_1() -> None:
    shape = ModelShape.filled(num_layers=48, hidden_size=6144, num_heads=64, vocab_size=51200, tied=True)
    job = _job(shape, ClusterLayout(tensor=8), engine="megatron", num_devices=8, name="a100")
    parts = estimate_memory(job).parts
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert states / GIB == pytest.approx(45.5625, rel=0.03)


def test_mosaicmls_identity_of_tokens_and_flops() -> None:
    rows = of_source("MosaicML")
    assert len(rows) == 32
    for row, prediction in rows:
        assert prediction.job is not None
        shape, sequence = prediction.job.shape, prediction.job.sequence_length
        # Its N includes the tied embedding and the learned positions.
        assert shape.parameters == pytest.approx(1e9 * float(row["params_b"]), rel=0.003)
        flops = 6 * shape.parameters + shape.attention_flops(sequence, causal=False)
        got = float(row["measured_tokens_per_s_per_gpu"]) * flops / 1e12
        assert got == pytest.approx(float(row["measured_tflops_per_gpu"]), rel=0.02)


def test_megatron_bridges_identity_is_causal() -> None:
    rows = [(row, prediction) for row, prediction in of_source("NVIDIA Megatron-Bridge") if "Llama" in row["model"]]
    assert len(rows) == 9
    for row, prediction in rows:
        assert prediction.job is not None
        flops = prediction.job.shape.training_flops(prediction.job.sequence_length, causal=True)
        got = float(row["measured_tokens_per_s_per_gpu"]) * flops / 1e12
        assert got == pytest.approx(float(row["measured_tflops_per_gpu"]), rel=0.023)
        doubled = prediction.job.shape.training_flops(prediction.job.sequence_length)
        assert doubled > 1.01 * flops


def _job(
    shape: ModelShape, layout: ClusterLayout, *, engine: str, num_devices: int, name: str = "v100-32gb", **more
) -> Job:
    job = Job(
        shape=shape,
        device=device(name),
        num_devices=num_devices,
        sequence_length=2048,
        global_batch=512 * layout.data,
        micro_batch=1,
        layout=layout,
        precision="fp16_mixed",
        engine=engine,
        recompute="full",
    )
    return dataclasses.replace(job, **more)


@pytest.mark.parametrize("engine", ["shardline", "deepspeed", "megatron"])
def test_13b_on_v100_fits_on_no_number_of_cards_with_plain_data_parallelism(engine: str) -> None:
    shape = ModelShape.from_parameters(13e9)
    for count in (1, 8, 64, 1024, 65536):
        memory = estimate_memory(_job(shape, ClusterLayout(data=count), engine=engine, num_devices=count))
        assert not memory.fits
        assert memory.parts["weights"] + memory.parts["gradients"] + memory.parts["optimizer"] > 180e9


def test_13b_on_8_v100_trains_with_zero_2_and_the_optimizer_on_the_host() -> None:
    shape = ModelShape.from_parameters(13e9)
    layout = ClusterLayout(data=8, zero=2)
    offloaded = _job(shape, layout, engine="deepspeed", num_devices=8, offload=frozenset({"optimizer"}))
    memory = estimate_memory(offloaded)
    assert memory.fits
    assert memory.host_bytes > 16 * 12.5e9
    assert not estimate_memory(dataclasses.replace(offloaded, offload=frozenset())).fits


def test_how_many_cards_13b_takes_by_tensor_and_pipeline_parallelism_alone() -> None:
    shape = ModelShape.from_parameters(13e9)

    def verdict(engine: str, tensor: int, pipeline: int) -> str:
        layout = ClusterLayout(tensor=tensor, pipeline=pipeline)
        return estimate_memory(_job(shape, layout, engine=engine, num_devices=tensor * pipeline)).verdict

    # 18 bytes an element are 29 GB on each of eight cards of 34: it can be done, with nothing to spare.
    assert [verdict("megatron", *split) for split in ((8, 1), (4, 2), (1, 8))] == ["tight", "tight", "does not fit"]
    assert {verdict("deepspeed", *split) for split in ((8, 1), (4, 2), (2, 4), (1, 8))} == {"does not fit"}
    for engine in ("megatron", "deepspeed"):
        assert {verdict(engine, *split) for split in ((16, 1), (8, 2), (4, 4))} == {"fits"}
