"""Serving in closed form: cache bytes, what fits, and how fast it goes."""

from __future__ import annotations

import dataclasses

import pytest

from planning.cluster.published import of_source
from shardline.config import InfeasibleError, UsageError
from shardline.hardware.catalogue import device
from shardline.models.presets import preset
from shardline.planning.cluster.serving import decode_s, estimate_serving, kv_bytes, prefill_s
from shardline.planning.cluster.shape import ModelShape

LLAMA = ModelShape.of(preset("llama-3.1-8b"))
H100 = device("h100")


@pytest.mark.parametrize(
    ("name", "kib"), [("llama-3.1-8b", 128), ("llama-3.1-70b", 320), ("llama-2-7b", 512), ("qwen2.5-7b", 56)]
)
def test_cache_of_a_token(name: str, kib: float) -> None:
    assert kv_bytes(ModelShape.of(preset(name)), 1) == kib * 1024


def test_windows_cap_their_layers_and_latent_caches_are_whole_on_every_rank() -> None:
    mistral = ModelShape.of(preset("mistral-7b-v0.1"))
    assert kv_bytes(mistral, 4096) == kv_bytes(mistral, 32768) == 4096 * 128 * 1024
    gemma = ModelShape.of(preset("gemma-2-9b"))
    full = dataclasses.replace(gemma, windows=())
    assert kv_bytes(full, 8192) > kv_bytes(gemma, 8192) > kv_bytes(full, 8192) / 2
    latent = dataclasses.replace(LLAMA, kv_lora=512, rope_dim=64)
    assert kv_bytes(latent, 1) == kv_bytes(latent, 1, tensor=8) == 2 * 32 * 576
    assert kv_bytes(LLAMA, 1, tensor=32) == kv_bytes(LLAMA, 1) / 8  # eight key heads


def test_what_fits() -> None:
    serving = estimate_serving(LLAMA, H100, prompt_tokens=7168, output_tokens=1024, runtime="vllm", max_sequences=1024)
    weights, room = serving.parts["weights"], serving.parts["cache"]
    assert weights == pytest.approx(2 * LLAMA.parameters)
    assert serving.cache_tokens == int(room // serving.kv_bytes_per_token)
    assert serving.max_requests == int(room // (8192 * serving.kv_bytes_per_token))
    assert 45 < serving.max_requests < 60
    short = estimate_serving(LLAMA, H100, prompt_tokens=512, output_tokens=512, max_sequences=1024)
    assert short.max_requests > 6 * serving.max_requests
    assert estimate_serving(LLAMA, H100, cache="fp8", max_sequences=1024).cache_tokens > 1.9 * serving.cache_tokens
    big = estimate_serving(ModelShape.of(preset("llama-3.1-70b")), H100)
    assert not big.fits
    assert "GiB are needed for one request" in big.reasons[0]
    assert estimate_serving(ModelShape.of(preset("llama-3.1-70b")), H100, tensor=4).fits


def test_decoding_is_bound_by_bandwidth_and_prefill_by_products() -> None:
    one, many = (decode_s(LLAMA, H100, batch=batch, context=1024, runtime="vllm") for batch in (1, 32))
    assert 0.005 < one < 0.012
    assert many < 1.5 * one
    assert decode_s(LLAMA, H100, batch=1, context=1024, weights="int4", runtime="vllm") < 0.6 * one
    short, long = (prefill_s(LLAMA, H100, tokens, runtime="vllm") for tokens in (1024, 8192))
    assert 6 < long / short < 10
    assert 0.1 < long < 0.5


def test_a_small_batch_reads_few_experts() -> None:
    mixtral = ModelShape.of(preset("mixtral-8x7b"))
    one, many = (decode_s(mixtral, device("h200"), batch=batch, context=256, runtime="vllm") for batch in (1, 64))
    assert one < 0.5 * many


def test_latency_grows_with_the_rate_and_replicas_meet_limits() -> None:
    slow, busy = (estimate_serving(LLAMA, H100, request_rate=rate, runtime="vllm") for rate in (1.0, 15.0))
    assert slow.replicas == busy.replicas == 1
    assert slow.ttft_s < busy.ttft_s
    assert slow.tpot_s < busy.tpot_s
    assert busy.concurrency == pytest.approx(15.0 * 256 * busy.tpot_s, rel=0.01)  # Little's law
    fleet = estimate_serving(LLAMA, H100, request_rate=200.0, runtime="vllm")
    assert fleet.replicas >= 200 / fleet.max_request_rate
    tight = estimate_serving(LLAMA, H100, request_rate=200.0, tpot_limit_s=0.012, runtime="vllm")
    assert tight.replicas > fleet.replicas
    assert tight.tpot_s <= 0.012
    never = estimate_serving(LLAMA, H100, request_rate=1.0, ttft_limit_s=1e-6, runtime="vllm")
    assert never.ttft_s is None
    assert "no number of replicas" in never.reasons[0]


def test_published_decode_rates_of_one_sequence() -> None:
    rows = [(row, found) for row, found in of_source("litgpt") if row["measured_tokens_per_s_per_gpu"]]
    assert len(rows) == 6
    for row, found in rows:
        measured = float(row["measured_tokens_per_s_per_gpu"])
        assert found.tokens_per_s_per_device == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "int5"}, "did you mean 'int"),
        ({"cache": "nf4"}, "A cache of type 'nf4'"),
        ({"runtime": "vlm"}, "did you mean 'vllm'"),
        ({"output_tokens": 0}, "output_tokens = 0"),
        ({"tensor": 3}, "32 heads are not a multiple of tensor = 3"),
    ],
)
def test_bad_requests(changes: dict, message: str) -> None:
    with pytest.raises((UsageError, InfeasibleError), match=message):
        estimate_serving(LLAMA, H100, **changes)
