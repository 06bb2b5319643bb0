"""Chooses the next token of every row of a step, all rows together.

Greedy rows take the maximum. The others draw one uniform number from their own request's generator and look it up
in the cumulative distribution, so the draw depends on the request's seed and logits alone, whatever shares its batch.
Rows with top-k, top-p or min-p are cut to the likeliest candidates first; only a row whose distribution is so flat
that the candidates don't cover it is sorted whole. How many candidates a row has depends on its own numbers alone.

Order: penalties, biases, barred tokens and grammars (`logit_edits`), temperature, top-k, then top-p and min-p of what
is left. Log-probabilities are `raw`, of the model's logits as they came, or `processed`, of what the token was drawn
from: after all of the above, where a greedy row has no temperature and no cuts. Shapes: R rows, V vocabulary, C
candidates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shardline.serving.errors import RequestError
from shardline.serving.logit_edits import Encode, LogitEditor
from shardline.serving.requests import MIN_TEMPERATURE, SamplingParams, TopLogprobs
from shardline.serving.sequence import Sequence

__all__ = ["LogprobsMode", "Sampled", "Sampler", "top_logprobs"]

NUM_CANDIDATES = 64  # enough for most distributions
MORE_CANDIDATES = 1024  # for those it is not enough for; a row that wants still more is sorted whole
CHUNK = 256

LogprobsMode = Literal["raw", "processed"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's choice. Where one of these holds, ignore the rest:

    finite  False: the model's logits hold no usable maximum
    error   the request's own constraints leave no token
    """

    token_id: int
    finite: bool
    logprob: float | None = None
    top_logprobs: TopLogprobs = ()
    error: RequestError | None = None


class Sampler:
    """Samples; `eos_token_ids` are held back until a request's min_tokens, `encode` turns bad words into tokens."""

    def __init__(
        self,
        *,
        eos_token_ids: Collection[int] = (),
        encode: Encode | None = None,
        logprobs_mode: LogprobsMode = "raw",
    ) -> None:
        self._editor = LogitEditor(eos_token_ids=eos_token_ids, encode=encode)
        self._logprobs_mode = logprobs_mode

    def sample(self, logits_RV: Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """Returns one choice a row. `logits_RV` (fp32) is edited in place."""
        params = [sequence.request.sampling for sequence in sequences]
        scored = [row for row, p in enumerate(params) if p.logprobs is not None]
        raw = self._logprobs_mode == "raw"
        logprobs_RV = logits_RV[scored].log_softmax(-1) if scored and raw else logits_RV
        edited = [row for row, sequence in enumerate(sequences) if self._editor.concerns(sequence)]
        broken: set[int] = set()
        if edited:
            sound = logits_RV[edited].amax(-1).isfinite().tolist()
            broken = {row for row, is_sound in zip(edited, sound, strict=True) if not is_sound}
            self._editor.edit(logits_RV, sequences, edited)
        highest_R, ids_R = logits_RV.max(dim=-1)
        ids, usable = ids_R.tolist(), highest_R.isfinite().tolist()
        drawn = [row for row, p in enumerate(params) if not p.greedy and usable[row]]
        if drawn:
            for row, token in zip(drawn, _draw(logits_RV[drawn], [sequences[row] for row in drawn]), strict=True):
                ids[row] = token
        results = [Sampled(ids[row], usable[row] and row not in broken) for row in range(len(ids))]
        if scored:
            if not raw:
                logprobs_RV = _processed(logits_RV[scored], [params[row] for row in scored])
            scores = _scores(logprobs_RV, [ids[row] for row in scored], [params[row].logprobs or 0 for row in scored])
            for row, score in zip(scored, scores, strict=True):
                results[row] = Sampled(ids[row], results[row].finite, *score)
        for row in edited:
            if row not in broken:
                error = _stuck(sequences[row], usable=usable[row])
                if error is not None:
                    results[row] = Sampled(ids[row], True, error=error)
        return results


def top_logprobs(logprobs_RV: Tensor, count: int) -> list[TopLogprobs]:
    """Returns the `count` likeliest tokens of each row with their log-probabilities, likeliest first; -1: all.

    Tokens of probability 0 are left out.
    """
    if count == 0:
        return [()] * len(logprobs_RV)
    vocab_size = logprobs_RV.shape[-1]
    values_RC, ids_RC = logprobs_RV.topk(vocab_size if count < 0 else min(count, vocab_size), dim=-1)
    tops: list[TopLogprobs] = [
        tuple(zip(*row, strict=True)) for row in zip(ids_RC.tolist(), values_RC.tolist(), strict=True)
    ]
    if values_RC[:, -1].isneginf().any():
        tops = [tuple(entry for entry in top if entry[1] > -math.inf) for top in tops]
    return tops


def _scores(logprobs_RV: Tensor, ids: list[int], counts: list[int]) -> list[tuple[float, TopLogprobs]]:
    """Returns the log-probability of each row's choice, and that row's `counts` alternatives."""
    ids_R1 = torch.tensor(ids, device=logprobs_RV.device).unsqueeze(1)
    chosen = logprobs_RV.gather(1, ids_R1).squeeze(1).tolist()
    tops: list[TopLogprobs] = [()] * len(counts)
    for count in sorted(set(counts) - {0}):
        same = [index for index, each in enumerate(counts) if each == count]
        part_RV = logprobs_RV if len(same) == len(counts) else logprobs_RV[same]
        for index, top in zip(same, top_logprobs(part_RV, count), strict=True):
            tops[index] = top
    return list(zip(chosen, tops, strict=True))


def _stuck(sequence: Sequence, *, usable: bool) -> RequestError | None:
    """Returns why this request can't go on, if it can't, though the model's logits are sound."""
    grammar, params = sequence.request.grammar, sequence.request.sampling
    if grammar is not None and grammar.error is not None:
        return RequestError(grammar.error, param="structured_outputs")
    if usable:
        return None
    if grammar is not None:
        message = "No token may follow here: the grammar allows only tokens that allowed_token_ids or bad_words bar."
        return RequestError(message, param="structured_outputs")
    name = "bad_words" if params.allowed_token_ids is None else "allowed_token_ids"
    return RequestError(
        f"No token may follow here: {name} and the other settings together bar all of them.", param=name
    )


def _scale(logits_RV: Tensor, params: list[SamplingParams]) -> Tensor:
    temperatures = [[1.0 if p.greedy else max(p.temperature, MIN_TEMPERATURE)] for p in params]
    return logits_RV / torch.tensor(temperatures, device=logits_RV.device)


def _is_cut(params: SamplingParams) -> bool:
    return not params.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def _draw(logits_RV: Tensor, sequences: list[Sequence]) -> list[int]:
    """Returns one token a row, drawn with the row's own generator."""
    params = [sequence.request.sampling for sequence in sequences]
    scaled_RV = _scale(logits_RV, params)
    uniforms = [sequence.rng.random() for sequence in sequences]
    tokens = [-1] * len(sequences)
    for rows, ids_RC, probs_RC in _kept(scaled_RV, params):
        columns_R1 = _look_up(probs_RC, [uniforms[row] for row in rows]).unsqueeze(1)
        for row, token in zip(rows, ids_RC.gather(1, columns_R1).squeeze(1).tolist(), strict=True):
            tokens[row] = token
    whole = [row for row, p in enumerate(params) if not _is_cut(p)]
    if whole:
        part_RV = scaled_RV if len(whole) == len(params) else scaled_RV[whole]
        chosen = _look_up_in_chunks(part_RV.softmax(-1), [uniforms[row] for row in whole])
        for row, token in zip(whole, chosen.tolist(), strict=True):
            tokens[row] = token
    return tokens


def _processed(logits_RV: Tensor, params: list[SamplingParams]) -> Tensor:
    """Returns the log-probabilities that tokens are drawn with: -inf for what was cut."""
    scaled_RV = _scale(logits_RV, params)
    result_RV = scaled_RV.clone()
    for rows, ids_RC, probs_RC in _kept(scaled_RV, params):
        values_RC = scaled_RV[rows].gather(1, ids_RC).masked_fill(probs_RC == 0, -math.inf)
        result_RV[rows] = torch.full_like(scaled_RV[rows], -math.inf).scatter(1, ids_RC, values_RC)
    return result_RV.log_softmax(-1)


def _kept(scaled_RV: Tensor, params: list[SamplingParams]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Yields groups of the rows that are cut: their numbers, their candidates, and the candidates' probabilities.

    Probabilities, [R, C], likeliest first, are 0 for what is cut and are not normalised again.
    """
    vocab_size = scaled_RV.shape[1]
    sizes: dict[int, list[int]] = {}
    for row, p in enumerate(params):
        if _is_cut(p):
            size = 1 << (p.top_k - 1).bit_length() if p.top_k > 0 else NUM_CANDIDATES
            sizes.setdefault(min(size, vocab_size), []).append(row)
    while sizes:
        size, rows = sizes.popitem()
        ids_RC, probs_RC, covered = _candidates(scaled_RV[rows], size, [params[row] for row in rows])
        flat = [row for row, is_covered in zip(rows, covered, strict=True) if not is_covered]
        if not flat:
            yield rows, ids_RC, probs_RC
            continue
        more = min(MORE_CANDIDATES, vocab_size) if size < MORE_CANDIDATES else vocab_size
        sizes.setdefault(more, []).extend(flat)
        done = [index for index, is_covered in enumerate(covered) if is_covered]
        if done:
            yield [rows[index] for index in done], ids_RC[done], probs_RC[done]


def _candidates(scaled_RV: Tensor, size: int, params: list[SamplingParams]) -> tuple[Tensor, Tensor, list[bool]]:
    """Returns each row's `size` likeliest tokens, their probabilities (0: cut), and whether those are enough."""
    device, num_tokens = scaled_RV.device, scaled_RV.shape[1]
    values_RC, ids_RC = scaled_RV.topk(size, dim=-1)
    top_k_R1 = torch.tensor([[min(p.top_k, num_tokens) if p.top_k > 0 else num_tokens] for p in params], device=device)
    values_RC = values_RC.masked_fill(torch.arange(size, device=device) >= top_k_R1, -math.inf)
    # A top-k row is normalised over its k tokens, any other over the whole vocabulary.
    limited_R1 = top_k_R1 < num_tokens
    total_R1 = values_RC.logsumexp(-1, True)
    if not all(p.top_k > 0 for p in params):
        total_R1 = torch.where(limited_R1, total_R1, scaled_RV.logsumexp(-1, True))
    probs_RC = (values_RC - total_R1).exp()
    before_RC = probs_RC.cumsum(-1) - probs_RC
    top_p_R1 = torch.tensor([[p.top_p] for p in params], device=device)
    floor_R1 = torch.tensor([[p.min_p] for p in params], device=device) * probs_RC[:, :1]
    keep_RC = ((before_RC < top_p_R1) | (top_p_R1 >= 1.0)) & (probs_RC >= floor_R1)
    keep_RC[:, 0] = True
    if size == num_tokens:
        covered = [True] * len(params)
    else:  # a row whose last candidate is still wanted might want the next one too
        covered = (~keep_RC[:, -1] | (probs_RC[:, -1] == 0) | limited_R1.squeeze(1)).tolist()
    return ids_RC, probs_RC * keep_RC, covered


def _look_up(weights_RC: Tensor, uniforms: list[float]) -> Tensor:
    """Returns for each row the first column whose cumulative weight passes uniform * total: never one of weight 0."""
    cumulative_RC = weights_RC.cumsum(-1, dtype=torch.float64)
    uniforms_R1 = torch.tensor(uniforms, dtype=torch.float64, device=weights_RC.device).unsqueeze(1)
    columns_R = torch.searchsorted(cumulative_RC, uniforms_R1 * cumulative_RC[:, -1:], right=True).squeeze(1)
    # Rounding can push a target up to the total itself; the likeliest column is then a fair answer.
    return torch.where(columns_R < weights_RC.shape[1], columns_R, weights_RC.argmax(-1))


def _look_up_in_chunks(weights_RV: Tensor, uniforms: list[float]) -> Tensor:
    """Does what `_look_up` does for many columns: finds the chunk by the chunks' sums, then the column in it."""
    num_columns = weights_RV.shape[1]
    num_chunks = num_columns // CHUNK
    sums_RC = weights_RV[:, : num_chunks * CHUNK].unflatten(1, (num_chunks, CHUNK)).sum(-1)
    if num_columns % CHUNK:
        sums_RC = torch.cat([sums_RC, weights_RV[:, num_chunks * CHUNK :].sum(-1, keepdim=True)], dim=1)
    device = weights_RV.device
    cumulative_RC = sums_RC.cumsum(-1, dtype=torch.float64)
    targets_R1 = torch.tensor(uniforms, dtype=torch.float64, device=device).unsqueeze(1) * cumulative_RC[:, -1:]
    chunks_R1 = torch.searchsorted(cumulative_RC, targets_R1, right=True)
    chunks_R1 = torch.where(chunks_R1 < sums_RC.shape[1], chunks_R1, sums_RC.argmax(-1, keepdim=True))
    before_R1 = cumulative_RC.gather(1, chunks_R1) - sums_RC.gather(1, chunks_R1)
    rest_R1 = (targets_R1 - before_R1).clamp(min=0.0)
    places_RK = chunks_R1 * CHUNK + torch.arange(CHUNK, device=device)
    inside_RK = weights_RV.gather(1, places_RK.clamp(max=num_columns - 1)) * (places_RK < num_columns)
    within_RK = inside_RK.cumsum(-1, dtype=torch.float64)
    columns_R1 = torch.searchsorted(within_RK, rest_R1, right=True)
    columns_R1 = torch.where(columns_R1 < CHUNK, columns_R1, inside_RK.argmax(-1, keepdim=True))
    return (chunks_R1 * CHUNK + columns_R1).squeeze(1)
