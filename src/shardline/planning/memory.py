"""Peak resident memory of one training process, predicted from the model's shape and the run's config.

    prediction = predict(model, run, data_ranks=2)
    prediction.total_bytes, prediction.low_bytes, prediction.high_bytes, prediction.phase

A run has moments of large use, and the peak is the largest of them; the parts returned are those of that moment:

    build      the whole model on every rank, before it is sharded
    forward    weights, optimizer state, gradients that are already there, all activations, what the last layer frees
    loss       the same with the head's gradient and the logits instead
    backward   the same with one layer's gradients in flight instead of the logits
    optimizer  weights, optimizer state and all gradients, as backward reaches the embedding; the fused AdamW that
               follows needs no more, others a bucket (`planning.state`)
    save       a rank reads, joins and writes one tensor of the model folder at a time

Asynchronous saves keep a copy of the state, 1/n of it a rank, and write at any moment but the first.

Weights, gradients and optimizer state are those of `parallel.data`: DDP keeps gradients in its buckets from the
first step on; FSDP2 gathers the root (embedding, head, final norm) and one layer at a time.
Symbols: n data ranks. Sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from shardline.planning.activations import (
    Arithmetic,
    layer_backward_bytes,
    layer_bytes,
    layer_forward_bytes,
    outer_bytes,
    wide_tensors,
)
from shardline.planning.loss import loss_bytes
from shardline.planning.parameters import count_parameters
from shardline.planning.state import optimizer_state

if TYPE_CHECKING:
    from shardline.config import RunConfig
    from shardline.models.config import DecoderConfig

__all__ = ["PARTS", "MemoryPrediction", "Phase", "predict"]

Phase = Literal["build", "forward", "loss", "backward", "optimizer", "save"]
PARTS = (
    "weights", "gradients", "optimizer", "activations", "logits", "communication", "checkpoint", "allocator", "runtime",
)  # fmt: skip

_FP32, _BF16 = 4, 2
_TENSORS_IN_A_SAVE = 3  # as it is stored, whole, and joined with others as the model folder has it
# Python, torch, gloo, transformers' tokenizer and the code that torch and MKL page in as they run: measured on a
# `tiny` run, whose own tensors are small (docs/planning.md says how).
_RUNTIME_BYTES = 375 << 20
# glibc's malloc keeps most of what a step frees, and holes between blocks that live on stay empty. With
# MALLOC_MMAP_THRESHOLD_=1048576 the measured peaks are those of the other parts alone, so the difference is the
# allocator's. Only blocks up to 32 MiB are kept (glibc's DEFAULT_MMAP_THRESHOLD_MAX); larger ones go back at once.
# Calibrated on this engine's runs: a share of the activations; under FSDP2 a multiple of the parameters, which it
# allocates and frees four times in a step (gathered, gather buffer, gradients, reduce buffer); without FSDP2, another
# one where gradients outlive a micro-batch and lie amid the activations of the next.
_KEPT_BLOCK_BYTES = 32 << 20
_KEPT_OF_ACTIVATIONS = 0.35
_KEPT_OF_ACTIVATIONS_SHARDED = 0.2
_KEPT_OF_PARAMETERS_SHARDED = 2.5
_KEPT_OF_PARAMETERS_ACCUMULATING = 1.0  # one process
_KEPT_OF_PARAMETERS_ACCUMULATING_DDP = 2.0
# All but one of the benchmark's errors lie within this band (docs/planning.md).
_LOW, _HIGH = 0.9, 1.1


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
            "parts": {name: count / gib for name, count in self.parts().items()},
        }


def predict(model: DecoderConfig, run: RunConfig, *, data_ranks: int, zero: int | None = None) -> MemoryPrediction:
    """Returns the peak memory of the fattest of `data_ranks` processes; `zero` replaces the config's stage if given."""
    zero = run.parallel.zero if zero is None else zero
    sizes = _Sizes.of(model, run, data_ranks=data_ranks, zero=zero)
    moments = [_moment(sizes, phase) for phase in get_args(Phase)]
    return max(moments, key=lambda moment: moment.total_bytes)


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Bytes that the moments are made of."""

    ranks: int
    sharded: bool  # FSDP2: ZeRO 2 and 3 over more than one rank
    keeps_parameters: bool  # from forward to backward
    accumulates: bool
    tied: bool
    full: int  # all parameters
    optimizer: int  # of the fattest rank
    optimizer_bucket: int  # of offloaded state, while it is stepped
    optimizer_in_flight: int  # between a parameter's owner and its holders
    head: int  # the head's weight, or the embedding's that stands in for it
    embedding: int
    outer: int  # FSDP2's root group: embedding, head, final norm
    layer: int
    element: int  # bytes of a parameter
    gathered_element: int  # the same when it is gathered
    activations: int
    in_forward: int
    in_backward: int
    loss: int
    copy: int  # of the state, for asynchronous saves; 0 without them
    written: int  # of what is being saved
    allocator: int

    @classmethod
    def of(cls, model: DecoderConfig, run: RunConfig, *, data_ranks: int, zero: int) -> _Sizes:
        count = count_parameters(model)
        sharded = zero >= 2 and data_ranks > 1
        pure = run.train.precision == "bf16_pure"
        arithmetic: Arithmetic = "fp32"
        if run.train.precision != "fp32":
            arithmetic = "bf16" if sharded or pure else "autocast"
        element = _BF16 if pure else _FP32
        state = optimizer_state(model, run, data_ranks=data_ranks, zero=zero)
        shape: dict[str, Any] = {
            "rows": run.train.micro_batch,
            "sequence_length": run.data.sequence_length,
            "arithmetic": arithmetic,
        }
        accumulates = run.train.global_batch > run.train.micro_batch * data_ranks
        layers = range(model.num_layers)
        activations = sum(layer_bytes(model, layer=layer, **shape) for layer in layers)
        return cls(
            ranks=data_ranks,
            sharded=sharded,
            keeps_parameters=zero == 2,
            accumulates=accumulates,
            tied=model.tie_word_embeddings,
            full=element * count.total,
            optimizer=state.kept_bytes,
            optimizer_bucket=state.bucket_bytes,
            optimizer_in_flight=state.in_flight_bytes,
            head=element * (count.head or count.embedding),
            embedding=element * count.embedding,
            outer=element * count.outer,
            layer=element * max(layer.total for layer in count.layers),
            element=element,
            gathered_element=_BF16 if arithmetic == "bf16" else _FP32,
            activations=activations + outer_bytes(model, **shape),
            in_forward=layer_forward_bytes(model, layer=layers[-1], **shape),
            in_backward=max(layer_backward_bytes(model, layer=layer, **shape) for layer in layers),
            loss=loss_bytes(model, **shape),
            copy=_copy_bytes(model, run, element=element, data_ranks=data_ranks, sharded=sharded),
            written=_TENSORS_IN_A_SAVE * element * max(count.tensors),
            allocator=_kept_by_allocator(
                model,
                count.tensors,
                activations,
                sharded=sharded,
                ranks=data_ranks,
                accumulates=accumulates,
                **shape,
            ),
        )

    def gathered(self, size: int) -> int:
        """What `size` bytes of parameters take when they are gathered."""
        return size * self.gathered_element // self.element


def _moment(sizes: _Sizes, phase: Phase) -> MemoryPrediction:
    weights, gradients, communication = _sharded(sizes, phase) if sizes.sharded else _replicated(sizes, phase)
    activations = logits = 0
    if phase == "forward":
        activations = sizes.activations + sizes.in_forward
    if phase == "loss":
        activations, logits = sizes.activations, sizes.loss
    if phase == "backward":
        activations = sizes.activations + sizes.in_backward
    optimizer = 0 if phase == "build" else sizes.optimizer
    checkpoint = 0
    if phase == "save" or (sizes.copy and phase != "build"):
        checkpoint = sizes.copy + sizes.written
    if phase == "optimizer":
        optimizer += sizes.optimizer_bucket
        communication += sizes.optimizer_in_flight
    return MemoryPrediction(
        phase=phase,
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        logits_bytes=logits,
        communication_bytes=communication,
        checkpoint_bytes=checkpoint,
        allocator_bytes=0 if phase == "build" else sizes.allocator,
        runtime_bytes=_RUNTIME_BYTES,
    )


def _replicated(sizes: _Sizes, phase: Phase) -> tuple[int, int, int]:
    """(weights, gradients, communication) of one process, DDP and ZeRO-1."""
    buckets = sizes.full if sizes.ranks > 1 else 0
    gradients = buckets or (sizes.full if sizes.accumulates else 0)
    if phase == "build":
        return sizes.full, buckets, 0
    if phase == "forward":
        return sizes.full, gradients, 0
    if phase in ("loss", "backward"):
        return sizes.full, gradients + sizes.head, 0  # the loss makes the head's gradient in its forward pass
    if phase == "optimizer":
        late = sizes.embedding if sizes.tied or buckets else 0  # the embedding's, before it is added or copied
        return sizes.full, sizes.full + late + (sizes.head if sizes.tied and buckets else 0), 0
    return sizes.full, buckets, 0


def _sharded(sizes: _Sizes, phase: Phase) -> tuple[int, int, int]:
    """(weights, gradients, communication) of FSDP2."""
    shard = sizes.full // sizes.ranks
    root, layer = sizes.gathered(sizes.outer), sizes.gathered(sizes.layer)
    if phase == "build":
        return shard, 0, sizes.full
    kept = shard if sizes.accumulates else 0
    if phase in ("forward", "loss"):
        head = sizes.gathered(sizes.head) if phase == "loss" else 0
        return shard, kept + head, sizes.gathered(sizes.full) if sizes.keeps_parameters else root
    if phase == "backward":
        # One layer computes while the next is gathered (through a flat buffer) and the last is reduced (the same).
        head = sizes.gathered(sizes.head)
        in_flight = 2 * layer + sizes.layer
        gathered = sizes.gathered(sizes.full) if sizes.keeps_parameters else root + 2 * layer
        return shard, kept + head + layer, gathered + in_flight
    if phase == "optimizer":  # the root's gradients and the flat buffer that reduces them
        tied = sizes.gathered(sizes.head) if sizes.tied else 0
        return shard, shard + root + tied, root + sizes.outer
    return shard, 0, 0


def _copy_bytes(model: DecoderConfig, run: RunConfig, *, element: int, data_ranks: int, sharded: bool) -> int:
    """What a rank copies of weights and optimizer state: replicas are dealt out by whole tensors, shards are shares."""
    if not run.checkpoint.asynchronous:
        return 0
    count, state = count_parameters(model), optimizer_state(model, run, data_ranks=1, zero=0)
    share = -(-(element * count.total + state.kept_bytes + state.moved_bytes) // data_ranks)
    return share if sharded else max(share, element * max(count.tensors))


def _kept_by_allocator(
    model: DecoderConfig,
    tensors: tuple[int, ...],
    activations: int,
    *,
    sharded: bool,
    ranks: int,
    accumulates: bool,
    rows: int,
    sequence_length: int,
    arithmetic: Arithmetic,
) -> int:
    """Bytes that malloc holds at the peak without anyone using them."""
    tokens, element = rows * sequence_length, _FP32 if arithmetic == "fp32" else _BF16
    if tokens * model.hidden_size * element > _KEPT_BLOCK_BYTES:
        activations = 0
    else:
        for layer in range(model.num_layers):
            for block, total in wide_tensors(
                model, layer=layer, rows=rows, sequence_length=sequence_length, arithmetic=arithmetic
            ):
                activations -= total if block > _KEPT_BLOCK_BYTES else 0
    small = _FP32 * sum(size for size in tensors if _FP32 * size <= _KEPT_BLOCK_BYTES)
    if sharded:
        return int(_KEPT_OF_ACTIVATIONS_SHARDED * activations + _KEPT_OF_PARAMETERS_SHARDED * small)
    share = _KEPT_OF_PARAMETERS_ACCUMULATING if ranks == 1 else _KEPT_OF_PARAMETERS_ACCUMULATING_DDP
    return int(_KEPT_OF_ACTIVATIONS * activations + (share * small if accumulates else 0))
