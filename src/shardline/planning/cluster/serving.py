"""What a model needs to be served, how many requests fit, and how fast they are answered.

    serving = estimate_serving(shape, device("h100"), tensor=1, prompt_tokens=1024, output_tokens=256, request_rate=4.0)
    serving.max_requests, serving.ttft_s, serving.tpot_s, serving.replicas

Prefill is bound by products, decoding by reading weights and cache once a step; both cost the host's time too. At a
request rate, requests arrive at random: prefills take turns with decode steps, so many requests are decoded together as
Little's law says, and a prompt waits for those before it (one server, Poisson arrivals).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import yaml

from shardline.config.errors import InfeasibleError, UsageError, nearest
from shardline.planning.cluster.products import product_efficiency

if TYPE_CHECKING:
    from shardline.hardware.catalogue import Device
    from shardline.planning.cluster.shape import ModelShape

__all__ = [
    "MAX_SEQUENCES",
    "MEMORY_SHARE",
    "WEIGHT_BYTES",
    "Serving",
    "decode_s",
    "estimate_serving",
    "kv_bytes",
    "prefill_s",
    "runtime_names",
    "runtime_types",
]

GIB = 1 << 30
WEIGHT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.03, "int4": 0.56, "nf4": 0.5625}
_CACHE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}
MAX_SEQUENCES = 256  # that a step decodes at once
MEMORY_SHARE = 0.9  # of a device that a replica is given
_BLOCK = 16  # tokens that a cache is given out in
_BANDWIDTH = 0.8  # of the data sheet's, reached while weights and cache stream
_COMPUTE = 0.75  # of the measured product rate, reached by a prefill's
_MESSAGE_S = 12e-6
_ITERATIONS = 60


@dataclass(frozen=True, kw_only=True)
class Serving:
    """One replica over `tensor` devices, and how many of them a request rate takes.

    kv_bytes_per_token  on one device, of a token that every layer keeps
    max_requests        of prompt_tokens + output_tokens that fit in the cache at once
    tokens_per_s        output of one replica: at the request rate it is given, or the most it can do
    ttft_s, tpot_s      mean time to the first token and for each further one, at `request_rate`; None without one,
                        or where no number of replicas meets the limits
    """

    parts: dict[str, float]  # bytes on one device: weights, activations, runtime, cache
    capacity_bytes: float
    tensor: int
    prompt_tokens: int
    output_tokens: int
    kv_bytes_per_token: float
    cache_tokens: int
    max_requests: int
    prefill_s: float
    decode_s: float  # a step with one request
    decode_full_s: float  # a step with max_requests
    max_request_rate: float  # of one replica
    request_rate: float | None
    concurrency: float | None
    ttft_s: float | None
    tpot_s: float | None
    tokens_per_s: float
    replicas: int
    reasons: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.max_requests >= 1

    @property
    def expected_bytes(self) -> float:
        return sum(self.parts.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "fits": self.fits,
            "memory_gib": {
                "total": self.expected_bytes / GIB,
                "capacity": self.capacity_bytes / GIB,
                "parts": {name: count / GIB for name, count in self.parts.items()},
            },
            "tensor": self.tensor,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "cache_tokens": self.cache_tokens,
            "max_requests": self.max_requests,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "decode_full_s": self.decode_full_s,
            "max_request_rate": self.max_request_rate,
            "request_rate": self.request_rate,
            "concurrency": self.concurrency,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "tokens_per_s": self.tokens_per_s,
            "replicas": self.replicas,
            "reasons": list(self.reasons),
        }


def estimate_serving(
    shape: ModelShape,
    device: Device,
    *,
    tensor: int = 1,
    weights: str = "bf16",
    cache: str = "bf16",
    prompt_tokens: int = 1024,
    output_tokens: int = 256,
    request_rate: float | None = None,
    ttft_limit_s: float | None = None,
    tpot_limit_s: float | None = None,
    max_batched_tokens: int = 8192,
    max_sequences: int = MAX_SEQUENCES,
    memory_share: float = MEMORY_SHARE,
    runtime: str = "shardline",
) -> Serving:
    """Returns what one replica over `tensor` devices needs and does; with a `request_rate` (requests a second of all
    replicas together) and limits, how many replicas answer it in time.

    Raises `UsageError` for unknown names and absurd numbers, `InfeasibleError` for heads that don't divide.
    """
    facts = _runtime(runtime)
    _check(shape, tensor=tensor, weights=weights, cache=cache, prompt=prompt_tokens, output=output_tokens)
    length = prompt_tokens + output_tokens
    held = weight_bytes(shape, weights) / tensor
    activations = _activations(shape, tensor, max_batched_tokens, max_sequences)
    context = (facts["context_gib"] + facts["graphs_gib"]) * GIB
    room = max(0.0, memory_share * device.memory_bytes - held - activations - context)
    size = cache_bytes_of(cache)
    one = kv_bytes(shape, math.ceil(length / _BLOCK) * _BLOCK, tensor=tensor, size=size)
    per_token = kv_bytes(shape, 1, tensor=tensor, size=size)
    requests = min(max_sequences, int(room // one))
    prefill = prefill_s(shape, device, prompt_tokens, tensor=tensor, weights=weights, runtime=runtime)
    middle = prompt_tokens + output_tokens // 2

    def step(batch: float) -> float:
        return decode_s(
            shape, device, batch=batch, context=middle, tensor=tensor, weights=weights, cache=cache, runtime=runtime
        )

    most = _most(step, prefill, output_tokens, requests)
    replicas, ttft, tpot, alive, per_replica = 1, None, None, None, None
    reasons = []
    if requests < 1:
        need = (held + activations + context + one) / memory_share
        reasons.append(
            f"{need / GIB:.1f} GiB are needed for one request of {length} tokens, and a {device.name} has "
            f"{device.memory_gib:.1f}"
        )
    elif request_rate is not None:
        found = _replicas(step, prefill, output_tokens, requests, request_rate, most, ttft_limit_s, tpot_limit_s)
        replicas, per_replica, state = found
        if state is None:
            reasons.append("no number of replicas meets the limits: one request alone takes longer")
        else:
            ttft, tpot, alive = state
    rate = per_replica if ttft is not None and per_replica is not None else most
    return Serving(
        parts={"weights": held, "activations": activations, "runtime": context, "cache": room},
        capacity_bytes=float(device.memory_bytes),
        tensor=tensor,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        kv_bytes_per_token=per_token,
        cache_tokens=int(room // per_token) if per_token else 0,
        max_requests=requests,
        prefill_s=prefill,
        decode_s=step(1),
        decode_full_s=step(max(1, requests)),
        max_request_rate=most,
        request_rate=request_rate,
        concurrency=alive,
        ttft_s=ttft,
        tpot_s=tpot,
        tokens_per_s=rate * output_tokens,
        replicas=replicas,
        reasons=tuple(reasons),
    )


def weight_bytes(shape: ModelShape, kind: str) -> float:
    """Returns the bytes of all weights; embedding, head and norms stay at 16 bits where products are quantised."""
    layers = shape.num_layers * shape.layer_parameters()
    size = WEIGHT_BYTES[kind]
    return layers * size + (shape.parameters - layers) * max(2.0, size)


def cache_bytes_of(kind: str) -> int:
    return _CACHE_BYTES[kind]


def kv_bytes(shape: ModelShape, tokens: int, *, tensor: int = 1, size: int = 2) -> float:
    """Returns the cache's bytes on one device of one request of `tokens` tokens.

    A layer with a window keeps no more than that; heads are shared out as far as there are any, a latent cache is not.
    """
    kept = tokens * 1.0
    if shape.windows:
        total = sum(count for _, count in shape.windows)
        kept = sum(min(tokens, window or tokens) * count for window, count in shape.windows) / total
    share = 1 if shape.kv_lora else min(tensor, shape.num_kv_heads)
    return size * shape.kv_elements() * kept / share


def prefill_s(
    shape: ModelShape,
    device: Device,
    tokens: int,
    *,
    tensor: int = 1,
    weights: str = "bf16",
    runtime: str = "shardline",
) -> float:
    """Returns seconds until a prompt of `tokens` tokens has its first token, nothing else running."""
    dtype = weights if weights in ("fp32", "fp8") else "bf16"
    width = max(64, shape.hidden_size // tensor)
    share = _COMPUTE * product_efficiency(tokens, width, shape.hidden_size, device.units)
    products = 2 * shape.num_layers * shape.layer_parameters(active=True) * tokens / tensor
    attention = shape.attention_flops(tokens, causal=True) / 3 * tokens / tensor
    compute = products / (device.flops(dtype) * share) + attention / (device.flops("bf16") * 0.5)
    reading = weight_bytes(shape, weights) / tensor / (device.bandwidth * _BANDWIDTH)
    return max(compute, reading) + _all_reduces(shape, device, tokens, tensor) + _host(shape, weights, runtime)


def decode_s(
    shape: ModelShape,
    device: Device,
    *,
    batch: float,
    context: int,
    tensor: int = 1,
    weights: str = "bf16",
    cache: str = "bf16",
    runtime: str = "shardline",
) -> float:
    """Returns seconds of a step that gives each of `batch` requests, `context` tokens long, one token."""
    held = weight_bytes(shape, weights)
    if shape.num_experts:
        # Of a mixture, a small batch reads only the experts that its tokens meet.
        met = 1 - (1 - shape.experts_per_token / shape.num_experts) ** max(1.0, batch)
        routed = (shape.num_layers - shape.dense_layers) * shape.num_experts * shape.expert_parameters
        held -= (1 - met) * routed * WEIGHT_BYTES[weights]
    read = held / tensor + batch * kv_bytes(shape, context, tensor=tensor, size=_CACHE_BYTES[cache])
    dtype = weights if weights in ("fp32", "fp8") else "bf16"
    compute = 2 * shape.matmul_parameters * batch / tensor / (device.flops(dtype) * 0.6)
    streamed = read / (device.bandwidth * _BANDWIDTH)
    return max(streamed, compute) + _all_reduces(shape, device, batch, tensor) + _host(shape, weights, runtime)


def runtime_types(runtime: str) -> tuple[list[str], list[str]]:
    """Returns the types of weights and of caches that a runtime serves."""
    facts = _runtime(runtime)
    return facts["weights"], facts["caches"]


def runtime_names() -> tuple[str, ...]:
    return tuple(_runtimes())


def _all_reduces(shape: ModelShape, device: Device, tokens: float, tensor: int) -> float:
    if tensor == 1:
        return 0.0
    rate = device.link_within if tensor <= device.devices_per_node else device.link_between
    one = 2 * (tensor - 1) / tensor * 2 * shape.hidden_size * tokens / (rate * 0.75)
    return 2 * shape.num_layers * (one + _MESSAGE_S)


def _host(shape: ModelShape, weights: str, runtime: str) -> float:
    facts = _runtime(runtime)
    unpacked = weights in ("nf4", "int4", "int8")
    layer = facts["layer_s"] + (facts["quantized_layer_s"] if unpacked else 0.0)
    return facts["step_s"] + layer * shape.num_layers


def _activations(shape: ModelShape, tensor: int, tokens: int, sequences: int) -> float:
    inner = (shape.expert_size or shape.ffn_size) * max(1, shape.experts_per_token)
    layer = tokens * (8 * shape.hidden_size + (6 if shape.gated else 4) * inner / tensor)
    logits = 10.0 * sequences * shape.vocab_size  # fp32, sorted or turned into probabilities for sampling
    return layer + logits


def _steady(step: Any, prefill: float, output: int, requests: int, rate: float) -> tuple[float, float, float] | None:
    """Returns (ttft, tpot, requests decoded at once) of one replica; None where it can't keep up."""
    busy = rate * prefill
    if busy >= 0.98:
        return None
    batch = 1.0
    for _ in range(_ITERATIONS):
        tpot = step(max(1.0, batch)) / (1 - busy)
        new = rate * output * tpot
        if new > requests:
            return None
        if abs(new - batch) < 1e-3:
            break
        batch = new
    tpot = step(max(1.0, batch)) / (1 - busy)
    wait = busy * prefill / (2 * (1 - busy)) + min(1.0, batch) * step(max(1.0, batch)) / 2
    return prefill + wait, tpot, batch


def _most(step: Any, prefill: float, output: int, requests: int) -> float:
    """Returns the most requests a second that one replica answers without falling behind."""
    if requests < 1:
        return 0.0
    # A round of `requests` requests: their prefills one after the other, and all of their steps together.
    return requests / (requests * prefill + output * step(requests))


def _replicas(
    step: Any,
    prefill: float,
    output: int,
    requests: int,
    rate: float,
    most: float,
    ttft_limit: float | None,
    tpot_limit: float | None,
) -> tuple[int, float, tuple[float, float, float] | None]:
    """Returns (replicas, requests a second of each, its steady state); no state where nothing meets the limits."""

    def meets(count: int) -> tuple[float, float, float] | None:
        state = _steady(step, prefill, output, requests, rate / count)
        if state is None or state[0] > (ttft_limit or math.inf) or state[1] > (tpot_limit or math.inf):
            return None
        return state

    low, high = 1, max(1, math.ceil(rate / max(most, 1e-9)))
    while meets(high) is None:
        low, high = high, high * 2
        if rate / high < 1e-6 * most:
            return high, rate / high, None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle + 1, high)
    return high, rate / high, meets(high)


def _check(shape: ModelShape, *, tensor: int, weights: str, cache: str, prompt: int, output: int) -> None:
    if weights not in WEIGHT_BYTES:
        raise UsageError(f"Weights of type {weights!r} are not known{nearest(weights, WEIGHT_BYTES)}")
    if cache not in _CACHE_BYTES:
        raise UsageError(f"A cache of type {cache!r} is not known{nearest(cache, _CACHE_BYTES)}")
    for name, value in {"tensor": tensor, "prompt_tokens": prompt, "output_tokens": output}.items():
        if value < 1:
            raise UsageError(f"{name} = {value} must be at least 1.")
    if shape.num_heads % tensor:
        raise InfeasibleError(f"{shape.num_heads} heads are not a multiple of tensor = {tensor}.")


def _runtime(name: str) -> dict[str, Any]:
    known = _runtimes()
    if name not in known:
        raise UsageError(f"The runtime {name!r} is not known{nearest(name, known)}")
    return known[name]


@cache
def _runtimes() -> dict[str, dict[str, Any]]:
    text = resources.files("shardline.planning.cluster").joinpath("runtimes.yaml").read_text(encoding="utf-8")
    data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    assert set(data) == {"runtimes"}, f"unknown keys among {sorted(data)}"
    keys = {"step_s", "layer_s", "quantized_layer_s", "context_gib", "graphs_gib", "weights", "caches", "source"}
    for name, facts in data["runtimes"].items():
        assert set(facts) == keys, f"{name}: unknown or missing keys {sorted(set(facts) ^ keys)}"
    return data["runtimes"]
