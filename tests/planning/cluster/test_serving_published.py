"""Serving against what others measured. No constant was fitted to these: they were looked up after the model was done.

NIM: docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance, Llama-3.3-70B, 2 x H100 80G, fp8, TP2, version 1.8.0.
vLLM: buildkite.com/vllm/performance-benchmark/builds/9515, one H200 or several, 32 tokens in, 128 out, 8 requests.
"""

from __future__ import annotations

import pytest

from shardline.hardware.catalogue import device
from shardline.planning.cluster.known_shapes import known_shape
from shardline.planning.cluster.serving import decode_s, estimate_serving, prefill_s

LLAMA = known_shape("llama-3.3-70b")
H100, H200 = device("h100"), device("h200")


@pytest.mark.parametrize(("tokens", "measured_s"), [(5000, 0.40677), (500, 0.04777)])
def test_prefill(tokens: int, measured_s: float) -> None:
    found = prefill_s(LLAMA, H100, tokens, tensor=2, weights="fp8", runtime="vllm")
    assert found == pytest.approx(measured_s, rel=0.2)


@pytest.mark.parametrize(("context", "measured_s"), [(5250, 0.01858), (1500, 0.01891)])
def test_a_token_of_one_request(context: int, measured_s: float) -> None:
    found = decode_s(LLAMA, H100, batch=1, context=context, tensor=2, weights="fp8", cache="fp8", runtime="vllm")
    assert found == pytest.approx(measured_s, rel=0.1)


def test_the_most_tokens_a_second() -> None:
    """920 tokens/s from 100 requests at once on, of 5,000 tokens with replies of 500."""
    found = estimate_serving(
        LLAMA,
        H100,
        tensor=2,
        weights="fp8",
        cache="fp8",
        prompt_tokens=5000,
        output_tokens=500,
        runtime="vllm",
    )
    assert found.max_request_rate * 500 == pytest.approx(920, rel=0.2)
    assert 50 < found.max_requests < 100  # the time to the first token jumps between these


@pytest.mark.parametrize(
    ("model", "tensor", "measured_s"),
    [("llama-3.1-8b", 1, 0.833421), ("llama-3-70b", 4, 2.07753), ("mixtral-8x7b", 2, 1.91744)],
)
def test_eight_requests_with_vllm(model: str, tensor: int, measured_s: float) -> None:
    shape = known_shape(model)
    first = prefill_s(shape, H200, 8 * 32, tensor=tensor, runtime="vllm")
    each = decode_s(shape, H200, batch=8, context=96, tensor=tensor, runtime="vllm")
    assert first + 127 * each == pytest.approx(measured_s, rel=0.2)
