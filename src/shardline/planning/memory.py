"""Peak resident memory of one training process, predicted from the model's shape and the run's config.

    prediction = predict(model, run, data_ranks=2)
    prediction.total_bytes, prediction.low_bytes, prediction.high_bytes, prediction.phase

A step has three moments of large use, and the peak is the largest; the parts returned are those of that moment:

    loss        weights, optimizer state, gradients that are already there, all activations, logits
    backward    the same, with one layer's gradients in flight instead of the logits
    optimizer   weights, optimizer state, all gradients, the optimizer's temporaries

Symbols: P parameters, n data ranks. Where a constant comes from is said beside it, and `docs/planning.md` compares
predictions with measured runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shardline.planning.activations import layer_bytes, layer_working_bytes, outer_bytes
from shardline.planning.parameters import ParameterCount, count_parameters

if TYPE_CHECKING:
    from shardline.config import RunConfig
    from shardline.models.config import DecoderConfig

__all__ = ["PARTS", "MemoryPrediction", "Phase", "predict"]

Phase = Literal["loss", "backward", "optimizer"]
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "communication", "runtime")

_FP32 = 4
# Python, torch, transformers, gloo and a thread pool, before any weights: measured, see docs/planning.md.
_RUNTIME_BYTES = 420 << 20
# What a prediction may miss: the allocator keeps freed blocks (high), pages never touched (low).
_LOW, _HIGH = 0.95, 1.08


@dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Bytes of the fattest rank at its peak, by part, with the band in which the measured peak should lie."""

    phase: Phase
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    communication_bytes: int
    runtime_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.parts().values())

    @property
    def low_bytes(self) -> int:
        return self.runtime_bytes + int(_LOW * (self.total_bytes - self.runtime_bytes))

    @property
    def high_bytes(self) -> int:
        return int(_HIGH * self.total_bytes)

    def parts(self) -> dict[str, int]:
        """Returns part -> bytes, in the order of `PARTS`."""
        return {name: getattr(self, f"{name}_bytes") for name in PARTS}

    def to_json(self) -> dict[str, Any]:
        gib = 1 << 30
        return {
            "total": self.total_bytes / gib,
            "low": self.low_bytes / gib,
            "high": self.high_bytes / gib,
            "phase": self.phase,
            "parts": {name: count / gib for name, count in self.parts().items()},
        }


def predict(model: DecoderConfig, run: RunConfig, *, data_ranks: int, zero: int | None = None) -> MemoryPrediction:
    """Returns the peak memory of one of `data_ranks` processes; `zero` stands in for the config's stage when given."""
    zero = run.parallel.zero if zero is None else zero
    count = count_parameters(model)
    shape = _Shape.of(model, run, data_ranks)
    moments = [
        _moment(phase, count, model, shape, data_ranks=data_ranks, zero=zero)
        for phase in ("loss", "backward", "optimizer")
    ]
    return max(moments, key=lambda moment: moment.total_bytes)


@dataclass(frozen=True, kw_only=True)
class _Shape:
    rows: int
    sequence_length: int
    element_bytes: int
    accumulates: bool

    @classmethod
    def of(cls, model: DecoderConfig, run: RunConfig, data_ranks: int) -> _Shape:
        return cls(
            rows=run.train.micro_batch,
            sequence_length=run.data.sequence_length,
            element_bytes=_FP32 if run.train.precision == "fp32" else 2,
            accumulates=run.train.global_batch > run.train.micro_batch * data_ranks,
        )


def _moment(
    phase: Phase, count: ParameterCount, model: DecoderConfig, shape: _Shape, *, data_ranks: int, zero: int
) -> MemoryPrediction:
    tokens = shape.rows * shape.sequence_length
    weights, gradients, communication = _sharded(phase, count, shape, data_ranks=data_ranks, zero=zero)
    size = {"rows": shape.rows, "sequence_length": shape.sequence_length, "element_bytes": shape.element_bytes}
    activations, logits = 0, 0
    if phase != "optimizer":
        activations = outer_bytes(model, **size)
        activations += sum(layer_bytes(model, layer=i, packed=True, **size) for i in range(model.num_layers))
    if phase == "loss":
        logits = 3 * tokens * model.vocab_size * _FP32
    if phase == "backward":
        activations += layer_working_bytes(model, **size)
    return MemoryPrediction(
        phase=phase,
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=2 * _FP32 * count.total // (data_ranks if zero >= 1 else 1),
        activations_bytes=activations,
        logits_bytes=logits,
        communication_bytes=communication,
        runtime_bytes=_RUNTIME_BYTES,
    )


def _sharded(phase: Phase, count: ParameterCount, shape: _Shape, *, data_ranks: int, zero: int) -> tuple[int, int, int]:
    """Returns bytes of (weights, gradients, communication) at one moment."""
    full = _FP32 * count.total
    shard = full // data_ranks
    if data_ranks == 1 or zero <= 1:
        present = phase == "optimizer" or shape.accumulates or data_ranks > 1
        return full, full if present else _FP32 * (count.head or count.embedding), 0
    layer, outer = _FP32 * count.layer, _FP32 * (count.embedding + count.head + count.final_norm)
    if phase == "optimizer":
        return shard, shard, 0
    gathered = full if zero == 2 else outer + layer
    gradients = shard if shape.accumulates else 0
    return shard + gathered if zero == 2 else shard, gradients + layer, layer + (0 if zero == 2 else gathered)
