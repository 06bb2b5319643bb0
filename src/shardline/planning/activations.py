"""Bytes that a training step keeps between forward and backward, counted from our own decoder's operations.

    kept = layer_bytes(model, layer=0, rows=2, sequence_length=512, arithmetic="fp32")

These are the tensors that autograd saves, each storage once; the tests run the real decoder and compare the sums.
The arithmetic is `fp32`, `bf16` (parameters are gathered in bf16) or `autocast` (fp32 parameters; each linear casts
its input and its weight, and keeps the casts).

Symbols as in the decoder: B rows, T tokens of a row, D hidden, N and K heads, H head size, F feed-forward width,
V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shardline.planning.parameters import count_parameters

if TYPE_CHECKING:
    from shardline.models.config import DecoderConfig

__all__ = ["Arithmetic", "layer_bytes", "layer_working_bytes", "loss_bytes", "outer_bytes"]

Arithmetic = Literal["fp32", "bf16", "autocast"]
_FP32, _BF16 = 4, 2


def layer_bytes(
    model: DecoderConfig,
    *,
    layer: int,
    rows: int,
    sequence_length: int,
    arithmetic: Arithmetic,
    packed: bool = True,
) -> int:
    """Returns the bytes that one decoder layer saves for `rows` rows of `sequence_length` tokens.

    `packed`: a row may hold several documents, so that attention gets a boolean mask, which PyTorch turns into one of
    the compute dtype, B x T x T, anew in every layer. A window alone needs a mask too, the same one for all rows.
    """
    element = _FP32 if arithmetic == "fp32" else _BF16
    hidden, window = model.hidden_size, model.sliding_windows[layer]
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    per_token = 2 * _norm_bytes(hidden, arithmetic)
    if arithmetic == "autocast":
        per_token += 5 * hidden * _BF16  # the input of q, k, v, gate and up, cast for each of them
    else:
        per_token += 2 * hidden * element  # one input for q, k and v, one for gate and up
    per_token += (2 * queries + 2 * keys) * element + model.num_heads * _FP32  # q, k, v, output; log-sum-exp
    per_token += 4 * model.intermediate_size * element  # gate, up, silu(gate), their product
    if model.qk_norm:  # the norm's own output is not kept: the rotation's is
        heads = model.num_heads + model.num_kv_heads
        per_token += (queries + keys) * (_FP32 + element) + heads * _FP32
    if arithmetic == "bf16" or (arithmetic == "autocast" and not model.qk_norm):
        per_token += 4 * model.head_dim * _BF16  # cos and sin, cast anew for queries and for keys
    mask_rows = rows if packed else int(window is not None and window < sequence_length)
    total = rows * sequence_length * per_token + mask_rows * sequence_length**2 * element
    if arithmetic == "autocast":
        total += count_parameters(model).layers[layer].all_matrices * _BF16
    return total


def outer_bytes(model: DecoderConfig, *, rows: int, sequence_length: int, arithmetic: Arithmetic) -> int:
    """Returns the bytes kept outside the layers: token ids, cos and sin, the final norm and its output."""
    per_token = 8 + _norm_bytes(model.hidden_size, arithmetic)
    per_token += model.hidden_size * (_BF16 if arithmetic == "bf16" else _FP32)
    if arithmetic == "fp32" or (arithmetic == "autocast" and model.qk_norm):
        per_token += 2 * model.head_dim * _FP32
    return rows * sequence_length * per_token


def loss_bytes(model: DecoderConfig, *, rows: int, sequence_length: int, arithmetic: Arithmetic) -> int:
    """Returns the bytes of the chunked cross-entropy while it runs, without the head's gradient.

    The rule for the chunk is that of torch 2.13's `LinearCrossEntropyOptions` on a CPU: logits of about as many bytes
    as the hidden states (bf16) or half as many (fp32). It makes the gradients in its forward pass: that of the hidden
    states is kept; in bf16, an fp32 copy of the head's weight and of its gradient besides.
    """
    tokens, vocab, hidden = rows * sequence_length, model.vocab_size, model.hidden_size
    chunk = 1 << (-(-tokens // -(-vocab // hidden)) - 1).bit_length()
    chunk = min(chunk if arithmetic == "bf16" else max(1, chunk // 2), tokens)
    total = chunk * (vocab + hidden) * _FP32 + tokens * hidden * _FP32
    if arithmetic == "bf16":
        total += 2 * vocab * hidden * _FP32 + 2 * chunk * hidden * _FP32
    return total


def layer_working_bytes(model: DecoderConfig, *, rows: int, sequence_length: int, arithmetic: Arithmetic) -> int:
    """Returns the bytes of gradients in flight while one layer's feed-forward runs backward.

    Those of its output, of the product, of gate, silu(gate) and up, of its input: 2 D + 4 F a token.
    """
    element = _FP32 if arithmetic == "fp32" else _BF16
    return rows * sequence_length * (2 * model.hidden_size + 4 * model.intermediate_size) * element


def _norm_bytes(width: int, arithmetic: Arithmetic) -> int:
    """The input in fp32, 1 / rms, and the normed input in the stream's dtype. The output belongs to who reads it."""
    return width * (_FP32 + (_BF16 if arithmetic == "bf16" else _FP32)) + _FP32
