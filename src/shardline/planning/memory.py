"""Peak resident memory of the fattest process of a layout, predicted from the model's shape and the run's config.

    prediction = predict(model, run, data_ranks=2)                     # the config's layout over 2 data ranks
    prediction = Predictor(model, run).predict(layout, micro_batch=2, recompute="full")
    prediction.total_bytes, prediction.low_bytes, prediction.high_bytes, prediction.phase

A run has moments of large use, and the peak is the largest of them on the rank where it is largest; the parts returned
are those of that moment:

    build      this rank's part, and one whole tensor at a time to fill it from
    forward    weights, optimizer state, gradients that are already there, the activations of all passes that are
               alive, what the last layer frees
    loss       the same with the head's gradient and the logits instead
    backward   the same with one layer's gradients (and what is recomputed for them) instead of the logits
    optimizer  weights, optimizer state and all gradients, as backward reaches the embedding; the fused AdamW that
               follows needs no more, others a bucket (`planning.state`)
    save       a rank reads, joins and writes one tensor of the model folder at a time

Background saves keep a copy of the state, 1/n of it on each of n data ranks, and write at any moment but the first.
Sizes are bytes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardline.parallel.grid import Layout
from shardline.planning.rank import ActivationSizes, Parts, Phase, RankSizes, StateSizes, is_sharded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardline.config import RunConfig
    from shardline.models.config import DecoderConfig
    from shardline.parallel.recompute import Recompute
    from shardline.planning.activations import Arithmetic

__all__ = ["PARTS", "MemoryPrediction", "Phase", "Predictor", "predict"]

PARTS = (
    "weights", "gradients", "optimizer", "activations", "logits", "communication", "checkpoint", "allocator", "runtime",
)  # fmt: skip

# Python, torch, gloo, transformers' tokenizer and the code that torch and MKL page in as they run: measured on a
# `tiny` run, whose own tensors are small (docs/planning.md says how).
_RUNTIME_BYTES = 375 << 20
# Nearly all of the benchmark's errors lie within this band (docs/planning.md).
_LOW, _HIGH = 0.9, 1.1
_ALL_RANKS = 8  # of a longer pipeline only those at the ends and one between are looked at


@dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Bytes of the fattest rank at its peak, by part, with the band in which the measured peak should lie.

    pipeline_rank   where on the pipeline axis that rank is
    """

    phase: Phase
    pipeline_rank: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    communication_bytes: int
    checkpoint_bytes: int
    allocator_bytes: int
    runtime_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.parts().values())

    @property
    def low_bytes(self) -> int:
        return int(_LOW * self.total_bytes)

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
            "pipeline_rank": self.pipeline_rank,
            "parts": {name: count / gib for name, count in self.parts().items()},
        }


def predict(model: DecoderConfig, run: RunConfig, *, data_ranks: int, zero: int | None = None) -> MemoryPrediction:
    """Returns the peak of the fattest process of the config's layout over `data_ranks` times its tensor and pipeline
    ranks; `zero` replaces the config's stage if given.
    """
    parallel = run.parallel
    layout = Layout.resolve(
        dataclasses.replace(parallel, data=data_ranks), world_size=data_ranks * parallel.tensor * parallel.pipeline
    )
    if zero is not None:
        layout = dataclasses.replace(layout, zero=zero)
    return Predictor(model, run).predict(
        layout, micro_batch=run.train.micro_batch, recompute=parallel.activation_checkpointing
    )


class Predictor:
    """Predictions for one model and run in many layouts: what several layouts share is worked out once.

    copies   collectives copy what they send and receive, as gloo's do; NCCL's work in place
    """

    def __init__(self, model: DecoderConfig, run: RunConfig, *, copies: bool = True) -> None:
        self._model, self._run, self._copies = model, run, copies
        self._passes: dict[object, ActivationSizes] = {}
        self._states: dict[object, StateSizes] = {}

    def predict(self, layout: Layout, *, micro_batch: int, recompute: Recompute) -> MemoryPrediction:
        """Returns the peak of the fattest process; the global batch is the config's."""
        peaks = {}
        for rank in _ranks(layout):
            sizes = RankSizes(
                state=self._state(layout, rank), passes=self._activations(layout, rank, micro_batch, recompute)
            )
            peaks[rank] = _peak(sizes.moments())
        rank, peak = max(peaks.items(), key=lambda item: item[1].total)
        return MemoryPrediction(
            phase=peak.phase,
            pipeline_rank=rank,
            weights_bytes=peak.weights,
            gradients_bytes=peak.gradients,
            optimizer_bytes=peak.optimizer,
            activations_bytes=peak.activations,
            logits_bytes=peak.logits,
            communication_bytes=peak.communication,
            checkpoint_bytes=peak.checkpoint,
            allocator_bytes=peak.allocator,
            runtime_bytes=_RUNTIME_BYTES,
        )

    def _arithmetic(self, layout: Layout) -> Arithmetic:
        if self._run.train.precision == "fp32":
            return "fp32"
        gathers_half = is_sharded(self._run, layout) or self._run.train.precision == "bf16_pure"
        return "bf16" if gathers_half else "autocast"

    def _state(self, layout: Layout, rank: int) -> StateSizes:
        key = dataclasses.replace(layout, micro_batches=None), rank
        if key not in self._states:
            self._states[key] = StateSizes.of(
                self._model,
                self._run,
                layout,
                rank=rank,
                arithmetic=self._arithmetic(layout),
                copies=self._copies,
            )
        return self._states[key]

    def _activations(self, layout: Layout, rank: int, micro_batch: int, recompute: Recompute) -> ActivationSizes:
        arithmetic = self._arithmetic(layout)
        count = max(1, self._run.train.global_batch // (micro_batch * layout.data))
        if layout.pipeline == 1:
            count = min(count, 2)
        grid = layout.tensor, layout.pipeline, layout.schedule, layout.virtual_stages, layout.sequence_parallel
        key = grid, rank, micro_batch, recompute, arithmetic, count
        if key not in self._passes:
            self._passes[key] = ActivationSizes.of(
                self._model,
                layout,
                rank=rank,
                rows=micro_batch,
                sequence_length=self._run.data.sequence_length,
                arithmetic=arithmetic,
                recompute=recompute,
                num_micro_batches=count,
            )
        return self._passes[key]


def _ranks(layout: Layout) -> Iterable[int]:
    last = layout.pipeline - 1
    return range(last + 1) if last < _ALL_RANKS else (0, 1, last // 2, last - 1, last)


def _peak(moments: Iterable[Parts]) -> Parts:
    return max(moments, key=lambda parts: parts.total)
