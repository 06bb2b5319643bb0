"""What requests change in their logits before a choice, for all rows of a step at once.

    editor = LogitEditor(eos_token_ids=[2], encode=tokenizer.encode)
    edited = [row for row, sequence in enumerate(sequences) if editor.concerns(sequence)]
    editor.edit(logits_RV, sequences, edited)                   # in place

Penalties come first (repetition, then presence and frequency, as OpenAI and vLLM define them), then biases, then what
is barred: tokens that are not allowed, bad words, the end of the text before min_tokens, and what a grammar rules out.
Each request's own numbers are kept in arrays that grow with its reply; a step joins the arrays of its rows, so nothing
is done row by row that a tensor can do for all. Shapes: R rows, V vocabulary, N entries of all rows, W = ceil(V / 32).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import numpy as np
import torch
from torch import Tensor

from shardline.serving.sequence import Sequence

__all__ = ["LogitEditor"]

Encode = Callable[[str], list[int]]


class LogitEditor:
    """Edits logits. `encode` turns the text of a bad word into tokens; `eos_token_ids` wait for min_tokens."""

    def __init__(self, *, eos_token_ids: Collection[int] = (), encode: Encode | None = None) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._encode = encode

    def concerns(self, sequence: Sequence) -> bool:
        """Whether this request's logits are edited at all."""
        return self._edits(sequence).any

    def edit(self, logits_RV: Tensor, sequences: list[Sequence], rows: list[int]) -> None:
        """Edits these rows of `logits_RV` (fp32) in place."""
        chosen = [(row, sequences[row], self._edits(sequences[row])) for row in rows]
        _penalise(logits_RV, [(row, edits, sequence) for row, sequence, edits in chosen if edits.penalised])
        _add_biases(logits_RV, [(row, edits) for row, _, edits in chosen if len(edits.bias_ids)])
        barred = [(row, token) for row, sequence, edits in chosen for token in edits.barred_now(sequence)]
        if barred:
            rows_N, ids_N = torch.tensor(barred, device=logits_RV.device).unbind(1)
            logits_RV[rows_N, ids_N] = -math.inf
        masked = [(row, sequence, edits) for row, sequence, edits in chosen if edits.masked]
        if masked:
            _bar(logits_RV, [row for row, _, _ in masked], _masks(masked, logits_RV.shape[1]))

    def _edits(self, sequence: Sequence) -> _Edits:
        if sequence.edits is None:
            sequence.edits = _Edits(sequence, eos_token_ids=self._eos_token_ids, encode=self._encode)
        return sequence.edits


class _Edits:
    """What one request changes; `any` is False for most."""

    def __init__(self, sequence: Sequence, *, eos_token_ids: Collection[int], encode: Encode | None) -> None:
        params = sequence.request.sampling
        self.penalised = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
        self._history = _History(sequence) if self.penalised else None
        words = [ids for word in params.bad_words for ids in _word_ids(word, encode)]
        biases = dict(params.logit_bias)
        biases |= {ids[0]: -math.inf for ids in words if len(ids) == 1}
        self.bias_ids = np.array(list(biases), dtype=np.int64)
        self.bias_values = np.array(list(biases.values()), dtype=np.float32)
        self._long_words = [ids for ids in words if len(ids) > 1]
        self._enders = [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]
        self._min_tokens = params.min_tokens
        self.allowed = params.allowed_token_ids
        self.masked = self.allowed is not None or sequence.request.grammar is not None
        self.any = bool(
            self.penalised or biases or self._long_words or self.masked or (self._min_tokens and self._enders)
        )
        self._allowed_words: np.ndarray | None = None

    def history(self, sequence: Sequence) -> tuple[np.ndarray, np.ndarray]:
        """Returns the distinct tokens so far, and how often each is in the reply."""
        assert self._history is not None
        return self._history.take_in(sequence)

    def barred_now(self, sequence: Sequence) -> list[int]:
        """Returns the tokens that are barred at this place of the reply only."""
        barred: list[int] = []
        if sequence.num_output_tokens < self._min_tokens:
            grammar = sequence.request.grammar
            if grammar is None or not grammar.finished:  # where nothing else may follow, the end is all there is
                barred += self._enders
        for ids in self._long_words:
            begin = len(ids) - 1
            if sequence.num_output_tokens >= begin and tuple(sequence.token_ids[-begin:]) == ids[:-1]:
                barred.append(ids[-1])
        return barred

    def allowed_words(self, num_words: int) -> np.ndarray:
        if self._allowed_words is None:
            assert self.allowed is not None
            bits = np.zeros(num_words * 32, dtype=np.uint8)
            bits[list(self.allowed)] = 1
            self._allowed_words = np.packbits(bits, bitorder="little").view(np.int32)
        return self._allowed_words


class _History:
    """The distinct tokens of a request and how often its reply has each, in arrays that grow with it."""

    def __init__(self, sequence: Sequence) -> None:
        prompt = sequence.request.prompt_token_ids if sequence.request.sampling.repetition_penalty != 1.0 else ()
        known = list(dict.fromkeys(prompt))
        self._place = {token: place for place, token in enumerate(known)}
        self._ids = np.array([*known, *[0] * 64], dtype=np.int64)
        self._counts = np.zeros(len(known) + 64, dtype=np.float32)
        self._num_taken = sequence.num_prompt_tokens

    def take_in(self, sequence: Sequence) -> tuple[np.ndarray, np.ndarray]:
        for token in sequence.token_ids[self._num_taken :]:
            place = self._place.get(token)
            if place is None:
                place = self._place[token] = len(self._place)
                if place == len(self._ids):
                    self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                    self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
                self._ids[place] = token
            self._counts[place] += 1.0
        self._num_taken = sequence.num_tokens
        size = len(self._place)
        return self._ids[:size], self._counts[:size]


def _penalise(logits_RV: Tensor, rows: list[tuple[int, _Edits, Sequence]]) -> None:
    if not rows:
        return
    histories = [edits.history(sequence) for _, edits, sequence in rows]
    lengths = [len(ids) for ids, _ in histories]
    params = [sequence.request.sampling for _, _, sequence in rows]

    def spread(values: list[float]) -> Tensor:
        return _tensor(np.repeat(np.array(values, dtype=np.float32), lengths), logits_RV)

    rows_N = _tensor(np.repeat(np.array([row for row, _, _ in rows]), lengths), logits_RV)
    ids_N = _tensor(np.concatenate([ids for ids, _ in histories]), logits_RV)
    counts_N = _tensor(np.concatenate([counts for _, counts in histories]), logits_RV)
    values_N = logits_RV[rows_N, ids_N]
    repetition_N = spread([p.repetition_penalty for p in params])
    values_N = torch.where(values_N > 0, values_N / repetition_N, values_N * repetition_N)
    values_N -= spread([p.presence_penalty for p in params]) * (counts_N > 0)
    values_N -= spread([p.frequency_penalty for p in params]) * counts_N
    logits_RV[rows_N, ids_N] = values_N


def _add_biases(logits_RV: Tensor, rows: list[tuple[int, _Edits]]) -> None:
    if not rows:
        return
    lengths = [len(edits.bias_ids) for _, edits in rows]
    rows_N = _tensor(np.repeat(np.array([row for row, _ in rows]), lengths), logits_RV)
    ids_N = _tensor(np.concatenate([edits.bias_ids for _, edits in rows]), logits_RV)
    logits_RV[rows_N, ids_N] += _tensor(np.concatenate([edits.bias_values for _, edits in rows]), logits_RV)


def _masks(rows: list[tuple[int, Sequence, _Edits]], vocab_size: int) -> np.ndarray:
    """Returns the tokens that each row may choose, int32 [R, W]."""
    num_words = -(-vocab_size // 32)
    mask_RW = torch.zeros(len(rows), num_words, dtype=torch.int32)
    words_RW = mask_RW.numpy()
    for index, (_, sequence, edits) in enumerate(rows):
        if sequence.request.grammar is not None:
            sequence.request.grammar.fill(mask_RW[index])
            if edits.allowed is not None:
                words_RW[index] &= edits.allowed_words(num_words)
        else:
            words_RW[index] = edits.allowed_words(num_words)
    return words_RW


def _bar(logits_RV: Tensor, rows: list[int], words_RW: np.ndarray) -> None:
    """Adds -inf to what the masks leave out. A table of whole bytes is several times as fast as a mask of booleans."""
    added_RV = _tensor(_ADDED[words_RW.view(np.uint8)].reshape(len(rows), -1), logits_RV)[:, : logits_RV.shape[1]]
    if len(rows) == len(logits_RV):
        logits_RV += added_RV
    else:
        logits_RV[rows] += added_RV


def _added() -> np.ndarray:
    """Returns, for each byte of a mask, what its eight tokens' logits get: 0 or -inf."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits == 1, np.float32(0.0), np.float32(-np.inf)).astype(np.float32)


_ADDED = _added()


def _word_ids(word: str, encode: Encode | None) -> list[tuple[int, ...]]:
    """Returns the tokens of a bad word at the start of a text, and after a space where that is another spelling."""
    assert encode is not None, "a sampler without a tokenizer can't read bad words"
    bare = tuple(encode(word.strip()))
    spaced = tuple(encode(" " + word.strip()))
    # A space that is a token of its own says nothing about the word; the bare spelling follows it anyway.
    if spaced[1:] == bare or spaced == bare:
        return [bare]
    return [bare, spaced]


def _tensor(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
