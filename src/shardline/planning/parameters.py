"""How many parameters a decoder has, by part, in closed form (no torch, microseconds).

    count = count_parameters(preset("mixtral-8x7b"))
    count.total, count.active, count.layers[0].total, count.embedding

The tests build the same model of every family on torch's meta device and compare every part: the closed form is exact.
Symbols as in the decoder: D hidden, N and K heads, H head size, F inner width, E experts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardline.models.config import DecoderConfig

__all__ = ["LayerCount", "ParameterCount", "count_parameters"]


@dataclass(frozen=True, kw_only=True)
class LayerCount:
    """Elements of one decoder layer. A matrix is the weight of a matrix product, the router's too; a norm's is not."""

    matrices: tuple[int, ...]  # outside the experts
    vectors: tuple[int, ...]  # norms and biases, outside the experts
    expert_matrices: tuple[int, ...]  # of one expert
    expert_vectors: tuple[int, ...]
    num_experts: int
    experts_per_token: int

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """The size of every tensor, in no order."""
        return self.matrices + self.vectors + (self.expert_matrices + self.expert_vectors) * self.num_experts

    @cached_property
    def counted(self) -> dict[int, int]:
        """Size -> how many tensors have it."""
        found = Counter(self.matrices + self.vectors)
        for size in self.expert_matrices + self.expert_vectors:
            found[size] += self.num_experts
        return dict(found)

    @cached_property
    def total(self) -> int:
        return sum(size * count for size, count in self.counted.items())

    @property
    def expert(self) -> int:
        """Elements of one expert."""
        return sum(self.expert_matrices) + sum(self.expert_vectors)

    @property
    def active(self) -> int:
        """Elements that one token meets."""
        return self.total - (self.num_experts - self.experts_per_token) * self.expert

    @property
    def all_matrices(self) -> int:
        return sum(self.matrices) + self.num_experts * sum(self.expert_matrices)

    @property
    def active_matrices(self) -> int:
        return sum(self.matrices) + self.experts_per_token * sum(self.expert_matrices)


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Counts of elements. `head` is 0 when it is tied to the embedding, and holds its bias where it has one."""

    embedding: int
    projections: int  # into and out of a narrower embedding
    before: tuple[int, ...]  # tensors besides, before the layers: position embedding, embedding norm
    after: tuple[int, ...]  # and after them: final norm
    layers: tuple[LayerCount, ...]
    head_tensors: tuple[int, ...]

    @property
    def other(self) -> tuple[int, ...]:
        return self.before + self.after

    @property
    def head(self) -> int:
        return sum(self.head_tensors)

    @property
    def outer(self) -> int:
        """All that lies outside the layers."""
        return self.embedding + self.projections + sum(self.other) + self.head

    @cached_property
    def total(self) -> int:
        return self.outer + sum(layer.total for layer in self.layers)

    @property
    def active(self) -> int:
        """All but the experts that a token is not routed to; what "A3B" in a model's name counts."""
        return self.outer + sum(layer.active for layer in self.layers)

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """The size of every tensor, in no order."""
        projections = (self.projections // 2,) * 2 if self.projections else ()
        in_layers = (size for layer in self.layers for size in layer.tensors)
        return (self.embedding, *projections, *self.other, *self.head_tensors, *in_layers)


@lru_cache(maxsize=256)
def count_parameters(model: DecoderConfig) -> ParameterCount:
    """Returns the parameters of `Decoder(model)` by part."""
    hidden, width = model.hidden_size, model.embedding_width
    embedding = model.vocab_size * width
    before: tuple[int, ...] = ()
    if model.position == "learned":
        before += ((model.max_position_embeddings + model.position_offset) * hidden,)
    if model.embedding_norm:
        before += _norm(model, width)
    head: tuple[int, ...] = ()
    if not model.tie_word_embeddings:
        head = (embedding, model.vocab_size) if model.head_bias else (embedding,)
    kinds = {routed: _layer(model, routed=routed) for routed in (False, True)}
    return ParameterCount(
        embedding=embedding,
        projections=2 * width * hidden if width != hidden else 0,
        before=before,
        after=_norm(model, hidden) if model.final_norm else (),
        layers=tuple(kinds[model.routes(layer)] for layer in range(model.num_layers)),
        head_tensors=head,
    )


def _layer(model: DecoderConfig, *, routed: bool) -> LayerCount:
    hidden = model.hidden_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    num_norms = (1 if model.block == "parallel" else 2) + 2 * model.output_norms
    vectors = _norm(model, hidden) * num_norms + _norm(model, model.head_dim) * (2 * model.qk_norm)
    vectors += (queries, keys, keys) * model.qkv_bias + (hidden,) * model.o_bias
    matrices = (hidden * queries, hidden * keys, hidden * keys, queries * hidden)
    if routed:
        expert_matrices, expert_vectors = _feedforward(model, model.expert_size)
        matrices += (hidden * model.num_experts,)
    else:
        more_matrices, more_vectors = _feedforward(model, model.intermediate_size)
        matrices, vectors = matrices + more_matrices, vectors + more_vectors
        expert_matrices = expert_vectors = ()
    return LayerCount(
        matrices=matrices,
        vectors=vectors,
        expert_matrices=expert_matrices,
        expert_vectors=expert_vectors,
        num_experts=model.num_experts if routed else 0,
        experts_per_token=model.experts_per_token if routed else 0,
    )


def _feedforward(model: DecoderConfig, inner: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(matrices, vectors) of one plain or gated feed-forward."""
    num_inner = 2 if model.gated else 1
    vectors = (inner,) * num_inner + (model.hidden_size,)
    return (model.hidden_size * inner,) * (num_inner + 1), vectors if model.mlp_bias else ()


def _norm(model: DecoderConfig, width: int) -> tuple[int, ...]:
    return (width, width) if model.norm == "layer" else (width,)
