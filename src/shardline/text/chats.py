"""A chat as training data: the ids that serving would see, and which of them the assistant says.

    ids, said = encode_chat_for_training(tokenizer, messages)

The loss falls only on what the assistant says, its end token included. The template decides where that is: each
assistant turn starts where the rendering of the turns before it, with the generation prompt, ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardline.config.errors import UsageError
from shardline.text.tokenizer import Tokenizer

__all__ = ["encode_chat_for_training"]


def encode_chat_for_training(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns `tokenizer.encode_chat(messages)` as int32 [N], and bool [N]: True where the assistant says the token.

    Raises `UsageError` when there is no assistant turn, or when the template rewrites what came before it.
    """
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False)
    said = np.zeros(len(ids), dtype=bool)
    turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise UsageError("The chat has no message of the role 'assistant', so there is nothing to learn from it.")
    starts = [_start_of_turn(tokenizer, messages, index, ids) for index in turns]
    for index, start, limit in zip(turns, starts, [*starts[1:], len(ids)], strict=True):
        said[start : _end_of_turn(tokenizer, messages, index, ids, start, limit)] = True
    return np.asarray(ids, dtype=np.int32), said


def _start_of_turn(tokenizer: Tokenizer, messages: list[dict[str, Any]], index: int, ids: list[int]) -> int:
    prompt = tokenizer.encode_chat(messages[:index], add_generation_prompt=True)
    start = _common_length(prompt, ids)
    if start == len(prompt):
        return start
    if start < len(prompt) - 1:
        raise UsageError(
            f"The chat template of {tokenizer.name} renders message {index} differently from the prompt it would "
            f"answer (they part at token {start} of {len(prompt)}), so training on it would not match serving."
        )
    return start + 1  # the prompt's last token has merged with the reply's first characters: no one says that token


def _end_of_turn(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], index: int, ids: list[int], start: int, limit: int
) -> int:
    """One past the turn's end token; without an end token, where the rendering up to this turn ends."""
    for position in range(start, limit):
        if ids[position] in tokenizer.eos_token_ids:
            return position + 1
    through = tokenizer.encode_chat(messages[: index + 1], add_generation_prompt=False)
    return min(limit, max(start, _common_length(through, ids)))


def _common_length(a: list[int], b: list[int]) -> int:
    length = min(len(a), len(b))
    return next((n for n in range(length) if a[n] != b[n]), length)
