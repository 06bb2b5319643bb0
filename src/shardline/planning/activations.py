"""Bytes that a training step keeps between forward and backward, counted from our own decoder's operations.

    kept = layer_bytes(model, layer=0, rows=2, sequence_length=512, element_bytes=4, packed=True)

These are the tensors that autograd saves, each storage once; the tests run the real decoder and compare the sums.
Symbols as in the decoder: B rows, T tokens of a row, D hidden, N and K heads, H head size, F feed-forward width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardline.models.config import DecoderConfig

__all__ = ["layer_bytes", "layer_working_bytes", "outer_bytes"]

_FP32 = 4


def layer_bytes(
    model: DecoderConfig, *, layer: int, rows: int, sequence_length: int, element_bytes: int, packed: bool
) -> int:
    """Returns the bytes that one decoder layer saves for `rows` rows of `sequence_length` tokens.

    `element_bytes` is that of the compute dtype. `packed`: a row may hold several documents, so that attention gets
    a boolean mask, which PyTorch turns into one of the compute dtype, B x T x T, anew in every layer. A window
    alone needs a mask too, the same one for all rows.
    """
    window = model.sliding_windows[layer]
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    per_token = 2 * _norm_bytes(model.hidden_size, element_bytes)
    per_token += (2 * queries + 2 * keys) * element_bytes + model.num_heads * _FP32  # q, k, v, output; log-sum-exp
    per_token += 4 * model.intermediate_size * element_bytes  # gate, up, silu(gate), their product
    if model.qk_norm:  # the norm's own output is not kept: the rotation's is
        heads = model.num_heads + model.num_kv_heads
        per_token += (queries + keys) * (_FP32 + element_bytes) + heads * _FP32
    if element_bytes != _FP32:  # cos and sin are cast anew for queries and for keys
        per_token += 4 * model.head_dim * element_bytes
    mask_rows = rows if packed else int(window is not None and window < sequence_length)
    return rows * sequence_length * per_token + mask_rows * sequence_length**2 * element_bytes


def outer_bytes(model: DecoderConfig, *, rows: int, sequence_length: int, element_bytes: int) -> int:
    """Returns the bytes kept outside the layers: token ids, cos and sin, the final norm and its output."""
    per_token = 8 + _norm_bytes(model.hidden_size, element_bytes)
    if element_bytes == _FP32:
        per_token += 2 * model.head_dim * _FP32
    return rows * sequence_length * per_token


def layer_working_bytes(model: DecoderConfig, *, rows: int, sequence_length: int, element_bytes: int) -> int:
    """Returns the bytes of gradients in flight while one layer's feed-forward runs backward.

    Those of its output, of the product, of gate, silu(gate) and up, of its input: 2 D + 4 F a token.
    """
    per_token = (2 * model.hidden_size + 4 * model.intermediate_size) * element_bytes
    return rows * sequence_length * per_token


def _norm_bytes(width: int, element_bytes: int) -> int:
    """The input in fp32, 1 / rms, the normed input and the output."""
    return width * (_FP32 + 2 * element_bytes) + _FP32
