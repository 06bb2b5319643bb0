"""Puts a decoder's weights into the order in which the processor's library reads them, for serving.

    reorder_decoder(decoder)            # in place; nothing happens where the library has no such order

Maps that read the same input (query, key and value; gate and up) become one product; their own weights are gone then.
Adapters add to single maps, so with adapters `join=False`. Routers are as they were.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardline.kernels import Embedding, Linear, ReorderedWeight, can_reorder
from shardline.models.attention import SelfAttention
from shardline.models.decoder import Decoder
from shardline.models.feedforward import FeedForward

__all__ = ["reorder_decoder"]


@torch.no_grad()
def reorder_decoder(decoder: Decoder, *, join: bool = True) -> Decoder:
    """Replaces the weights one after the other, so that at most one is there twice; returns the decoder."""
    if not isinstance(decoder.head_weight, Tensor) or not can_reorder(decoder.head_weight):  # or it is quantised
        return decoder
    for module in [*decoder.modules()]:
        if join and isinstance(module, SelfAttention):
            _join([module.q_proj, module.k_proj, module.v_proj])
        elif join and isinstance(module, FeedForward) and module.is_gated:
            _join([module.gate_proj, module.up_proj])
    for name, module in [*decoder.named_modules()]:
        if isinstance(module, Linear) and isinstance(module.weight, Tensor) and not name.endswith(".router"):
            _put(module, ReorderedWeight(module.weight))
    if decoder.config.tie_word_embeddings:
        embedding = decoder.model.embed_tokens
        _put(embedding, ReorderedWeight(embedding.weight, keep_rows=True))
    return decoder


def _join(maps: list[Linear]) -> None:
    with torch.device("meta"):
        joined = Linear(maps[0].in_features, sum(each.out_features for each in maps), bias=maps[0].bias is not None)
    joined.requires_grad_(False)
    _put(joined, ReorderedWeight(torch.cat([each.weight for each in maps])))
    if joined.bias is not None:
        joined.bias = nn.Parameter(torch.cat([each.bias for each in maps]), requires_grad=False)
    for each in maps:
        each.weight = each.bias = None  # type: ignore[assignment]
    maps[0].joined = joined


def _put(module: Linear | Embedding, weight: Tensor | ReorderedWeight) -> None:
    del module.weight
    module.weight = weight  # type: ignore[assignment]
