"""How to serve a model on a number of devices: tensor ranks of a replica, replicas, and why not the others.

    found = search_serving(ServeAsked(shape=shape, device=device("l4"), num_devices=8, request_rate=4.0))
    found.best                  # a Served; None when nothing fits or nothing is in time
    found.alternatives          # [(name, Served, why not)]

Without a request rate, the best is what answers the most tokens a second on all devices. With one, it is what takes
the fewest devices to answer it within the limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from shardline.config.errors import InfeasibleError, UsageError
from shardline.hardware.catalogue import Device
from shardline.planning.cluster.figures import seconds
from shardline.planning.cluster.serving import WEIGHT_BYTES, Serving, estimate_serving, runtime_types
from shardline.planning.cluster.shape import ModelShape

__all__ = ["ServeAsked", "ServeFound", "Served", "replica", "search_serving"]

GIB = 1 << 30
_SAME = 1.01  # fewer tensor ranks are simpler
_OR = "with "  # begins the name of an alternative that changes the model, not the layout


@dataclass(frozen=True, kw_only=True)
class ServeAsked:
    """What is to be served, on what and how fast; tensor None: any number of a node's devices."""

    shape: ModelShape
    device: Device
    num_devices: int
    num_nodes: int | None = None
    tensor: int | None = None
    weights: str = "bf16"
    cache: str = "bf16"
    prompt_tokens: int = 1024
    output_tokens: int = 256
    request_rate: float | None = None
    ttft_limit_s: float | None = None
    tpot_limit_s: float | None = None
    runtime: str = "shardline"

    @property
    def per_node(self) -> int:
        if self.num_nodes:
            return max(1, -(-self.num_devices // self.num_nodes))
        return self.device.devices_per_node


@dataclass(frozen=True, kw_only=True)
class Served:
    """A way of serving: `serving` is one replica of `tensor` devices, of which there are `replicas`."""

    asked: ServeAsked
    serving: Serving

    @property
    def tensor(self) -> int:
        return self.serving.tensor

    @property
    def replicas(self) -> int:
        """As many as the request rate takes; without one, as many as there is room for."""
        if self.asked.request_rate is not None:
            return self.serving.replicas
        return self.asked.num_devices // self.tensor

    @property
    def num_devices(self) -> int:
        return self.replicas * self.tensor

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second of all replicas."""
        return self.serving.tokens_per_s * self.replicas

    @property
    def is_in_time(self) -> bool:
        """Whether it answers the request rate within the limits, without falling behind."""
        if self.asked.request_rate is not None:
            return self.serving.ttft_s is not None
        limits = (
            (self.serving.prefill_s, self.asked.ttft_limit_s),
            (self.serving.decode_full_s, self.asked.tpot_limit_s),
        )
        return all(limit is None or value <= limit for value, limit in limits)

    @property
    def works(self) -> bool:
        return self.serving.fits and self.is_in_time and self.num_devices <= self.asked.num_devices

    @property
    def why_not(self) -> str:
        """Why it does not work; empty when it does."""
        if not self.serving.fits:
            return self.serving.reasons[0]
        if not self.is_in_time:
            return _late(self)
        if self.num_devices > self.asked.num_devices:
            return f"{self.replicas} replicas of {self.tensor} = {self.num_devices} devices are needed"
        return ""


@dataclass(frozen=True, kw_only=True)
class ServeFound:
    """The answer; `ranked` holds what works, best first, or everything where nothing does."""

    asked: ServeAsked
    best: Served | None
    ranked: list[Served]
    alternatives: list[tuple[str, Served, str]]
    changes: list[str]


def search_serving(asked: ServeAsked, *, top: int = 5) -> ServeFound:
    """Returns the best way to serve and its rivals; raises `InfeasibleError` where no number of ranks is possible."""
    for flag, kind, known in zip(
        ("weights", "cache"), (asked.weights, asked.cache), runtime_types(asked.runtime), strict=True
    ):
        if kind not in known:
            raise UsageError(f"--{flag} {kind}: {asked.runtime} serves {', '.join(known)}; choose one of them.")
    tried = list(_tried(asked))
    working = sorted((each for each in tried if each.works), key=_order)
    best = working[0] if working else None
    if best is not None:
        same = [each for each in working if _value(each) <= _SAME * _value(best)]
        best = min(same, key=lambda each: each.tensor)
        working.sort(key=lambda each: (each is not best, _order(each)))
    others = sorted(tried, key=lambda each: (not each.serving.fits, _need(each)))
    return ServeFound(
        asked=asked,
        best=best,
        ranked=(working or others)[:top],
        alternatives=list(_alternatives(asked, tried, best)),
        changes=[] if best is not None else list(_changes(asked)),
    )


def _tried(asked: ServeAsked) -> Iterator[Served]:
    heads, most = asked.shape.num_heads, min(asked.num_devices, asked.per_node)
    sizes = [asked.tensor] if asked.tensor else [size for size in range(1, most + 1) if heads % size == 0]
    whole = range(2 * asked.per_node, asked.num_devices + 1, asked.per_node)  # only where a node is too small
    across = [] if asked.tensor else [size for size in whole if heads % size == 0]
    if asked.tensor and asked.tensor > asked.num_devices:
        raise InfeasibleError(f"tensor = {asked.tensor} ranks are more than the {asked.num_devices} devices.")
    found = [Served(asked=asked, serving=replica(asked, size)) for size in sizes]
    yield from found
    if not any(each.serving.fits for each in found):
        yield from (Served(asked=asked, serving=replica(asked, size)) for size in across)


def replica(asked: ServeAsked, tensor: int) -> Serving:
    """Returns what one replica of so many tensor ranks needs and does."""
    return estimate_serving(
        asked.shape,
        asked.device,
        tensor=tensor,
        weights=asked.weights,
        cache=asked.cache,
        prompt_tokens=asked.prompt_tokens,
        output_tokens=asked.output_tokens,
        request_rate=asked.request_rate,
        ttft_limit_s=asked.ttft_limit_s,
        tpot_limit_s=asked.tpot_limit_s,
        runtime=asked.runtime,
    )


def _value(each: Served) -> float:
    """What is to be small: devices that the rate takes, or seconds a token."""
    if each.asked.request_rate is not None:
        return float(each.num_devices)
    return 1 / max(1e-12, each.tokens_per_s)


def _order(each: Served) -> tuple[float, float]:
    return _value(each), each.serving.tpot_s or each.serving.decode_full_s


def _need(each: Served) -> float:
    parts = each.serving.parts
    return sum(parts[name] for name in ("weights", "activations", "runtime"))


def _late(each: Served) -> str:
    asked, serving = each.asked, each.serving
    prefill, step = serving.prefill_s, serving.decode_s
    if asked.ttft_limit_s is not None and prefill > asked.ttft_limit_s:
        return f"a prompt alone takes {seconds(prefill)}, over the limit of {seconds(asked.ttft_limit_s)}"
    if asked.tpot_limit_s is not None and step > asked.tpot_limit_s:
        return f"a token of one request alone takes {seconds(step)}, over the limit of {seconds(asked.tpot_limit_s)}"
    if asked.request_rate is None and asked.tpot_limit_s is not None:
        return f"a token of {serving.max_requests} requests takes {seconds(serving.decode_full_s)}, over the limit"
    return "no number of replicas meets the limits together"


def _alternatives(asked: ServeAsked, tried: list[Served], best: Served | None) -> Iterator[tuple[str, Served, str]]:
    for each in tried:
        if each is not best and each.tensor & (each.tensor - 1) == 0:
            yield f"tensor {each.tensor}" if each.tensor > 1 else "one device a replica", each, _why_not(each, best)
    if best is None:
        return
    weights, caches = runtime_types(asked.runtime)
    for kind in _fewer_bits(asked, weights):
        changed = dataclasses.replace(asked, weights=kind, tensor=best.tensor)
        each = Served(asked=changed, serving=replica(changed, best.tensor))
        yield f"{_OR}weights in {kind}", each, _why_not(each, best)
    for kind in ("fp8", "int8"):
        if asked.cache not in ("fp8", "int8") and kind in caches:
            changed = dataclasses.replace(asked, cache=kind, tensor=best.tensor)
            each = Served(asked=changed, serving=replica(changed, best.tensor))
            yield f"{_OR}a cache of {kind}", each, _why_not(each, best)


def _fewer_bits(asked: ServeAsked, served: list[str]) -> list[str]:
    held = WEIGHT_BYTES[asked.weights]
    kinds = [kind for kind in ("fp8", "int8", "int4") if kind in served and WEIGHT_BYTES[kind] < held]
    return [kind for kind in kinds if kind != "fp8" or "fp8" in asked.device.matmul_flops]


def _why_not(each: Served, best: Served | None) -> str:
    if each.why_not or best is None:
        return each.why_not or "works"
    requests = f"{each.serving.max_requests} requests at once on a replica"
    if each.asked.request_rate is not None:
        token = seconds(each.serving.tpot_s or 0)
        return f"{each.num_devices} devices instead of {best.num_devices}, {token} a token; {requests}"
    share, token = each.tokens_per_s / best.tokens_per_s, seconds(each.serving.decode_full_s)
    return f"{share:.0%} of the tokens/s, {token} a token when full; {requests}"


def _changes(asked: ServeAsked) -> Iterator[str]:
    """Yields the changes that would make it work, cheapest first."""

    def works(**changes: object) -> bool:
        changed = dataclasses.replace(asked, **changes)  # pyrefly: ignore
        return any(each.works for each in _tried(changed))

    if asked.tensor is not None and works(tensor=None):
        yield "another number of tensor ranks (no --layout)"
    for kind in _fewer_bits(asked, runtime_types(asked.runtime)[0]):
        if works(weights=kind):
            yield f"weights in {kind} (--weights {kind})"
            break
    length = asked.prompt_tokens // 2
    while length >= 16 and not works(prompt_tokens=length):
        length //= 2
    if length >= 16:
        yield f"prompts of {length} tokens (--prompt-tokens {length})"
    count = 2 * asked.num_devices
    while count <= 64 * asked.num_devices:
        if works(num_devices=count, num_nodes=None, tensor=None):
            yield f"{count} devices"
            break
        count *= 2
    if asked.request_rate is not None and works(ttft_limit_s=None, tpot_limit_s=None):
        yield "no limits on time (--ttft-limit, --tpot-limit)"
