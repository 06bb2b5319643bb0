"""What one layer keeps and needs in each way of recomputing, as one pipeline stage after another adds it up.

    layers = layer_memory(part, rows=2, sequence_length=512, arithmetic="fp32", recompute="full", sequence_ranks=1)
    sum(layer.kept for layer in layers), max(layer.in_backward for layer in layers)

With `full` a layer keeps its input; with `selective` besides that the results of matrix products and attention
(`parallel.recompute`); either makes the rest again in its backward pass. In a zero-bubble pipeline the linears' inputs
and the gradients of their outputs wait for the weights' part.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from shardline.planning.activations import (
    Arithmetic,
    element_bytes,
    layer_backward_bytes,
    layer_bytes,
    layer_forward_bytes,
    linear_input_bytes,
    linear_output_bytes,
    stream_bytes,
    wide_tensors,
)

if TYPE_CHECKING:
    from shardline.models.config import DecoderConfig
    from shardline.parallel.recompute import Recompute

__all__ = ["LayerMemory", "layer_memory"]

_FP32 = 4


class LayerMemory(NamedTuple):
    """Bytes of one layer for one micro-batch.

    kept         from forward to backward
    waiting      from B to W, where backward is split
    in_forward   by how much forward exceeds `kept`
    in_backward  by how much backward exceeds what was kept, its recomputation included
    heap         what passes through malloc's heap on the way from forward to backward: all that is kept, were nothing
                 computed again, in blocks of at most `block_bytes`
    """

    kept: int
    waiting: int
    in_forward: int
    in_backward: int
    heap: int


@lru_cache(maxsize=8192)
def layer_memory(
    part: DecoderConfig,
    *,
    rows: int,
    sequence_length: int,
    arithmetic: Arithmetic,
    recompute: Recompute,
    sequence_ranks: int,
    block_bytes: int,
) -> tuple[LayerMemory, ...]:
    """Returns each layer's; `part` is the model as a tensor rank has it (`planning.parts.tensor_part`)."""
    found: dict[tuple[object, ...], LayerMemory] = {}
    layers = []
    for layer in range(part.num_layers):
        kind = part.routes(layer), part.sliding_windows[layer]
        if kind not in found:
            shape = {"rows": rows, "sequence_length": sequence_length, "arithmetic": arithmetic}
            found[kind] = _one(part, layer, shape, recompute, sequence_ranks, block_bytes)
        layers.append(found[kind])
    return tuple(layers)


def _one(
    part: DecoderConfig,
    layer: int,
    shape: dict[str, Any],
    recompute: Recompute,
    sequence_ranks: int,
    block_bytes: int,
) -> LayerMemory:
    arithmetic: Arithmetic = shape["arithmetic"]
    tokens = shape["rows"] * shape["sequence_length"]
    linear = {"layer": layer, "tokens": tokens, "arithmetic": arithmetic}
    everything = layer_bytes(part, layer=layer, sequence_ranks=sequence_ranks, **shape)
    in_forward = layer_forward_bytes(part, layer=layer, **shape)
    in_backward = layer_backward_bytes(part, layer=layer, **shape)
    waiting = linear_input_bytes(part, **linear) + linear_output_bytes(part, **linear)
    wide = sum(total for block, total in wide_tensors(part, layer=layer, **shape) if block > block_bytes)
    if tokens * part.hidden_size * element_bytes(arithmetic) > block_bytes:
        wide = everything
    heap = everything - wide
    if recompute == "none":
        return LayerMemory(everything, waiting, in_forward, in_backward, heap)
    mask = shape["rows"] * shape["sequence_length"] ** 2  # booleans, one for all layers with the same window
    stream = tokens // sequence_ranks * part.hidden_size * stream_bytes(arithmetic)
    kept = stream + mask // part.num_layers
    again = everything + 2 * stream  # and the gradients of what came in and goes out
    if recompute == "selective":
        products = linear_output_bytes(part, **linear) + _attention_output(part, tokens, shape)
        kept += products
        again -= products  # each is taken out as it is met again
    return LayerMemory(kept, waiting, max(in_forward, again - kept), max(in_forward, in_backward) + again, heap)


def _attention_output(part: DecoderConfig, tokens: int, shape: dict[str, Any]) -> int:
    queries, element = part.num_heads * part.head_dim, element_bytes(shape["arithmetic"])
    if part.attention_softcap is None:
        return tokens * (queries * element + part.num_heads * _FP32)  # and the log-sum-exp
    scores = part.num_heads * shape["sequence_length"]  # both are plain matrix products there
    return tokens * (queries + scores) * element
