"""What one rank of a layout holds of a model: its pipeline stages' layers, and of each tensor its tensor-parallel part.

    held = hold_part(model, layout, rank=0, sequence_length=512)     # rank on the pipeline axis
    held.total, held.counted, held.layers, held.embedding, held.head

A tensor-parallel part of a model is the same model with fewer heads, fewer inner features and fewer words
(`tensor_part`), so that what counts a model counts a part of it. Tests count the parameters that the real ranks hold.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from shardline.parallel.division import balance
from shardline.planning.flops import layer_costs
from shardline.planning.parameters import count_parameters

if TYPE_CHECKING:
    from shardline.models.config import DecoderConfig
    from shardline.parallel.grid import Layout
    from shardline.planning.parameters import LayerCount

__all__ = ["Held", "hold_all", "hold_part", "hold_whole", "stage_layers", "stages_of", "tensor_part"]


@dataclass(frozen=True, kw_only=True)
class Held:
    """Elements that a rank holds. `embedding` and `head` are weights, 0 where they are elsewhere; a tied head that is
    on the embedding's rank is the embedding.
    """

    indices: tuple[int, ...]  # of the layers
    layers: tuple[LayerCount, ...]
    embedding: int
    head: int
    head_vectors: tuple[int, ...]
    projections: tuple[int, ...]
    other: tuple[int, ...]

    @cached_property
    def outer_tensors(self) -> tuple[int, ...]:
        """The tensors outside the layers."""
        weights = tuple(size for size in (self.embedding, self.head) if size)
        return weights + self.head_vectors + self.projections + self.other

    @cached_property
    def counted(self) -> dict[int, int]:
        """Size -> how many tensors have it."""
        found = Counter(self.outer_tensors)
        for layer in self.layers:
            for size, count in layer.counted.items():
                found[size] += count
        return dict(found)

    @cached_property
    def outer(self) -> int:
        return sum(self.outer_tensors)

    @cached_property
    def total(self) -> int:
        return sum(size * count for size, count in self.counted.items())

    @cached_property
    def hidden_matrices(self) -> dict[int, int]:
        """Size -> how many matrices between embedding and head have it: what Muon orthogonalises."""
        found = Counter(self.projections)
        for layer in self.layers:
            found.update(layer.matrices)
            for size in layer.expert_matrices:
                found[size] += layer.num_experts
        return dict(found)


@lru_cache(maxsize=256)
def tensor_part(model: DecoderConfig, size: int) -> DecoderConfig:
    """Returns the model that the fattest of `size` tensor ranks computes: norms and routers whole, the rest a share.

    With fewer kv heads than ranks, each rank holds one.
    """
    if size == 1:
        return model
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // size,
        num_kv_heads=max(1, model.num_kv_heads // size),
        intermediate_size=math.ceil(model.intermediate_size / size),
        expert_size=math.ceil(model.expert_size / size),
        vocab_size=math.ceil(model.vocab_size / size),
    )


@lru_cache(maxsize=512)
def stage_layers(model: DecoderConfig, *, num_stages: int, sequence_length: int) -> tuple[range, ...]:
    """Returns the layers of each stage, as the trainer balances them."""
    costs, head = layer_costs(model, sequence_length=sequence_length)
    return tuple(balance(costs, first=0.0, last=head, num_stages=num_stages))


def stages_of(layout: Layout, rank: int) -> tuple[int, ...]:
    """Returns the stages of a rank on the pipeline axis: a V for zero_bubble_v, else round and round."""
    if layout.pipeline > 1 and layout.schedule == "zero_bubble_v":
        return rank, layout.num_stages - 1 - rank
    return tuple(range(rank, layout.num_stages, layout.pipeline))


def hold_whole(model: DecoderConfig, layout: Layout, *, rank: int, sequence_length: int) -> Held:
    """Returns what a rank on the pipeline axis holds together with its tensor ranks."""
    return _hold(model, model, layout.num_stages, stages_of(layout, rank), sequence_length)


def hold_part(model: DecoderConfig, layout: Layout, *, rank: int, sequence_length: int) -> Held:
    """Returns what the fattest tensor rank holds there. Layers are dealt out by the whole model's costs."""
    part = tensor_part(model, layout.tensor)
    return _hold(model, part, layout.num_stages, stages_of(layout, rank), sequence_length)


def hold_all(model: DecoderConfig) -> Held:
    """Returns the whole model as one rank holds it."""
    return _hold(model, model, 1, (0,), 1)


@lru_cache(maxsize=4096)
def _hold(
    model: DecoderConfig, part: DecoderConfig, num_stages: int, stages: tuple[int, ...], sequence_length: int
) -> Held:
    count = count_parameters(part)
    if num_stages == 1:
        indices = tuple(range(model.num_layers))
    else:
        ranges = stage_layers(model, num_stages=num_stages, sequence_length=sequence_length)
        indices = tuple(layer for stage in stages for layer in ranges[stage])
    is_first, is_last = 0 in stages, num_stages - 1 in stages
    ties = model.tie_word_embeddings
    return Held(
        indices=indices,
        layers=tuple(count.layers[index] for index in indices),
        embedding=count.embedding if is_first or (is_last and ties) else 0,
        head=count.embedding if is_last and not ties else 0,
        head_vectors=count.head_tensors[1:] if is_last else (),
        projections=(count.projections // 2,) * (is_first + is_last) if count.projections else (),
        other=(count.before if is_first else ()) + (count.after if is_last else ()),
    )
