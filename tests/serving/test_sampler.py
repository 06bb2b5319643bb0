"""Sampling against the definitions, written out the slow way: distributions, cuts, penalties, log-probabilities."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from serving.tiny_models import make_request
from shardline.serving.requests import RequestError, SamplingParams
from shardline.serving.sampler import (
    NUM_CANDIDATES,
    Sampled,
    Sampler,
    _look_up,
    _look_up_in_chunks,
    top_logprobs,
)
from shardline.serving.sequence import Sequence

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -3.0, 0.5, -0.5])


def make_sequence(*, prompt: tuple[int, ...] = (0,), reply: tuple[int, ...] = (), **sampling: Any) -> Sequence:
    request = make_request("a", prompt, **{"temperature": 1.0, **sampling})
    sequence = Sequence(request, max_num_tokens=1000, arrived_s=0.0)
    sequence.token_ids += reply
    return sequence


def sample(logits: Tensor, sequence: Sequence) -> Sampled:
    return Sampler(eos_token_ids=[7]).sample(logits.clone().unsqueeze(0), [sequence])[0]


def frequencies(logits: Tensor, *, count: int = 4000, **sampling: Any) -> Tensor:
    """Shares of each token over many requests with different seeds, sampled as one batch."""
    sequences = [make_sequence(seed=seed, **sampling) for seed in range(count)]
    drawn = Sampler().sample(logits.repeat(count, 1), sequences)
    return torch.bincount(torch.tensor([d.token_id for d in drawn]), minlength=len(logits)) / count


def kept(probs: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """The definition: top-k, renormalise, then top-p and min-p, renormalise; one token at a time."""
    order = sorted(range(len(probs)), key=lambda i: -probs[i].item())
    if top_k > 0:
        order = order[:top_k]
    total = sum(probs[i].item() for i in order)
    result, before = torch.zeros_like(probs), 0.0
    for token in order:
        share = probs[token].item() / total
        if before < top_p and share >= min_p * probs[order[0]].item() / total:
            result[token] = share
        before += share
    return result / result.sum()


@pytest.mark.parametrize(
    "cut",
    [
        {},
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.3},
        {"top_k": 5, "top_p": 0.7},
        {"top_k": 6, "min_p": 0.2},
        {"top_p": 0.8, "min_p": 0.25},
        {"top_k": 1},
        {"top_k": 100},
        {"top_p": 1e-6},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_the_distribution_is_the_definition(cut: dict[str, Any], temperature: float):
    expected = kept((LOGITS / temperature).softmax(0), **cut)
    seen = frequencies(LOGITS, temperature=temperature, **cut)
    assert (seen[expected == 0] == 0).all()
    torch.testing.assert_close(seen, expected, atol=0.035, rtol=0)


@pytest.mark.parametrize("cut", [{"top_p": 0.95}, {"min_p": 0.5}, {"top_p": 0.9, "min_p": 0.01}], ids=str)
def test_a_flat_distribution_is_cut_beyond_the_candidates(cut: dict[str, Any]):
    torch.manual_seed(0)
    logits = torch.randn(4 * NUM_CANDIDATES) * 0.05
    expected = kept(logits.softmax(0), **cut)
    assert (expected > 0).sum() > NUM_CANDIDATES
    seen = frequencies(logits, count=1500, **cut)
    assert (seen[expected == 0] == 0).all()
    assert ((seen > 0).sum() > 0.6 * NUM_CANDIDATES).item()


def test_a_row_does_not_depend_on_the_rows_beside_it():
    torch.manual_seed(0)
    logits = torch.randn(6, 2000)
    settings: list[dict[str, Any]] = [
        {},
        {"top_k": 900},
        {"top_p": 0.9},
        {"top_p": 0.9999},
        {"min_p": 0.01},
        {"temperature": 0.0},
    ]
    together = Sampler().sample(logits.clone(), [make_sequence(seed=i, **s) for i, s in enumerate(settings)])
    for row, setting in enumerate(settings):
        [alone] = Sampler().sample(logits[row : row + 1].clone(), [make_sequence(seed=row, **setting)])
        assert alone == together[row]


def test_greedy_takes_the_maximum_and_tiny_temperatures_do_not_overflow():
    assert sample(LOGITS, make_sequence(temperature=0.0)).token_id == 0
    assert sample(LOGITS * 1e30, make_sequence(temperature=1e-4)).token_id == 0


def test_the_same_seed_gives_the_same_stream_and_no_seed_another():
    def stream(**sampling: Any) -> list[int]:
        sequence = make_sequence(**sampling)
        return [sample(LOGITS, sequence).token_id for _ in range(40)]

    assert stream(seed=3) == stream(seed=3)
    assert stream(seed=3) != stream(seed=4)
    assert stream() != stream()


def test_logprobs_are_raw_whatever_the_sampling_does():
    logprobs = LOGITS.log_softmax(0)
    sequence = make_sequence(temperature=0.3, top_k=2, logprobs=3, logit_bias={0: -100.0}, seed=1)
    drawn = sample(LOGITS, sequence)
    assert drawn.token_id != 0
    assert drawn.logprob == pytest.approx(logprobs[drawn.token_id].item())
    assert [token for token, _ in drawn.top_logprobs] == [0, 4, 1]
    assert [score for _, score in drawn.top_logprobs] == pytest.approx(logprobs[[0, 4, 1]].tolist())


def test_logprobs_are_only_computed_for_those_who_ask():
    rows = [make_sequence(temperature=0.0), make_sequence(temperature=0.0, logprobs=0)]
    plain, scored = Sampler().sample(LOGITS.repeat(2, 1), rows)
    assert plain.logprob is None
    assert scored.logprob is not None
    assert scored.top_logprobs == ()


def test_penalties_and_biases_are_the_published_formulas():
    reply = (1, 1, 4)
    cases: list[tuple[dict[str, Any], Tensor]] = []
    expected = LOGITS.clone()
    expected[1] -= 0.5 + 2 * 0.25
    expected[4] -= 0.5 + 0.25
    cases.append(({"presence_penalty": 0.5, "frequency_penalty": 0.25}, expected))
    expected = LOGITS.clone()
    for token in (0, 1, 4):  # prompt and reply
        expected[token] /= 1.5
    expected[3] *= 1.5  # a negative logit grows more negative
    cases.append(({"repetition_penalty": 1.5, "prompt": (0, 3)}, expected))
    expected = LOGITS.clone()
    expected[5] += 4.0
    cases.append(({"logit_bias": {5: 4.0}}, expected))
    for sampling, logits in cases:
        row = LOGITS.clone().unsqueeze(0)
        Sampler().sample(row, [make_sequence(reply=reply, temperature=0.0, **sampling)])
        torch.testing.assert_close(row[0], logits)


def test_min_tokens_bars_eos_and_stop_tokens():
    logits = torch.full((8,), -5.0)
    logits[7], logits[6], logits[2] = 9.0, 8.0, 1.0
    early = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (6,)}
    assert sample(logits, make_sequence(**early)).token_id == 2
    assert sample(logits, make_sequence(reply=(1, 1), **early)).token_id == 7
    assert sample(logits, make_sequence(ignore_eos=True, **early)).token_id == 7


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_reported_for_their_row_only(bad: float):
    logits = LOGITS.repeat(2, 1)
    logits[0, 3] = bad
    broken, fine = Sampler().sample(logits, [make_sequence(seed=1), make_sequence(temperature=0.0)])
    assert not broken.finite
    assert (fine.finite, fine.token_id) == (True, 0)


def test_top_logprobs_of_more_than_the_vocabulary_is_the_vocabulary():
    [top] = top_logprobs(LOGITS.log_softmax(0).unsqueeze(0), 20)
    assert len(top) == len(LOGITS)


def test_min_tokens_with_nothing_to_bar_changes_nothing():
    sequence = make_sequence(temperature=0.0, min_tokens=2, ignore_eos=True)
    assert sample(LOGITS, sequence).token_id == 0


# Edits of logits: allowed tokens, bad words, grammars, for all rows at once


class FixedGrammar:
    """A grammar that allows the same tokens for ever."""

    def __init__(self, tokens: set[int], *, finished: bool = False, error: str | None = None) -> None:
        self.tokens, self.finished, self.error = tokens, finished, error

    def fill(self, mask_W: Tensor) -> None:
        for token in self.tokens:
            mask_W[token // 32] |= 1 << token % 32 if token % 32 < 31 else -(2**31)

    def accept(self, token_id: int) -> None: ...


def with_grammar(grammar: FixedGrammar, **sampling: Any) -> Sequence:
    sequence = make_sequence(**sampling)
    sequence.request = dataclasses.replace(sequence.request, grammar=grammar)
    return sequence


def test_only_allowed_tokens_are_chosen():
    seen = frequencies(LOGITS, allowed_token_ids=(1, 3))
    expected = torch.zeros(8)
    expected[[1, 3]] = LOGITS[[1, 3]].softmax(0)
    torch.testing.assert_close(seen, expected, atol=0.035, rtol=0)


@pytest.mark.parametrize("vocab_size", [8, 31, 32, 33, 64, 1000])
def test_a_mask_covers_every_token_of_the_vocabulary(vocab_size: int):
    for token in (0, vocab_size // 2, vocab_size - 1):
        logits = torch.zeros(2, vocab_size)
        rows = [with_grammar(FixedGrammar({token}), temperature=0.0), make_sequence(allowed_token_ids=(token,))]
        assert [each.token_id for each in Sampler().sample(logits, rows)] == [token, token]
        assert logits.isneginf().sum() == 2 * (vocab_size - 1)


def test_a_grammar_and_allowed_tokens_hold_together():
    sequence = with_grammar(FixedGrammar({1, 3, 5}), allowed_token_ids=(3, 4), temperature=0.0)
    assert sample(LOGITS, sequence).token_id == 3
    stuck = sample(LOGITS, with_grammar(FixedGrammar({1}), allowed_token_ids=(3,)))
    assert stuck.error is not None
    assert stuck.finite
    broken = sample(LOGITS, with_grammar(FixedGrammar({1}, error="too complex")))
    assert str(broken.error) == "too complex"


def test_not_a_number_below_a_mask_is_still_seen():
    logits = LOGITS.clone()
    logits[0] = math.nan
    assert not sample(logits, make_sequence(allowed_token_ids=(1, 2))).finite


def test_bad_words_are_barred_where_they_would_be_completed():
    def encode(text: str) -> list[int]:
        return {"one": [0], " one": [4], "two": [1, 2], " two": [3, 2]}[text]

    def choice(reply: tuple[int, ...], logits: Tensor = LOGITS) -> int:
        sampler = Sampler(encode=encode)
        sequence = make_sequence(reply=reply, temperature=0.0, bad_words=("one", "two"))
        return sampler.sample(logits.clone().unsqueeze(0), [sequence])[0].token_id

    assert choice(()) == 1  # 0 and 4 would be the likeliest
    favoured = LOGITS.clone()
    favoured[2] = 9.0
    assert choice((), favoured) == 2
    assert choice((1,), favoured) != 2
    assert choice((3,), favoured) != 2
    assert choice((1, 5), favoured) == 2


def test_penalties_keep_up_with_a_reply_that_grows():
    torch.manual_seed(0)
    settings = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "temperature": 0.0}
    sampler = Sampler()
    growing = make_sequence(prompt=(3, 4, 4), **settings)
    for _ in range(150):
        logits = torch.randn(400)
        row = logits.clone().unsqueeze(0)
        [drawn] = sampler.sample(row, [growing])
        fresh = make_sequence(prompt=(3, 4, 4), reply=tuple(growing.token_ids[3:]), **settings)
        again = logits.clone().unsqueeze(0)
        Sampler().sample(again, [fresh])
        assert torch.equal(row, again)
        expected = logits.clone()
        for token in set(growing.token_ids):
            value = expected[token]
            expected[token] = value / 1.3 if value > 0 else value * 1.3
        for token in growing.token_ids[3:]:
            expected[token] -= 0.2
        for token in set(growing.token_ids[3:]):
            expected[token] -= 0.4
        torch.testing.assert_close(row[0], expected)
        growing.token_ids.append(drawn.token_id)


def test_no_row_depends_on_the_rows_beside_it_to_the_last_bit():
    torch.manual_seed(1)
    logits = torch.randn(12, 3000) * 3
    settings: list[dict[str, Any]] = [
        {},
        {"top_k": 900, "logprobs": 3},
        {"top_p": 0.9, "repetition_penalty": 1.2},
        {"top_p": 0.9999, "logit_bias": {5: 3.0, 7: -100.0}},
        {"min_p": 0.01, "presence_penalty": 1.5, "logprobs": 20},
        {"temperature": 0.0, "logprobs": -1},
        {"allowed_token_ids": tuple(range(10, 2000))},
        {"min_tokens": 9, "stop_token_ids": (3, 4), "top_k": 5},
        {"frequency_penalty": 0.7, "top_p": 0.5, "logprobs": 1},
        {"temperature": 0.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {"logprobs": 0},
        {"temperature": 1.9, "top_p": 0.99999},
    ]
    for mode in ("raw", "processed"):
        reply = (11, 12, 11)
        rows = [make_sequence(seed=i, reply=reply, **s) for i, s in enumerate(settings)]
        batch = logits.clone()
        together = Sampler(eos_token_ids=[7], logprobs_mode=mode).sample(batch, rows)
        for row, setting in enumerate(settings):
            single = logits[row : row + 1].clone()
            alone = make_sequence(seed=row, reply=reply, **setting)
            [choice] = Sampler(eos_token_ids=[7], logprobs_mode=mode).sample(single, [alone])
            assert choice == together[row], setting
            assert torch.equal(single[0], batch[row])


@pytest.mark.parametrize(
    "cut",
    [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 6, "min_p": 0.2}, {"logit_bias": {0: -9.0}}],
    ids=str,
)
def test_processed_logprobs_are_those_of_the_distribution_drawn_from(cut: dict[str, Any]):
    sampler = Sampler(logprobs_mode="processed")
    edited = LOGITS.clone()
    for token, bias in cut.get("logit_bias", {}).items():
        edited[token] += bias
    cuts = {name: value for name, value in cut.items() if name != "logit_bias"}
    expected = kept((edited / 0.7).softmax(0), **cuts)
    [drawn] = sampler.sample(LOGITS.clone().unsqueeze(0), [make_sequence(temperature=0.7, logprobs=8, seed=3, **cut)])
    assert drawn.logprob == pytest.approx(math.log(expected[drawn.token_id]), abs=1e-5)
    scores = {token: math.exp(score) for token, score in drawn.top_logprobs}
    assert scores == pytest.approx({i: p.item() for i, p in enumerate(expected) if p > 0}, abs=1e-5)
    # A greedy row has neither a temperature nor cuts.
    [greedy] = sampler.sample(LOGITS.clone().unsqueeze(0), [make_sequence(temperature=0.0, logprobs=0, **cut)])
    assert greedy.logprob == pytest.approx(edited.log_softmax(0).max().item(), abs=1e-6)


def test_processed_logprobs_of_a_flat_distribution_go_beyond_the_candidates():
    torch.manual_seed(0)
    logits = torch.randn(4 * NUM_CANDIDATES) * 0.05
    expected = kept(logits.softmax(0), top_p=0.9)
    sequence = make_sequence(top_p=0.9, logprobs=-1, seed=1)
    [drawn] = Sampler(logprobs_mode="processed").sample(logits.clone().unsqueeze(0), [sequence])
    assert len(drawn.top_logprobs) == (expected > 0).sum()
    assert sum(math.exp(score) for _, score in drawn.top_logprobs) == pytest.approx(1.0, abs=1e-4)


def test_minus_one_is_the_whole_vocabulary():
    drawn = sample(LOGITS, make_sequence(temperature=0.0, logprobs=-1))
    assert [token for token, _ in drawn.top_logprobs] == LOGITS.argsort(descending=True).tolist()


def test_samples_differ_and_repeat():
    params = SamplingParams(n=3, seed=2**63 - 2)
    seeds = [each.seed for each in params.samples()]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert {each.n for each in params.samples()} == {1}
    assert [each.seed for each in SamplingParams(n=2).samples()] == [None, None]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"n": 0}, "n = 0"),
        ({"logprobs": -2}, "between 0 and 20, or -1"),
        ({"logprobs": 21}, "between 0 and 20"),
        ({"allowed_token_ids": ()}, "at least one token"),
        ({"bad_words": ("",)}, "empty word"),
        ({"bad_words": ("x",) * 2000}, "at most 1024"),
    ],
)
def test_settings_that_can_not_be_used(given: dict[str, Any], words: str):
    with pytest.raises(RequestError, match=words):
        SamplingParams(**given)


@pytest.mark.parametrize("num_columns", [1, 255, 256, 257, 2000])
def test_looking_up_in_chunks_finds_the_column_of_the_whole_row(num_columns: int):
    torch.manual_seed(num_columns)
    weights = torch.rand(400, num_columns) * (torch.rand(400, num_columns) < 0.1)
    weights[:, num_columns // 2] = 0.5
    uniforms = [0.0, 1.0 - 2**-53, *torch.rand(398, dtype=torch.float64).tolist()]
    chunked, whole = _look_up_in_chunks(weights, uniforms), _look_up(weights, uniforms)
    assert (weights.gather(1, chunked.unsqueeze(1)) > 0).all()
    assert (chunked == whole).float().mean() > 0.99  # sums of other orders round to the neighbour now and then
