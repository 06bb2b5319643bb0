"""Bytes of the head and the loss while they run, without the head's gradient itself.

    loss_bytes(preset("gemma-2-9b"), rows=2, sequence_length=512, arithmetic="fp32")

The loss takes 256 tokens at a time. The terms below are those of torch 2.13 on a CPU, whose buffers can't all be read
from its documentation: the tests measure the peak of the real loss with torch's profiler and compare.
Symbols: R tokens of the batch, C of a chunk, D the width that the head reads, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardline.models.config import DecoderConfig
    from shardline.planning.activations import Arithmetic

__all__ = ["loss_bytes", "vocabulary_parallel_bytes"]

_CHUNK_ROWS = 256
_FP32, _BF16 = 4, 2


def loss_bytes(model: DecoderConfig, *, rows: int, sequence_length: int, arithmetic: Arithmetic) -> int:
    """Returns the peak of the chunked cross-entropy, or of the one for capped logits."""
    tokens, vocab, width = rows * sequence_length, model.vocab_size, model.embedding_width
    chunk, head = min(_CHUNK_ROWS, tokens), model.vocab_size * model.embedding_width
    if model.final_softcap is not None:
        return _capped_bytes(tokens, chunk, vocab, width, arithmetic)
    # Logits and the chunk's hidden states; the gradient of the hidden states, made in the forward pass and kept.
    total = chunk * (vocab + width) * _FP32 + tokens * width * _FP32
    if model.head_bias:
        total += vocab * _FP32
    if arithmetic == "bf16":
        total += 4 * head * _FP32  # fp32 copies of the head's weight and gradient, and what they are made from
    return total


def vocabulary_parallel_bytes(
    part: DecoderConfig, *, rows: int, sequence_length: int, arithmetic: Arithmetic
) -> tuple[int, int]:
    """Returns the peaks of forward and backward with the words dealt out to tensor ranks (`parallel.vocabulary`).

    part   the model as one tensor rank has it. Logits become their gradients in place, a chunk at a time; the gradients
           of head and hidden states are made in the forward pass, and backward scales copies of them.
    """
    tokens, vocab, width = rows * sequence_length, part.vocab_size, part.embedding_width
    chunk, element = min(_CHUNK_ROWS, tokens), _FP32 if arithmetic == "fp32" else _BF16
    num_logits = 1 if part.final_softcap is None else 4  # capped, its slope and what they are made from
    logits = chunk * vocab * (num_logits * _FP32 + (0 if arithmetic == "fp32" else 2 * _BF16))
    cast = vocab * width * _BF16 if arithmetic == "autocast" else 0
    return logits + cast + tokens * width * element, (vocab + tokens) * width * element


def _capped_bytes(tokens: int, chunk: int, vocab: int, width: int, arithmetic: Arithmetic) -> int:
    """Each chunk's logits are made again in its backward pass. Either they are the most (tanh, log-probabilities and
    two gradients; a cast besides below fp32), or the head's gradient, which is summed out of place.
    """
    if arithmetic == "autocast":
        head = vocab * width * _BF16  # the cast weight
        return max(14 * chunk * vocab, head + chunk * vocab * _BF16) + tokens * width * _FP32
    element = _FP32 if arithmetic == "fp32" else _BF16
    logits = (16 if arithmetic == "fp32" else 14) * chunk * vocab + (tokens - chunk) * width * element
    sums = 2 * vocab * width * element + 2 * chunk * width * element if tokens > chunk else 0
    return max(logits, sums)
