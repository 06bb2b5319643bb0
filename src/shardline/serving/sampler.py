"""Chooses the next token of every row of a step, all rows together.

Greedy rows take the maximum. The others draw one uniform number from their own request's generator and look it up
in the cumulative distribution, so the draw depends on the request's seed and logits alone, whatever shares its batch.
Rows with top-k, top-p or min-p are cut to the likeliest candidates first; only a row whose distribution is so flat
that the candidates don't cover it is sorted whole.

Order: bias and penalties, temperature, top-k, then top-p and min-p of what is left. Log-probabilities are raw: of the
model's logits as they came. Shapes: R rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from shardline.serving.requests import MIN_TEMPERATURE, SamplingParams, TopLogprobs
from shardline.serving.sequence import Sequence

__all__ = ["Sampled", "Sampler", "top_logprobs"]

NUM_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's choice; `finite` is False where the model's logits hold no usable maximum (then ignore the rest)."""

    token_id: int
    finite: bool
    logprob: float | None = None
    top_logprobs: TopLogprobs = ()


class Sampler:
    """Samples; `eos_token_ids` are held back until a request's min_tokens."""

    def __init__(self, *, eos_token_ids: Collection[int] = ()) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits_RV: Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """Returns one choice a row. `logits_RV` (fp32) is edited in place."""
        params = [sequence.request.sampling for sequence in sequences]
        scored = [row for row, p in enumerate(params) if p.logprobs is not None]
        logprobs_RV = logits_RV[scored].log_softmax(-1) if scored else logits_RV
        for row, sequence in enumerate(sequences):
            if params[row].changes_logits:
                self._edit(logits_RV[row], sequence)
        highest_R, ids_R = logits_RV.max(dim=-1)
        ids, finite = ids_R.tolist(), highest_R.isfinite().tolist()
        drawn = [row for row, p in enumerate(params) if not p.greedy and finite[row]]
        if drawn:
            for row, token in zip(drawn, _draw(logits_RV[drawn], [sequences[row] for row in drawn]), strict=True):
                ids[row] = token
        results = [Sampled(token, ok) for token, ok in zip(ids, finite, strict=True)]
        if scored:
            chosen_R = logprobs_RV.gather(1, torch.tensor([[ids[row]] for row in scored])).squeeze(1).tolist()
            tops = top_logprobs(logprobs_RV, max(params[row].logprobs or 0 for row in scored))
            for row, logprob, top in zip(scored, chosen_R, tops, strict=True):
                results[row] = Sampled(ids[row], finite[row], logprob, top[: params[row].logprobs])
        return results

    def _edit(self, logits_V: Tensor, sequence: Sequence) -> None:
        """Applies biases, penalties and the minimum length to one row, as OpenAI and vLLM define them."""
        params = sequence.request.sampling
        reply = sequence.token_ids[sequence.num_prompt_tokens :]
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(sequence.token_ids)))
            values = logits_V[seen]
            penalty = params.repetition_penalty
            logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if reply and (params.presence_penalty or params.frequency_penalty):
            counts = Counter(reply)
            seen = torch.tensor(list(counts))
            repeats = torch.tensor(list(counts.values()), dtype=logits_V.dtype)
            logits_V[seen] -= params.presence_penalty + params.frequency_penalty * repeats
        if params.logit_bias:
            logits_V[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), dtype=logits_V.dtype)
        if sequence.num_output_tokens < params.min_tokens:
            enders = [*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)]
            logits_V[enders] = -math.inf


def top_logprobs(logprobs_RV: Tensor, count: int) -> list[TopLogprobs]:
    """Returns the `count` likeliest tokens of each row with their log-probabilities, likeliest first."""
    if count == 0:
        return [()] * len(logprobs_RV)
    values, ids = logprobs_RV.topk(min(count, logprobs_RV.shape[-1]), dim=-1)
    return [tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]


def _draw(logits_RV: Tensor, sequences: list[Sequence]) -> list[int]:
    """Returns one token a row, drawn with the row's own generator."""
    params = [sequence.request.sampling for sequence in sequences]
    scaled_RV = logits_RV / torch.tensor([[max(p.temperature, MIN_TEMPERATURE)] for p in params])
    uniforms = [sequence.rng.random() for sequence in sequences]
    tokens = [-1] * len(sequences)
    cut = [p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params]
    narrow = [row for row, is_cut in enumerate(cut) if is_cut]
    whole = [row for row, is_cut in enumerate(cut) if not is_cut]
    if narrow:
        vocab_size = scaled_RV.shape[1]
        size = max(params[row].top_k if params[row].top_k > 0 else NUM_CANDIDATES for row in narrow)
        uncovered = _draw_from_candidates(scaled_RV, narrow, min(size, vocab_size), params, uniforms, tokens)
        if uncovered:
            _draw_from_candidates(scaled_RV, uncovered, vocab_size, params, uniforms, tokens)
    if whole:
        chosen = _look_up(scaled_RV[whole].softmax(-1), [uniforms[row] for row in whole])
        for row, token in zip(whole, chosen.tolist(), strict=True):
            tokens[row] = token
    return tokens


def _draw_from_candidates(
    scaled_RV: Tensor,
    rows: list[int],
    size: int,
    params: list[SamplingParams],
    uniforms: list[float],
    tokens: list[int],
) -> list[int]:
    """Draws each of `rows` from its `size` likeliest tokens into `tokens`; returns rows that need more candidates."""
    part_RV = scaled_RV[rows]
    num_tokens = part_RV.shape[1]
    values_RC, ids_RC = part_RV.topk(size, dim=-1)
    top_k = [min(params[row].top_k, num_tokens) if params[row].top_k > 0 else num_tokens for row in rows]
    values_RC = values_RC.masked_fill(torch.arange(size) >= torch.tensor(top_k).unsqueeze(1), -math.inf)
    # A top-k row is normalised over its k tokens, any other over the whole vocabulary.
    limited = torch.tensor([k < num_tokens for k in top_k]).unsqueeze(1)
    total_R1 = torch.where(limited, values_RC.logsumexp(-1, True), part_RV.logsumexp(-1, True))
    probs_RC = (values_RC - total_R1).exp()
    before_RC = probs_RC.cumsum(-1) - probs_RC
    top_p_R1 = torch.tensor([[params[row].top_p] for row in rows])
    floor_R1 = torch.tensor([[params[row].min_p] for row in rows]) * probs_RC[:, :1]
    keep_RC = ((before_RC < top_p_R1) | (top_p_R1 >= 1.0)) & (probs_RC >= floor_R1)
    keep_RC[:, 0] = True
    chosen = ids_RC.gather(1, _look_up(probs_RC * keep_RC, [uniforms[row] for row in rows]).unsqueeze(1)).squeeze(1)
    # A row whose last candidate is still wanted might want the next one too.
    covered = ~keep_RC[:, -1] | limited.squeeze(1) if size < num_tokens else torch.ones(len(rows), dtype=torch.bool)
    for row, token, done in zip(rows, chosen.tolist(), covered.tolist(), strict=True):
        if done:
            tokens[row] = token
    return [row for row, done in zip(rows, covered.tolist(), strict=True) if not done]


def _look_up(weights_RC: Tensor, uniforms: list[float]) -> Tensor:
    """Returns for each row the first column whose cumulative weight passes uniform * total: never one of weight 0."""
    cumulative_RC = weights_RC.cumsum(-1, dtype=torch.float64)
    targets_R1 = torch.tensor(uniforms, dtype=torch.float64).unsqueeze(1) * cumulative_RC[:, -1:]
    columns_R = torch.searchsorted(cumulative_RC, targets_R1, right=True).squeeze(1)
    # Rounding can push a target up to the total itself; the likeliest column is then a fair answer.
    return torch.where(columns_R < weights_RC.shape[1], columns_R, weights_RC.argmax(-1))
