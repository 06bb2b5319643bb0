"""The scheduler's one rule, and a state machine that does to it whatever clients can do."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shardline.serving.blocks import BlockManager
from shardline.serving.requests import Request, SamplingParams
from shardline.serving.scheduler import Schedule, Scheduler
from shardline.serving.sequence import Sequence


def make_scheduler(*, num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 8, budget: int = 16) -> Scheduler:
    blocks = BlockManager(num_blocks=num_blocks, block_size=block_size)
    return Scheduler(blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)


def make_sequence(name: str, num_prompt_tokens: int, *, max_tokens: int = 8) -> Sequence:
    request = Request(
        request_id=name,
        prompt_token_ids=tuple(range(num_prompt_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens),
    )
    return Sequence(request, max_num_tokens=num_prompt_tokens + max_tokens, arrived_s=0.0)


def run(scheduler: Scheduler, step: Schedule) -> list[str]:
    """Pretends that the model computed the step; returns the sequences that finished."""
    finished = []
    for chunk in step.chunks:
        scheduler.advance(chunk)
        if chunk.samples:
            chunk.sequence.token_ids.append(7)
            if chunk.sequence.num_tokens == chunk.sequence.max_num_tokens:
                scheduler.remove(chunk.sequence.request_id)
                finished.append(chunk.sequence.request_id)
    return finished


def shape(step: Schedule) -> list[tuple[str, int, int, bool]]:
    return [(c.sequence.request_id, c.start, c.num_tokens, c.samples) for c in step.chunks]


def test_a_long_prompt_is_computed_in_chunks_and_samples_after_the_last():
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_sequence("a", 20))
    seen = []
    for _ in range(4):
        step = scheduler.schedule()
        seen += shape(step)
        run(scheduler, step)
    assert seen == [("a", 0, 8, False), ("a", 8, 8, False), ("a", 16, 4, True), ("a", 20, 1, True)]


def test_a_step_mixes_running_replies_with_a_new_prompt():
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_sequence("a", 3))
    run(scheduler, scheduler.schedule())
    scheduler.add(make_sequence("b", 20))
    assert shape(scheduler.schedule()) == [("a", 3, 1, True), ("b", 0, 7, False)]


def test_the_number_of_running_sequences_is_bounded():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_sequence(name, 2))
    assert [name for name, *_ in shape(scheduler.schedule())] == ["a", "b"]
    assert len(scheduler.waiting) == 1


def test_a_prompt_waits_until_all_of_it_fits():
    scheduler = make_scheduler(num_blocks=5, block_size=4, budget=4)
    scheduler.add(make_sequence("a", 12, max_tokens=4))
    scheduler.add(make_sequence("b", 12, max_tokens=4))
    names = set()
    for _ in range(3):
        step = scheduler.schedule()
        names |= {name for name, *_ in shape(step)}
        run(scheduler, step)
    assert names == {"a"}


def test_the_youngest_is_preempted_and_computed_again_from_the_start():
    scheduler = make_scheduler(num_blocks=4, block_size=4, budget=32)
    scheduler.add(make_sequence("a", 8, max_tokens=8))
    scheduler.add(make_sequence("b", 8, max_tokens=8))
    run(scheduler, scheduler.schedule())
    step = scheduler.schedule()
    assert [sequence.request_id for sequence in step.preempted] == ["b"]
    assert shape(step) == [("a", 8, 1, True)]
    assert scheduler.num_preemptions == 1
    order = []
    while scheduler.has_unfinished:
        order += run(scheduler, step)
        step = scheduler.schedule()
        restarted = [chunk for chunk in step.chunks if chunk.sequence.request_id == "b" and chunk.start == 0]
        if restarted:
            assert restarted[0].num_tokens == 9  # the prompt and the token that was already sampled
    assert order == ["a", "b"]
    assert scheduler.blocks.num_free == 4


def test_removing_works_in_every_state():
    scheduler = make_scheduler(num_blocks=4, block_size=4, budget=4)
    for name in "abc":
        scheduler.add(make_sequence(name, 8))
    run(scheduler, scheduler.schedule())
    assert scheduler.remove("c") is not None  # waiting, never scheduled
    assert scheduler.remove("a") is not None  # in the middle of its prompt
    assert scheduler.remove("a") is None
    run(scheduler, scheduler.schedule())
    assert scheduler.remove("b") is not None
    assert scheduler.blocks.num_free == 4
    assert not scheduler.has_unfinished
    assert scheduler.schedule().chunks == []


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go and run in any order: blocks are conserved, order is kept, everyone finishes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_blocks = 12
        self.scheduler = make_scheduler(num_blocks=self.num_blocks, block_size=4, max_num_seqs=3, budget=10)
        self.arrived: list[str] = []
        self.count = 0

    def live(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    @rule(num_prompt_tokens=st.integers(1, 30), max_tokens=st.integers(1, 18))
    def add(self, num_prompt_tokens: int, max_tokens: int) -> None:
        name = str(self.count)
        self.count += 1
        self.arrived.append(name)
        self.scheduler.add(make_sequence(name, num_prompt_tokens, max_tokens=max_tokens))

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.arrived))
        assert self.scheduler.remove(name) is not None
        self.arrived.remove(name)

    @precondition(lambda self: self.arrived)
    @rule()
    def step(self) -> None:
        oldest = self.live()[0]
        before = oldest.num_computed_tokens
        step = self.scheduler.schedule()
        assert step.chunks[0].sequence is oldest  # the oldest always moves: nothing starves
        assert 0 < step.num_tokens <= self.scheduler.max_num_batched_tokens
        assert step.num_tokens == sum(chunk.num_tokens for chunk in step.chunks)
        for chunk in step.chunks:
            assert chunk.start == chunk.sequence.num_computed_tokens
            assert len(chunk.sequence.block_table) * 4 >= chunk.start + chunk.num_tokens
        for name in run(self.scheduler, step):
            self.arrived.remove(name)
        assert oldest.num_computed_tokens > before

    @invariant()
    def blocks_are_conserved(self) -> None:
        held = {block for sequence in self.live() for block in sequence.block_table}  # beginnings are shared
        assert self.scheduler.blocks.num_free + len(held) == self.num_blocks
        assert all(not sequence.block_table for sequence in self.scheduler.waiting)

    @invariant()
    def order_of_arrival_is_kept(self) -> None:
        assert [sequence.request_id for sequence in self.live()] == self.arrived
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs

    def teardown(self) -> None:
        for _ in range(100 * (self.count + 1)):
            if not self.arrived:
                break
            self.step()
        assert not self.arrived
        assert self.scheduler.blocks.num_free == self.num_blocks


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
