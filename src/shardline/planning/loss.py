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

__all__ = ["loss_bytes"]

_CHUNK_ROWS = 256
_FP32, _BF16 = 4, 2


def loss_bytes(
    part: DecoderConfig, *, rows: int, sequence_length: int, arithmetic: Arithmetic, tensor_ranks: int = 1
) -> int:
    """Returns the peak of the cross-entropy over the words that one tensor rank has; `part` is the model as it has it.

    Plain fp32 logits go through PyTorch's chunked loss, all others through ours (`parallel.vocabulary`), whose logits
    become their gradients in place. Both make all gradients in the forward pass.
    """
    tokens, vocab, width = rows * sequence_length, part.vocab_size, part.embedding_width
    chunk, element = min(_CHUNK_ROWS, tokens), _FP32 if arithmetic == "fp32" else _BF16
    if tensor_ranks == 1 and part.final_softcap is None and arithmetic == "fp32":
        # Logits and the chunk's hidden states; the gradient of the hidden states, made in the forward pass and kept.
        bias = vocab * _FP32 if part.head_bias else 0
        return chunk * (vocab + width) * _FP32 + tokens * width * _FP32 + bias
    # A logit is fp32, with its slope where there is a cap, or beside what it was made from or is stored as.
    logits = chunk * vocab * (8 if part.final_softcap is not None else 4 if arithmetic == "fp32" else 6)
    # Under autocast the cast weight and its gradient take, in bf16, what the head's fp32 gradient takes afterwards; the
    # hidden states are cast too.
    hidden = 2 * element if arithmetic == "autocast" else element
    return logits + tokens * width * hidden
