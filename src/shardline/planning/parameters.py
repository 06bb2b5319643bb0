"""How many parameters a decoder has, by part, in closed form (no torch, microseconds).

    count = count_parameters(preset("smollm2-135m"))
    count.total, count.layer, count.embedding

The tests build the same model on torch's meta device and compare every part: the closed form is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardline.models.config import DecoderConfig

__all__ = ["ParameterCount", "count_parameters"]


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Counts of elements. `layer` is one decoder layer; `head` is 0 when it is tied to the embedding."""

    embedding: int
    layer: int
    layer_matrices: int  # the part of `layer` that is a matrix product's weight, biases and norms left out
    num_layers: int
    final_norm: int
    head: int
    tensors: tuple[int, ...]  # the size of every tensor, in no order

    @property
    def layers(self) -> int:
        return self.layer * self.num_layers

    @property
    def total(self) -> int:
        return self.embedding + self.layers + self.final_norm + self.head


def count_parameters(model: DecoderConfig) -> ParameterCount:
    """Returns the parameters of `Decoder(model)` by part."""
    hidden, ffn = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    matrices = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * ffn
    biases = model.qkv_bias * (queries + 2 * keys) + model.o_bias * hidden + model.mlp_bias * (2 * ffn + hidden)
    norms = 2 * hidden + model.qk_norm * 2 * model.head_dim
    embedding = model.vocab_size * hidden
    head = 0 if model.tie_word_embeddings else embedding
    layer_tensors = [hidden * queries] * 2 + [hidden * keys] * 2 + [hidden * ffn] * 3 + [hidden] * 2
    layer_tensors += [model.head_dim] * (2 * model.qk_norm) + [queries, keys, keys] * model.qkv_bias
    layer_tensors += [hidden] * model.o_bias + [ffn, ffn, hidden] * model.mlp_bias
    return ParameterCount(
        embedding=embedding,
        layer=matrices + biases + norms,
        layer_matrices=matrices,
        num_layers=model.num_layers,
        final_norm=hidden,
        head=head,
        tensors=(embedding, hidden, *([head] if head else []), *(layer_tensors * model.num_layers)),
    )
