"""What a device can hold and do: the figures of catalogue.yaml, and of this machine by probing it.

    device("A100 80GB").memory_bytes
    count, kind = parse_devices("8xV100-32GB")
    parse_devices("cpu:4")             # four processes on this machine's cores
    parse_devices("this")              # what is here; a matrix product and a copy are timed (about a second)

Rates are FLOP/s and bytes/s of one device; links count one direction.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

from shardline.config.errors import UsageError, nearest
from shardline.hardware.probe import Machine, probe

__all__ = ["Device", "device", "device_names", "parse_devices", "this_device"]

GIB = 1 << 30
_KEYS = {
    "names", "source", "kind", "capability", "memory_gib", "units", "nominal", "measured", "measured_source",
    "sustained", "attention", "bandwidth", "link", "node",
}  # fmt: skip
_DTYPES = {"fp32", "tf32", "fp16", "bf16", "fp8", "fp4"}
# FLOP/s of one core in an fp32 product, by the widest instructions: measured on servers, as in planning.timing.
_CORE_FLOPS = {"avx512f": 70e9, "avx2": 45e9, "neon": 25e9, "": 8e9}


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, and the node that it is usually in.

    nominal_flops   dtype -> FLOP/s of the data sheet, dense
    matmul_flops    dtype -> FLOP/s of the best product that was timed, or estimated: `measured_source` says which
    sustained       share of that rate left when products follow each other for hours (power, heat)
    attention       fused attention's share of the products' rate, in parts of its share on an A100
    units           what a kernel's tiles are dealt to
    link_within     bytes/s to another device of the node
    link_between    bytes/s to a device of another node, this device's share of the node's network
    host_bytes      memory of the node's host, for all its devices
    host_copy       bytes/s of a pinned copy between host and this device
    """

    name: str
    kind: str  # "cuda", "rocm", "tpu", "mps" or "cpu"
    capability: str
    memory_bytes: int
    units: int
    nominal_flops: Mapping[str, float] = field(compare=False)
    matmul_flops: Mapping[str, float] = field(compare=False)
    sustained: float
    attention: float
    measured_source: str = field(compare=False)
    source: str = field(compare=False)
    bandwidth: float
    link_within: float
    link_between: float
    devices_per_node: int
    host_bytes: int
    host_copy: float

    @property
    def memory_gib(self) -> float:
        return self.memory_bytes / GIB

    def flops(self, dtype: str) -> float:
        """Returns the FLOP/s that a product in `dtype` reaches, falling back to the type that would be used instead."""
        for name in _FALLBACKS.get(dtype, (dtype,)):
            if name in self.matmul_flops:
                return self.matmul_flops[name]
        raise UsageError(
            f"{self.name} has no matrix product in {dtype}; use one of {', '.join(sorted(self.matmul_flops))}."
        )

    def nominal(self, dtype: str) -> float | None:
        """Returns the data sheet's FLOP/s in `dtype` itself; None where there is none, so no utilisation either."""
        return self.nominal_flops.get(dtype)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "memory_gib": self.memory_gib}


def device(name: str) -> Device:
    """Returns the device of that name or alias, spaces and case aside; raises `UsageError` with the nearest."""
    key = _key(name)
    known = _names()
    if key not in known:
        raise UsageError(f"The device {name!r} is not in the catalogue{nearest(key, device_names())}")
    return _catalogue()[known[key]]


def device_names() -> tuple[str, ...]:
    """Returns the names of all devices, without aliases."""
    return tuple(_catalogue())


def parse_devices(text: str) -> tuple[int, Device]:
    """Returns (how many, device) of "8xV100-32GB", "V100-32GB" (one), "cpu:4", or "this" (measured)."""
    words = text.strip()
    if words.lower() == "this":
        return this_device()
    if match := re.fullmatch(r"cpu(?::(-?\d+))?", words, re.IGNORECASE):
        count = _checked(int(match[1] or 1), text)
        return count, _cpu(probe(), count)
    if match := re.fullmatch(r"(-?\d+)\s*[xX*]\s*(.+)", words):
        return _checked(int(match[1]), text), device(match[2])
    return 1, device(words)


def this_device() -> tuple[int, Device]:
    """Returns (how many, device) of this machine. Loads torch; times a matrix product and a copy."""
    from shardline.hardware.peak import measure_copy_rate, measure_matmul_flops

    machine = probe(with_torch=True)
    if not machine.accelerators:
        found = _cpu(machine, 1)
        rates = {"fp32": measure_matmul_flops("float32"), "bf16": measure_matmul_flops("bfloat16")}
        where = "cpu"
    else:
        first = machine.accelerators[0]
        where = "mps" if first.kind == "mps" else "cuda"
        known = _names().get(_key(first.name)) or _names().get(_key(first.name.removeprefix("NVIDIA ")))
        found = dataclasses.replace(
            _catalogue()[known] if known else _cpu(machine, 1),
            name=first.name,
            kind=first.kind,
            capability=first.capability or "",
            memory_bytes=first.memory_bytes,
            devices_per_node=len(machine.accelerators),
            host_bytes=machine.memory_bytes,
        )
        rates = {
            "fp32": measure_matmul_flops("float32", device=where),
            "fp16": measure_matmul_flops("float16", device=where),
            "bf16": measure_matmul_flops("bfloat16", device=where),
        }
    copy = measure_copy_rate(where)
    return max(1, len(machine.accelerators)), dataclasses.replace(
        found,
        matmul_flops={**found.matmul_flops, **{name: rate for name, rate in rates.items() if rate}},
        measured_source="measured here",
        bandwidth=copy or found.bandwidth,
    )


def _cpu(machine: Machine, processes: int) -> Device:
    isa = next(name for name in _CORE_FLOPS if not name or name in machine.isa)
    flops = _CORE_FLOPS[isa] * machine.num_cores / processes
    has_bf16 = bool({"amx", "avx512_bf16", "bf16"} & set(machine.isa))
    share = 20e9 / processes
    return Device(
        name="cpu",
        kind="cpu",
        capability=isa,
        memory_bytes=machine.memory_bytes // processes,
        units=max(1, machine.num_cores // processes),
        nominal_flops={},
        matmul_flops={"fp32": flops, **({"bf16": 2 * flops} if has_bf16 else {})},
        sustained=1.0,
        attention=1.0,
        measured_source=f"not timed: {_CORE_FLOPS[isa] / 1e9:.0f} GFLOP/s a core ({isa or 'no vector instructions'})",
        source="probed",
        bandwidth=share,
        link_within=1e9,
        link_between=1e9,
        devices_per_node=processes,
        host_bytes=machine.memory_bytes,
        host_copy=share,
    )


def _checked(count: int, text: str) -> int:
    if count < 1:
        raise UsageError(f"--devices {text}: {count} devices; there must be at least 1, as in 8xA100-80GB.")
    return count


# What a product in one type is done in where the device lacks it.
_FALLBACKS = {
    "fp32": ("fp32", "bf16"),  # a TPU's products are bf16 whatever they are asked for
    "tf32": ("tf32", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "fp4": ("fp4", "fp8", "bf16", "fp16", "fp32"),
}


def _key(name: str) -> str:
    key = re.sub(r"[\s_-]+", "-", name.strip().lower())
    key = re.sub(r"(\d)-gb\b", r"\1gb", key)
    return key.removeprefix("nvidia-").removeprefix("geforce-").removeprefix("tesla-")


@cache
def _names() -> dict[str, str]:
    names: dict[str, str] = {}
    for name, facts in _read()["devices"].items():
        for alias in (name, *facts["names"]):
            key = _key(alias)
            assert names.setdefault(key, name) == name, f"{alias} names two devices"
    return names


@cache
def _read() -> dict[str, Any]:
    text = resources.files("shardline.hardware").joinpath("catalogue.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@cache
def _catalogue() -> dict[str, Device]:
    data = _read()
    assert set(data) == {"checked_on", "sources", "devices"}, f"unknown keys among {sorted(data)}"
    return {name: _device(name, facts, data["sources"]) for name, facts in data["devices"].items()}


def _device(name: str, facts: dict[str, Any], sources: dict[str, str]) -> Device:
    assert set(facts) == _KEYS, f"{name}: unknown or missing keys {sorted(set(facts) ^ _KEYS)}"
    assert set(facts["nominal"]) | set(facts["measured"]) <= _DTYPES, f"{name}: an unknown dtype"
    assert set(facts["link"]) == {"within", "between"}, f"{name}: link"
    assert set(facts["node"]) == {"devices", "host_gib", "pcie"}, f"{name}: node"
    return Device(
        name=name,
        kind=facts["kind"],
        capability=facts["capability"],
        memory_bytes=int(facts["memory_gib"] * GIB),
        units=facts["units"],
        nominal_flops={dtype: tera * 1e12 for dtype, tera in facts["nominal"].items()},
        matmul_flops={dtype: tera * 1e12 for dtype, tera in facts["measured"].items()},
        sustained=facts["sustained"],
        attention=facts["attention"],
        measured_source=sources[facts["measured_source"]],
        source=sources[facts["source"]],
        bandwidth=facts["bandwidth"] * 1e9,
        link_within=facts["link"]["within"] * 1e9,
        link_between=facts["link"]["between"] * 1e9,
        devices_per_node=facts["node"]["devices"],
        host_bytes=int(facts["node"]["host_gib"] * GIB),
        host_copy=facts["node"]["pcie"] * 1e9,
    )
