"""Schedules, replayed without torch: complete, free of deadlock, in order on every link, within their memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.parallel.schedules import DURATIONS, Action, Schedule, make_schedule


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble_v"]))
    num_ranks, num_micro_batches = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    stages = {"interleaved": draw(st.integers(2, 4)), "zero_bubble_v": 2}.get(name, 1)
    if name == "interleaved":
        num_micro_batches *= num_ranks
    return make_schedule(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, stages_per_rank=stages)


def needs(schedule: Schedule, action: Action) -> list[Action]:
    kind, stage, micro_batch = action
    if kind == "F":
        return [Action("F", stage - 1, micro_batch)] if stage else []
    if kind == "W":
        return [Action("B", stage, micro_batch)]
    after = [Action("B", stage + 1, micro_batch)] if stage + 1 < schedule.num_stages else []
    return [Action("F", stage, micro_batch), *after]


def length(schedule: Schedule) -> int:
    """Replays the ranks' orders and returns how long they take together."""
    done: dict[Action, int] = {}
    clocks = [0] * len(schedule.actions)
    left = [list(actions) for actions in schedule.actions]
    while any(left):
        went_on = False
        for rank, actions in enumerate(left):
            while actions and all(need in done for need in needs(schedule, actions[0])):
                action = actions.pop(0)
                start = max([clocks[rank], *(done[need] for need in needs(schedule, action))])
                whole = action.kind == "B" and not schedule.split_backward
                clocks[rank] = start + DURATIONS[action.kind] + whole * DURATIONS["W"]
                done[action] = clocks[rank]
                went_on = True
        assert went_on, f"deadlock before {[actions[0] for actions in left if actions]}"
    return max(clocks)


@settings(deadline=None, max_examples=80)
@given(schedules())
def test_every_pass_runs_once_on_the_rank_of_its_stage_and_none_waits_for_ever(schedule):
    kinds = ("F", "B", "W") if schedule.split_backward else ("F", "B")
    for rank, actions in enumerate(schedule.actions):
        expected = {
            Action(kind, stage, micro_batch)
            for kind in kinds
            for stage in schedule.stages_of(rank)
            for micro_batch in range(schedule.num_micro_batches)
        }
        assert len(actions) == len(expected)
        assert set(actions) == expected
    length(schedule)


@settings(deadline=None, max_examples=80)
@given(schedules())
def test_both_ends_of_a_link_agree_on_the_order_of_its_messages(schedule):
    ranks = range(len(schedule.actions))
    for kind, step in (("F", 1), ("B", -1)):
        for source in ranks:
            for target in ranks:
                sent = [
                    (action.stage + step, action.micro_batch)
                    for action in schedule.actions[source]
                    if action.kind == kind
                    and 0 <= action.stage + step < schedule.num_stages
                    and schedule.rank_of_stage[action.stage + step] == target != source
                ]
                awaited = [
                    (action.stage, action.micro_batch)
                    for action in schedule.actions[target]
                    if action.kind == kind
                    and 0 <= action.stage - step < schedule.num_stages
                    and schedule.rank_of_stage[action.stage - step] == source != target
                ]
                assert sent == awaited


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5, 8, 12])
def test_activations_in_flight_are_as_few_as_promised(num_ranks, num_micro_batches):
    for name, promised in (
        ("gpipe", lambda rank: num_micro_batches),
        ("1f1b", lambda rank: num_ranks - rank),
        ("zero_bubble_v", lambda rank: 2 * num_ranks),  # of stages half as large
    ):
        stages = 2 if name == "zero_bubble_v" else 1
        schedule = make_schedule(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, stages_per_rank=stages)
        for rank in range(num_ranks):
            assert schedule.max_in_flight(rank) <= promised(rank)


@pytest.mark.parametrize(
    ("name", "stages", "expected"),
    [
        ("gpipe", 1, 11 * 12),  # 8 micro-batches and 3 ranks before them
        ("1f1b", 1, 11 * 12),
        ("interleaved", 2, 19 * 12),  # 16 and a bubble half as long, in passes half as long
        ("zero_bubble_v", 2, 18 * 12),  # 16 x 12 and what fills the pipeline
    ],
)
def test_bubbles_of_four_ranks_and_eight_micro_batches(name, stages, expected):
    schedule = make_schedule(name, num_ranks=4, num_micro_batches=8, stages_per_rank=stages)
    assert length(schedule) == expected


def test_a_v_begins_and_ends_on_the_first_rank():
    schedule = make_schedule("zero_bubble_v", num_ranks=3, num_micro_batches=4, stages_per_rank=2)
    assert schedule.rank_of_stage == (0, 1, 2, 2, 1, 0)
    assert schedule.stages_of(0) == (0, 5)
