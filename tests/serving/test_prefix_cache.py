"""The prefix cache and speculation: a hit is what would have been computed, and nothing else ever is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.tiny_models import (
    ScriptedTokens,
    dense_logprobs,
    make_decoder,
    make_engine,
    make_request,
    save_tiny_folder,
    tiny_config,
)
from shardline.config import ShardlineError
from shardline.models.attention import DenseAttention
from shardline.serving.blocks import BlockManager
from shardline.serving.engine import Engine, load_engine
from shardline.serving.requests import FinishReason, Request, RequestOutput, SamplingParams
from shardline.serving.runner import Runner
from shardline.serving.scheduler import Chunk, Scheduler
from shardline.serving.sequence import Sequence
from shardline.text.tokenizer import byte_tokenizer

SYSTEM = "You are a careful assistant who answers in one short line. "


def remembered(blocks: BlockManager, tokens: list[int], root: object = None) -> list[int]:
    """Computes `tokens` in blocks of their own, remembers and releases them."""
    table: list[int] = []
    assert blocks.grow(table, len(tokens))
    held = list(table)
    blocks.remember(table, [], tokens, num_computed_tokens=len(tokens), root=root)
    blocks.release(table)
    return held


def test_full_blocks_are_found_again_and_the_last_token_is_always_left_to_compute():
    blocks = BlockManager(num_blocks=8, block_size=4)
    held = remembered(blocks, list(range(10)))
    assert blocks.num_free == 8
    assert blocks.num_cached == 2
    assert blocks.match(list(range(20)))[0] == held[:2]
    assert blocks.match(list(range(8)))[0] == held[:1]
    assert blocks.match(list(range(9)))[0] == held[:2]
    assert blocks.match([0, 1, 2, 99, 4, 5, 6, 7, 8])[0] == []
    assert blocks.match([0, 1, 2, 3, 4, 5, 6, 99, 8])[0] == held[:1]


def test_equal_blocks_after_different_beginnings_are_different():
    blocks = BlockManager(num_blocks=8, block_size=2)
    remembered(blocks, [1, 1, 5, 5, 0])
    assert len(blocks.match([2, 2, 5, 5, 0])[0]) == 0
    remembered(blocks, [2, 2, 6, 6, 0])
    assert len(blocks.match([2, 2, 5, 5, 0])[0]) == 1
    assert len(blocks.match([1, 1, 5, 5, 0])[0]) == 2
    assert blocks.match([1, 1, 5, 5, 0], "an adapter")[0] == []


def test_colliding_hashes_do_not_make_a_hit():
    """Python's hash of -1 and -2 is the same; the tokens are compared."""
    assert hash((-1, -1)) == hash((-2, -2))
    blocks = BlockManager(num_blocks=4, block_size=2)
    remembered(blocks, [-1, -1, 0])
    assert blocks.match([-2, -2, 0])[0] == []
    assert len(blocks.match([-1, -1, 0])[0]) == 1


def test_a_block_that_is_handed_out_is_forgotten_and_the_beginnings_stay_longest():
    blocks = BlockManager(num_blocks=3, block_size=2)
    held = remembered(blocks, [1, 2, 3, 4, 5, 6])
    table: list[int] = []
    blocks.grow(table, 1)
    assert table == [held[2]]
    assert blocks.match([1, 2, 3, 4, 5, 6, 7])[0] == held[:2]
    blocks.grow(table, 5)
    assert blocks.num_cached == 0
    assert blocks.match([1, 2, 3])[0] == []


def test_beginning_with_hits_is_all_or_nothing():
    blocks = BlockManager(num_blocks=4, block_size=2)
    held = remembered(blocks, [1, 2, 3, 4])
    hits, _ = blocks.match([1, 2, 3, 4, 5])
    table: list[int] = []
    assert not blocks.begin(table, hits, num_tokens=9)
    assert table == []
    assert blocks.num_free == 4
    assert blocks.begin(table, hits, num_tokens=8)
    assert table[:2] == held[:2]
    assert blocks.num_free == 0


def test_forgetting_all_keeps_what_runs():
    blocks = BlockManager(num_blocks=4, block_size=2)
    table: list[int] = []
    blocks.grow(table, 4)
    blocks.remember(table, [], [1, 2, 3, 4], num_computed_tokens=4)
    blocks.forget_all()
    assert blocks.match([1, 2, 3, 4, 5])[0] == []
    assert blocks.num_free == 2
    blocks.release(table)
    assert blocks.num_free == 4


class CacheMachine(RuleBasedStateMachine):
    """Requests with common beginnings come, run, guess, are preempted and go. The machine keeps for every slot of the
    cache the whole prefix that its value was computed from, and every step reads what it needs from there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.size, self.num_blocks = 3, 11
        blocks = BlockManager(num_blocks=self.num_blocks, block_size=self.size)
        self.scheduler = Scheduler(blocks, max_num_seqs=3, max_num_batched_tokens=9)
        self.memory: dict[tuple[int, int], tuple[object, ...]] = {}
        self.random = random.Random(0)
        self.count = 0

    def live(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 1),
        adapter=st.sampled_from([None, None, "a"]),
    )
    def add(self, prompt: list[int], max_tokens: int, priority: int, adapter: str | None) -> None:
        request = Request(
            request_id=str(self.count),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens),
            priority=priority,
            adapter=adapter,
        )
        self.count += 1
        self.scheduler.add(Sequence(request, max_num_tokens=len(prompt) + max_tokens, arrived_s=0.0))

    @precondition(lambda self: self.scheduler.has_unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        assert self.scheduler.remove(data.draw(st.sampled_from(self.live())).request_id) is not None

    @rule()
    def forget_all(self) -> None:
        self.scheduler.blocks.forget_all()

    @precondition(lambda self: self.scheduler.has_unfinished)
    @rule(guesses=st.lists(st.integers(0, 1), max_size=4))
    def step(self, guesses: list[int]) -> None:
        for sequence in self.scheduler.running:
            if sequence.num_tokens - sequence.num_computed_tokens == 1:
                room = self.scheduler.reserve(sequence, len(guesses))
                sequence.draft_token_ids = guesses[:room]
        first = self.live()[0]
        before = first.num_computed_tokens
        step = self.scheduler.schedule()
        assert step.chunks[0].sequence is first  # the first in order always moves: nothing starves
        assert first.num_computed_tokens >= before
        assert 0 < step.num_tokens == sum(chunk.num_tokens for chunk in step.chunks) <= 9
        for chunk in step.chunks:  # a step writes all that it computes, then reads
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                slot, value = self.value_at(chunk, position)
                self.memory[slot] = value
        for chunk in step.chunks:
            for position in range(chunk.start + chunk.num_tokens):
                slot, value = self.value_at(chunk, position)
                assert self.memory[slot] == value, "a cached value was computed from something else"
        for chunk in step.chunks:
            self.take(chunk)

    def value_at(self, chunk: Chunk, position: int) -> tuple[tuple[int, int], tuple[object, ...]]:
        """Returns where a position's value lies, and all that it is computed from."""
        sequence = chunk.sequence
        tokens = sequence.tokens(0, position + 1)
        assert len(tokens) == position + 1 <= sequence.max_num_tokens
        slot = sequence.block_table[position // self.size], position % self.size
        return slot, (sequence.request.adapter, *tokens)

    def take(self, chunk: Chunk) -> None:
        sequence, accepted = chunk.sequence, 0
        finished = False
        while chunk.samples:
            token = self.random.randint(0, 1)
            sequence.token_ids.append(token)
            finished = sequence.num_tokens == sequence.max_num_tokens
            if finished or accepted == chunk.num_drafts or sequence.draft_token_ids[accepted] != token:
                break
            accepted += 1
        self.scheduler.advance(chunk, num_rejected=chunk.num_drafts - accepted)
        sequence.draft_token_ids = []
        if finished:
            self.scheduler.remove(sequence.request_id)
        elif chunk.samples:
            assert sequence.num_tokens - sequence.num_computed_tokens == 1

    @invariant()
    def blocks_are_conserved(self) -> None:
        held = {block for sequence in self.live() for block in sequence.block_table}
        assert self.scheduler.blocks.num_free + len(held) == self.num_blocks
        assert all(not sequence.block_table for sequence in self.scheduler.waiting)
        assert self.scheduler.blocks.num_cached <= self.num_blocks

    @invariant()
    def order_is_kept(self) -> None:
        for queue in (self.scheduler.running, self.scheduler.waiting):
            orders = [sequence.order for sequence in queue]
            assert orders == sorted(orders)

    def teardown(self) -> None:
        for _ in range(200 * (self.count + 1)):
            if not self.scheduler.has_unfinished:
                break
            self.step([])
        assert not self.scheduler.has_unfinished
        assert self.scheduler.blocks.num_free == self.num_blocks


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase


def continuations(count: int) -> list[Request]:
    ends = ["What is 2 + 2?", "Name a colour.", "Spell cat.", "Say yes.", "What is 2 + 3?", "Name a country."]
    return [
        make_request(str(i), SYSTEM + ends[i % len(ends)], max_tokens=10, ignore_eos=True, logprobs=0)
        for i in range(count)
    ]


def answers_of(engine: Engine, requests: list[Request]) -> list[RequestOutput]:
    found = engine.generate(requests)
    assert engine.blocks.num_free == engine.blocks.num_blocks
    return found


@pytest.mark.parametrize("window", [None, 7], ids=["full", "window"])
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 11}, {"num_blocks": 14}], ids=str)
def test_a_hit_equals_a_miss_and_the_trainer(window: int | None, limits: dict[str, int]):
    decoder = make_decoder(tiny_config(byte_tokenizer(), sliding_windows=(window, None, window)))
    plain = make_engine(decoder, enable_prefix_caching=False, max_model_len=96, **limits)
    engine = make_engine(decoder, max_model_len=96, **limits)
    answers_of(engine, continuations(1))
    hits_before = engine.scheduler.num_hit_tokens
    requests = continuations(6)
    for request, cached, fresh in zip(requests, answers_of(engine, requests), answers_of(plain, requests), strict=True):
        assert cached.token_ids == fresh.token_ids
        assert fresh.num_cached_tokens == 0
        expected = dense_logprobs(decoder, [*request.prompt_token_ids, *cached.token_ids])[-10:]
        torch.testing.assert_close(torch.tensor(cached.logprobs), expected, atol=1e-5, rtol=0)
    assert engine.scheduler.num_hit_tokens - hits_before >= 4 * 48
    assert plain.scheduler.num_hit_tokens == plain.blocks.num_cached == 0


def test_replies_are_part_of_the_cache_for_the_next_turn():
    engine = make_engine()
    [first] = answers_of(engine, [make_request("a", SYSTEM, max_tokens=40, ignore_eos=True)])
    history = (*SYSTEM.encode(), *first.token_ids)
    [second] = answers_of(engine, [make_request("b", (*history, 65, 66), max_tokens=1)])
    assert second.num_cached_tokens == (len(history) - 1) // 16 * 16
    assert second.num_cached_tokens > len(SYSTEM)


def test_prompt_logprobs_are_complete_after_a_hit():
    engine = make_engine()
    request = make_request("a", SYSTEM, max_tokens=4, prompt_logprobs=2)
    [cold] = answers_of(engine, [request])
    [warm] = answers_of(engine, [make_request("b", SYSTEM, max_tokens=4)])
    [again] = answers_of(engine, [make_request("c", SYSTEM, max_tokens=4, prompt_logprobs=2)])
    assert warm.num_cached_tokens > 0
    assert again.num_cached_tokens == 0
    assert again.prompt_logprobs == pytest.approx(cold.prompt_logprobs, abs=1e-6)
    assert len(again.prompt_logprobs) == len(SYSTEM)


def test_tokens_past_a_stop_never_enter_the_cache():
    """vllm#5543: what was computed beyond the stop must not be found by a later request."""
    decoder = make_decoder(tiny_config(byte_tokenizer()))
    text = "stop here and never say what comes after this"
    for speculative in ("none", "ngram"):
        engine = make_engine(decoder, block_size=2, speculative=speculative)
        # The prompt has the text already, so that with speculation all of it is guessed and computed at once.
        prompt = (text + "|").encode()
        script = list(text.encode())
        engine.runner = Runner(decoder, engine._cache, ScriptedTokens({"a": script}))  # type: ignore[arg-type]
        [answer] = answers_of(engine, [make_request("a", tuple(prompt), max_tokens=40, stop=("here",))])
        assert answer.finish_reason is FinishReason.STOP
        assert answer.text == "stop "
        known = [*prompt, *answer.token_ids]
        beyond = [*prompt, *script]
        hits, _ = engine.blocks.match(beyond)
        assert len(hits) * 2 < len(known)
        fresh = make_engine(decoder, enable_prefix_caching=False)
        [expected] = fresh.generate([make_request("b", tuple(beyond), max_tokens=8, ignore_eos=True)])
        engine.runner = Runner(decoder, engine._cache, engine._sampler)
        [found] = answers_of(engine, [make_request("b", tuple(beyond), max_tokens=8, ignore_eos=True)])
        assert found.num_cached_tokens > 0
        assert found.token_ids == expected.token_ids


def test_a_poisoned_beginning_is_not_kept():
    """Values that are not finite leave with the request that made them, and take with them whoever shares them."""
    decoder = make_decoder(tiny_config(byte_tokenizer(), tie_word_embeddings=False))
    engine = make_engine(decoder, max_num_seqs=4)
    healthy = make_request("healthy", "something else entirely", max_tokens=6, ignore_eos=True)
    expected = make_engine(decoder).generate([healthy])[0].token_ids
    weight = engine.decoder.model.embed_tokens.weight
    good = weight[7].clone()
    weight[7] = float("nan")
    bad = [make_request(name, (7, *b"the same long beginning of both"), max_tokens=4) for name in ("one", "two")]
    answers = {answer.request_id: answer for answer in answers_of(engine, [healthy, *bad])}
    assert answers["healthy"].token_ids == expected
    assert answers["one"].finish_reason is answers["two"].finish_reason is FinishReason.ERROR
    weight[7] = good
    [mended] = answers_of(engine, [make_request("one", bad[0].prompt_token_ids, max_tokens=4)])
    assert mended.finish_reason is not FinishReason.ERROR
    assert mended.num_cached_tokens == 0
    assert all(layer.isfinite().all() for layer in (*engine._cache.keys, *engine._cache.values))


def test_requests_that_come_together_compute_their_common_beginning_once():
    decoder = make_decoder(tiny_config(byte_tokenizer()))
    engine = make_engine(decoder)
    requests = [make_request(str(i), SYSTEM, temperature=1.0, seed=i, ignore_eos=True, logprobs=0) for i in range(6)]
    answers = answers_of(engine, requests)
    plain = make_engine(decoder, enable_prefix_caching=False).generate(requests)
    assert [answer.num_cached_tokens for answer in answers] == [0, *([len(SYSTEM) // 16 * 16] * 5)]
    for found, expected in zip(answers, plain, strict=True):
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_a_step_that_fails_leaves_nothing_in_the_cache():
    engine = make_engine()
    engine.add_request(make_request("a", SYSTEM))
    engine.add_request(make_request("b", SYSTEM))
    run = engine.runner.run

    def fail(schedule: Any) -> Any:
        run(schedule)
        raise RuntimeError("the matrix fell over")

    engine.runner.run = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="fell over"):
        engine.step()
    assert sorted(engine.abandon_step()) == ["a", "b"]
    assert engine.blocks.num_cached == 0
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_resetting_the_cache_makes_the_next_prompt_a_miss():
    engine = make_engine()
    answers_of(engine, [make_request("a", SYSTEM)])
    engine.reset_prefix_cache()
    [answer] = answers_of(engine, [make_request("b", SYSTEM)])
    assert answer.num_cached_tokens == 0


@pytest.mark.parametrize("kind", ["ngram", "draft", "draft-itself"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("limits", [{}, {"num_blocks": 16, "max_num_batched_tokens": 24}], ids=["roomy", "tight"])
def test_speculation_changes_no_token(kind: str, temperature: float, limits: dict[str, int]):
    decoder = make_decoder(tiny_config(byte_tokenizer()))
    draft = make_decoder(tiny_config(byte_tokenizer(), num_layers=1, sliding_windows=()), seed=3)
    common: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 6, **limits}
    requests = [
        make_request(
            str(i),
            "abcabcabd " * (1 + i % 3) + str(i),
            max_tokens=30 + i,
            temperature=temperature,
            seed=i,
            ignore_eos=True,
            logprobs=1,
            repetition_penalty=1.1 if i % 2 else 1.0,
        )
        for i in range(8)
    ]
    plain = make_engine(decoder, **common).generate(requests)
    model = {"ngram": None, "draft": draft, "draft-itself": decoder}[kind]
    config = {**common, "speculative": kind.partition("-")[0], "num_speculative_tokens": 3}
    engine = Engine(decoder, byte_tokenizer(), make_engine(decoder, **common).config.__class__(**config), draft=model)
    for expected, found in zip(plain, answers_of(engine, requests), strict=True):
        assert found.token_ids == expected.token_ids
        assert found.text == expected.text
        assert found.finish_reason == expected.finish_reason
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert engine.num_drafts > 0
    assert 0 <= engine.num_accepted_tokens <= engine.num_draft_tokens
    if kind == "draft-itself" and temperature == 0.0 and not limits:
        # The same model guesses what it will say, but for the penalties that it does not know of.
        assert engine.num_accepted_tokens > 0.3 * engine.num_draft_tokens


def test_prompt_lookup_finds_what_the_text_repeats():
    decoder = make_decoder(tiny_config(byte_tokenizer()))
    engine = make_engine(decoder, speculative="ngram", num_speculative_tokens=4)
    text = "one two three four five six. "
    engine.runner = Runner(decoder, engine._cache, ScriptedTokens({"a": list((text * 2).encode())}))  # type: ignore[arg-type]
    steps = 0
    engine.add_request(make_request("a", text, max_tokens=len(text) * 2))
    while engine.has_unfinished:
        engine.step()
        steps += 1
    assert engine.num_accepted_tokens > 0.8 * engine.num_draft_tokens
    assert steps < len(text) * 2 / 3


def test_one_prompt_embeds_to_the_same_vector_whole_or_in_chunks():
    decoder = make_decoder(tiny_config(byte_tokenizer()))
    for pooling in ("mean", "last"):
        vectors = []
        for limits in ({}, {"max_num_batched_tokens": 8}, {"enable_prefix_caching": False}):
            engine = make_engine(decoder, **limits)
            [answer] = answers_of(
                engine, [Request(request_id="a", prompt_token_ids=tuple(SYSTEM.encode()), pooling=pooling)]
            )
            assert answer.finish_reason is FinishReason.STOP
            vectors.append(torch.tensor(answer.embedding))
        tokens_BT = torch.tensor([list(SYSTEM.encode())])
        with torch.no_grad():
            x_TD = decoder.hidden_states(
                tokens_BT, positions_BT=torch.arange(tokens_BT.shape[1])[None], attention=DenseAttention()
            )[0]
        expected = x_TD.mean(0) if pooling == "mean" else x_TD[-1]
        for vector in vectors:
            torch.testing.assert_close(vector, expected / expected.norm(), atol=1e-6, rtol=1e-5)


def test_the_more_urgent_runs_first_and_the_least_urgent_gives_way():
    engine = make_engine(max_num_seqs=1, num_blocks=16)
    order = []
    for name, priority in (("late", 5), ("soon", 1), ("sooner", 0), ("soon too", 1)):
        request = make_request(name, "abc", max_tokens=2, ignore_eos=True)
        engine.add_request(Request(**{**vars(request), "priority": priority}))
    while engine.has_unfinished:
        order += [output.request_id for output in engine.step() if output.finished]
    assert order == ["sooner", "soon", "soon too", "late"]


def test_reloaded_weights_answer_for_themselves(tmp_path: Path):
    """lmdeploy#4917: a beginning that the old weights computed is not used for the new ones."""
    folder, other = save_tiny_folder(tmp_path / "a"), save_tiny_folder(tmp_path / "b", num_layers=2, sliding_windows=())
    old = make_decoder(tiny_config(byte_tokenizer()), seed=5)
    engine = make_engine(old)
    request = make_request("a", SYSTEM, ignore_eos=True)
    before = answers_of(engine, [request])[0].token_ids
    with pytest.raises(ShardlineError, match="num_layers"):
        engine.reload(other)
    assert answers_of(engine, [request])[0].token_ids == before
    engine.reload(folder)
    [after] = answers_of(engine, [request])
    assert after.num_cached_tokens == 0
    assert after.token_ids == load_engine(folder, engine.config).generate([request])[0].token_ids != before
