"""The constants of training engines, read from engines.yaml.

engine("megatron").states_of("bf16_mixed")
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

import yaml

from shardline.config.errors import UsageError, nearest

__all__ = ["Engine", "Space", "States", "engine", "engine_names", "replaced"]

_KEYS = {
    "space", "space_source",
    "states", "states_source", "kept", "gradients_persist", "logits", "logits_source", "norm", "norm_source", "inner",
    "inner_source", "dropout", "working", "gathers", "saves_products", "buffers", "fragments", "prefetch",
    "prefetch_source", "unmodelled_gib", "whole_at_load", "context_gib", "memory_source", "time", "time_source",
}  # fmt: skip
_PARTS = ("weights", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class States:
    """(bytes an element, ZeRO stage from which on they are shared out) of each part."""

    weights: tuple[tuple[float, int], ...]
    gradients: tuple[tuple[float, int], ...]
    optimizer: tuple[tuple[float, int], ...]


@dataclass(frozen=True, kw_only=True)
class Space:
    """What an engine's layouts are made of.

    zero, piped   stages of ZeRO without a pipeline and with one
    axes          axes that it has beside data
    offload       what can be kept in the host's memory, in sets of what moves together
    """

    zero: tuple[int, ...]
    piped: tuple[int, ...]
    schedules: tuple[str, ...]
    axes: frozenset[str]
    offload: tuple[frozenset[str], ...]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine; engines.yaml says what each figure is and where it is from."""

    name: str
    space: Space
    states: dict[str, States]
    kept_weights: float
    kept_gradients: float
    gradients_persist: bool
    logits: float
    chunked: float
    norm_rms: float
    norm_layer: float
    norm_compiled: float
    dropout: bool
    inner_gated: float
    inner_plain: float
    inner_low: float
    working: float
    gathers: float
    saves_products: bool
    buffers_gib: float
    buffer_elements: float
    live_elements: float
    fragments: float
    unmodelled_gib: float
    prefetch: float
    prefetch_offloaded: float
    whole_at_load: bool
    context_gib: float
    matmul: float
    attention: float
    traffic_eager: float
    traffic_compiled: float
    overlap: float
    link: float
    host_s: float
    low_precision: float
    tensor_overlap: float
    reduce_bytes: float
    accumulate: float

    def states_of(self, precision: str) -> States:
        kind = "fp32" if precision == "fp32" else "pure" if precision.endswith("_pure") else "mixed"
        return self.states[kind]


def engine(name: str) -> Engine:
    """Returns the engine of that name; raises `UsageError` with the nearest one."""
    known = _engines()
    if name not in known:
        raise UsageError(f"The engine {name!r} is not known{nearest(name, known)}")
    return known[name]


def engine_names() -> tuple[str, ...]:
    return tuple(_engines())


@contextmanager
def replaced(others: Mapping[str, Engine]) -> Generator[None]:
    """Within it, these stand for the engines of their names: for calibration."""
    known = _engines()
    kept = {name: known[name] for name in others}
    known.update(others)
    try:
        yield
    finally:
        known.update(kept)


@cache
def _engines() -> dict[str, Engine]:
    text = resources.files("shardline.planning.cluster").joinpath("engines.yaml").read_text(encoding="utf-8")
    data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    assert set(data) == {"shared", "engines"}, f"unknown keys among {sorted(data)}"
    return {name: _engine(name, facts) for name, facts in data["engines"].items()}


def _engine(name: str, facts: dict[str, Any]) -> Engine:
    assert set(facts) == _KEYS, f"{name}: unknown or missing keys {sorted(set(facts) ^ _KEYS)}"
    buffers, time, space = facts["buffers"], facts["time"], facts["space"]
    assert set(space) == {field.name for field in fields(Space)}, f"{name}: space has {sorted(space)}"
    return Engine(
        name=name,
        space=Space(
            zero=tuple(space["zero"]),
            piped=tuple(space["piped"]),
            schedules=tuple(space["schedules"]),
            axes=frozenset(space["axes"]),
            offload=tuple(frozenset(names) for names in space["offload"]),
        ),
        states={
            kind: States(**{part: tuple(tuple(pair) for pair in parts[part]) for part in _PARTS})
            for kind, parts in facts["states"].items()
        },
        kept_weights=facts["kept"]["weights"],
        kept_gradients=facts["kept"]["gradients"],
        gradients_persist=facts["gradients_persist"],
        logits=facts["logits"]["whole"],
        chunked=facts["logits"]["chunked"],
        norm_rms=facts["norm"]["rms"],
        norm_layer=facts["norm"]["layer"],
        norm_compiled=facts["norm"]["compiled"],
        dropout=facts["dropout"],
        inner_gated=facts["inner"]["gated"],
        inner_plain=facts["inner"]["plain"],
        inner_low=facts["inner"]["low"],
        working=facts["working"],
        gathers=facts["gathers"],
        saves_products=facts["saves_products"],
        buffers_gib=buffers["gib"],
        buffer_elements=buffers["elements"],
        live_elements=buffers["live"],
        fragments=facts["fragments"],
        unmodelled_gib=facts["unmodelled_gib"],
        prefetch=facts["prefetch"]["layers"],
        prefetch_offloaded=facts["prefetch"]["offloaded"],
        whole_at_load=facts["whole_at_load"],
        context_gib=facts["context_gib"],
        matmul=time["matmul"],
        attention=time["attention"],
        traffic_eager=time["traffic"]["eager"],
        traffic_compiled=time["traffic"]["compiled"],
        overlap=time["overlap"],
        link=time["link"],
        host_s=time["host"],
        low_precision=time["low_precision"],
        tensor_overlap=time["tensor_overlap"],
        reduce_bytes=time["reduce"],
        accumulate=time["accumulate"],
    )
