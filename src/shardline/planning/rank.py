"""One rank of a layout on the pipeline axis: what it holds, and what each of its moments takes, part by part.

    sizes = RankSizes.of(model, run, layout, rank=0, micro_batch=2, recompute="none")
    parts = max(sizes.moments(), key=lambda parts: parts.total)

Weights, gradients and optimizer state are those of `parallel.data`: DDP keeps gradients in its buckets from the
first step on; in a pipeline copies of the gradients are reduced after the last pass; FSDP2 gathers the root (embedding,
head, final norm) and one layer at a time. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardline.planning.activations import Arithmetic, outer_bytes, stream_bytes
from shardline.planning.allocator import KEPT_BLOCK_BYTES, kept_by_allocator
from shardline.planning.kept import layer_memory
from shardline.planning.loss import loss_bytes
from shardline.planning.moments import Moment, moments
from shardline.planning.parts import Held, hold_part, hold_whole, stage_layers, stages_of, tensor_part
from shardline.planning.state import OptimizerState, optimizer_state

if TYPE_CHECKING:
    from shardline.config import RunConfig
    from shardline.models.config import DecoderConfig
    from shardline.parallel.grid import Layout
    from shardline.parallel.recompute import Recompute

__all__ = ["Parts", "Phase", "RankSizes", "StageMemory", "StateSizes"]

Phase = Literal["build", "forward", "loss", "backward", "optimizer", "save"]
_FP32, _BF16 = 4, 2
_TENSORS_IN_A_SAVE = 3  # as it is stored, whole, and joined with others as the model folder has it


class Parts(NamedTuple):
    """Bytes of one moment."""

    phase: Phase
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    communication: int
    checkpoint: int
    allocator: int

    @property
    def total(self) -> int:
        return sum(self[1:])


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """A stage's bytes for one micro-batch, as `planning.kept.LayerMemory`."""

    kept: int
    waiting: int
    in_forward: int
    in_backward: int
    heap: int
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class ActivationSizes:
    """What a rank's passes take, whatever the data axis does."""

    stages: tuple[StageMemory, ...]
    stage_indices: tuple[int, ...]
    loss: int
    message: int  # of the residual stream, between pipeline stages or tensor ranks
    moments: tuple[Moment, ...]

    @classmethod
    def of(
        cls,
        model: DecoderConfig,
        layout: Layout,
        *,
        rank: int,
        rows: int,
        sequence_length: int,
        arithmetic: Arithmetic,
        recompute: Recompute,
        num_micro_batches: int,
    ) -> ActivationSizes:
        part = tensor_part(model, layout.tensor)
        sequence_ranks = layout.tensor if layout.sequence_parallel else 1
        shape: dict[str, Any] = {"rows": rows, "sequence_length": sequence_length, "arithmetic": arithmetic}
        layers = layer_memory(
            part, recompute=recompute, sequence_ranks=sequence_ranks, block_bytes=KEPT_BLOCK_BYTES, **shape
        )
        indices = stages_of(layout, rank)
        ranges = stage_layers(model, num_stages=layout.num_stages, sequence_length=sequence_length)
        stages = []
        for stage in indices:
            here = [layers[index] for index in ranges[stage]]
            is_last = stage == layout.num_stages - 1
            outer = outer_bytes(part, is_first=stage == 0, is_last=is_last, sequence_ranks=sequence_ranks, **shape)
            stages.append(
                StageMemory(
                    kept=outer + sum(layer.kept for layer in here),
                    waiting=sum(layer.waiting for layer in here),
                    in_forward=here[-1].in_forward if here else 0,
                    in_backward=max((layer.in_backward for layer in here), default=0),
                    heap=sum(layer.heap for layer in here),
                    is_last=is_last,
                )
            )
        loss = loss_bytes(part, **shape, tensor_ranks=layout.tensor)
        message = rows * sequence_length // sequence_ranks * model.hidden_size * stream_bytes(arithmetic)
        return cls(
            stages=tuple(stages),
            stage_indices=indices,
            loss=loss,
            message=message * ((3 if layout.pipeline > 1 else 0) + (layout.tensor > 1)),
            moments=moments(
                layout.schedule,
                num_ranks=layout.pipeline,
                num_micro_batches=num_micro_batches,
                stages_per_rank=layout.virtual_stages,
                rank=rank,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class StateSizes:
    """What a rank holds between passes, and what of it is gathered.

    shards       ranks that FSDP2 shards over; 1 without it
    full         this rank's tensor-parallel part of its stages, unsharded
    outer        FSDP2's root group: embedding, head, final norm
    head         the head's weight on its rank, or the embedding's that stands in for it
    largest      tensor, whole
    written      of what is being saved
    copy         of the state, that background saves write; 0 without them
    small        of `full`, in tensors that the allocator keeps
    hybrid       FSDP2 shards over some of the data ranks, and the others hold replicas
    copies       collectives copy what they send and receive (gloo's do)
    """

    sharded: bool
    keeps_parameters: bool
    buckets: bool
    reduces_copies: bool
    shards: int
    ties_here: bool
    full: int
    outer: int
    layer: int
    head: int
    embedding: int
    largest: int
    written: int
    small: int
    copy: int
    element: int
    gathered_element: int
    state: OptimizerState
    hybrid: bool
    copies: bool

    @classmethod
    def of(
        cls,
        model: DecoderConfig,
        run: RunConfig,
        layout: Layout,
        *,
        rank: int,
        arithmetic: Arithmetic,
        copies: bool = True,
    ) -> StateSizes:
        length = run.data.sequence_length
        held = hold_part(model, layout, rank=rank, sequence_length=length)
        pure = run.train.precision == "bf16_pure"
        element = _BF16 if pure else _FP32
        sharded = is_sharded(run, layout)
        shards = (layout.zero_group or layout.data) if sharded else 1
        by_matrix = run.optimizer.name != "adamw"
        state = optimizer_state(
            model,
            run,
            data_ranks=layout.data,
            zero=layout.zero,
            shards=shards,
            tensor_ranks=layout.tensor,
            held=held,
            whole=hold_whole(model, layout, rank=rank, sequence_length=length) if by_matrix else held,
        )
        is_last = layout.num_stages - 1 in stages_of(layout, rank)
        full = element * held.total
        largest = element * layout.tensor * max(held.counted)
        return cls(
            sharded=sharded,
            keeps_parameters=layout.zero == 2,
            buckets=layout.zero < 2 and layout.data > 1 and layout.pipeline == 1,
            reduces_copies=layout.zero < 2 and layout.data > 1 and layout.pipeline > 1,
            shards=shards,
            ties_here=model.tie_word_embeddings and is_last and held.embedding > 0 and layout.pipeline == 1,
            full=full,
            outer=element * held.outer,
            layer=element * max((layer.total for layer in held.layers), default=0),
            head=element * (held.head or held.embedding) if is_last else 0,
            embedding=element * held.embedding,
            written=_TENSORS_IN_A_SAVE * largest,
            largest=largest,
            small=_FP32 * sum(size * each for size, each in held.counted.items() if _FP32 * size <= KEPT_BLOCK_BYTES),
            copy=_copied(model, run, layout, held, element=element, largest=largest, sharded=sharded),
            element=element,
            gathered_element=_BF16 if arithmetic == "bf16" else _FP32,
            state=state,
            hybrid=sharded and layout.zero_group is not None,
            copies=copies,
        )

    def gathered(self, size: int) -> int:
        """What `size` bytes of parameters take when they are gathered."""
        return size * self.gathered_element // self.element


def _copied(
    model: DecoderConfig, run: RunConfig, layout: Layout, held: Held, *, element: int, largest: int, sharded: bool
) -> int:
    """What a rank copies of weights and optimizer state: replicas are dealt out by whole tensors, shards are shares."""
    if not run.checkpoint.asynchronous:
        return 0
    state = optimizer_state(model, run, data_ranks=1, zero=0, held=held)
    share = -(-(element * held.total + state.kept_bytes + state.moved_bytes) // layout.data)
    return share if sharded else max(share, largest // layout.tensor)


def is_sharded(run: RunConfig, layout: Layout) -> bool:
    """Whether FSDP2 lays the model out."""
    return run.parallel.offload.params == "cpu" or (layout.zero >= 2 and layout.data > 1)


@dataclass(frozen=True, kw_only=True)
class RankSizes:
    """A rank's state and passes together."""

    state: StateSizes
    passes: ActivationSizes

    def moments(self) -> Iterator[Parts]:
        """Yields each moment that could be the peak."""
        yield self._outside("build")
        for moment in self.passes.moments:
            if moment.kind == "F":
                yield self._pass("forward", moment)
                if self._stage(moment).is_last:
                    yield self._pass("loss", moment)
            elif moment.kind == "B":
                yield self._pass("backward", moment)
        yield self._outside("optimizer")
        yield self._outside("save")

    def _stage(self, moment: Moment) -> StageMemory:
        return self.passes.stages[self.passes.stage_indices.index(moment.stage)]

    def _pass(self, phase: Phase, moment: Moment) -> Parts:
        state, stage = self.state, self._stage(moment)
        counts = zip(self.passes.stages, moment.alive, moment.waiting, strict=True)
        kept = sum(alive * each.kept + waiting * each.waiting for each, alive, waiting in counts)
        activations, logits = kept, 0
        head = state.head if stage.is_last and phase != "forward" else 0
        if phase == "forward":
            activations += stage.in_forward
        if phase == "loss":
            logits = self.passes.loss
        if phase == "backward":
            activations += stage.in_backward
        if state.sharded:
            weights, gradients, communication = self._sharded_pass(phase, moment, head)
        else:
            gradients = state.full if state.buckets or moment.accumulated else 0
            weights, gradients, communication = state.full, gradients + head, 0
        heap = sum(alive * each.heap for each, alive in zip(self.passes.stages, moment.alive, strict=True))
        return Parts(
            phase=phase,
            weights=weights,
            gradients=gradients,
            optimizer=state.state.kept_bytes,
            activations=activations,
            logits=logits,
            communication=communication + self.passes.message,
            checkpoint=state.copy + state.written if state.copy else 0,
            allocator=self._allocator(heap, accumulated=moment.accumulated),
        )

    def _sharded_pass(self, phase: Phase, moment: Moment, head: int) -> tuple[int, int, int]:
        """(weights, gradients, communication) of FSDP2."""
        state = self.state
        shard, layer, root = state.full // state.shards, state.gathered(state.layer), state.gathered(state.outer)
        kept = (shard if moment.accumulated else 0) + state.gathered(head)
        gathered = state.gathered(state.full) if state.keeps_parameters else root
        if phase != "backward":
            return shard, kept, gathered
        # One layer computes while the next is gathered (through a flat buffer) and the last is reduced (the same).
        in_flight = state.layer + (2 * layer if state.copies else 0)
        return shard, kept + layer, gathered + in_flight + (0 if state.keeps_parameters else 2 * layer)

    def _outside(self, phase: Phase) -> Parts:
        """Before the first step (each tensor whole, one at a time), at the optimizer's step, and in a save."""
        state = self.state
        shard = state.full // state.shards
        gradients = state.full if state.buckets else 0
        optimizer, communication = state.state.kept_bytes, 0
        checkpoint = state.copy + state.written if state.copy or phase == "save" else 0
        accumulated = any(moment.accumulated for moment in self.passes.moments)
        if phase == "build":
            optimizer, communication, checkpoint = 0, state.largest, 0
        if phase == "optimizer":
            optimizer += state.state.bucket_bytes
            communication += state.state.in_flight_bytes
            if state.sharded:  # the root's gradients and the flat buffer that reduces them
                root = state.gathered(state.outer)
                gradients = shard + root + (state.gathered(state.head) if state.ties_here else 0)
                communication += root + state.outer
                if state.hybrid and accumulated:  # what was reduced over replicas lives until backward is over
                    gradients += shard
            else:
                late = state.embedding if state.ties_here or state.buckets else 0  # before it is added or copied
                gradients = state.full + late + (state.head if state.ties_here and state.buckets else 0)
                communication += state.full if state.reduces_copies else 0
        heap = sum(stage.heap for stage in self.passes.stages)
        return Parts(
            phase=phase,
            weights=shard,
            gradients=gradients,
            optimizer=optimizer,
            activations=0,
            logits=0,
            communication=communication,
            checkpoint=checkpoint,
            allocator=0 if phase == "build" else self._allocator(heap, accumulated=accumulated),
        )

    def _allocator(self, activations: int, *, accumulated: bool) -> int:
        state = self.state
        return kept_by_allocator(
            activations=activations,
            parameters=state.small,
            sharded=state.sharded,
            replicated=state.buckets,
            accumulated=accumulated,
        )
