"""The numeric ops that the decoder is made of, behind one interface per op, so that a backend can be swapped."""

from shardline.kernels.activation import ACTIVATIONS, soft_cap
from shardline.kernels.attention import attention, attention_and_sums, causal_mask, join_attention
from shardline.kernels.fixed_attention import fixed_attention, fixed_document_attention
from shardline.kernels.invariance import batch_invariant, is_batch_invariant, proven_sizes, rowwise
from shardline.kernels.linear import Embedding, Linear, PackedWeight, embedding, joint, linear
from shardline.kernels.norm import rms_norm
from shardline.kernels.quantized import Int4Weight, Int8Weight
from shardline.kernels.reordered import ReorderedWeight, can_reorder

__all__ = [
    "ACTIVATIONS",
    "Embedding",
    "Int4Weight",
    "Int8Weight",
    "Linear",
    "PackedWeight",
    "ReorderedWeight",
    "attention",
    "attention_and_sums",
    "batch_invariant",
    "can_reorder",
    "causal_mask",
    "embedding",
    "fixed_attention",
    "fixed_document_attention",
    "is_batch_invariant",
    "join_attention",
    "joint",
    "linear",
    "proven_sizes",
    "rms_norm",
    "rowwise",
    "soft_cap",
]
