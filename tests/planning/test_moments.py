"""Micro-batches in flight and bubbles, against the schedules themselves and what is published about them."""

from __future__ import annotations

import pytest

from shardline.parallel.schedules import ScheduleName, make_schedule
from shardline.planning.moments import bubble, moments

STAGES: dict[ScheduleName, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble_v": 2}


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 4), (4, 4), (4, 16), (3, 30)])
def test_the_most_in_flight_is_the_schedule_s(name: ScheduleName, num_ranks: int, num_micro_batches: int) -> None:
    shape = {"num_ranks": num_ranks, "num_micro_batches": num_micro_batches, "stages_per_rank": STAGES[name]}
    schedule = make_schedule(name, **shape)
    for rank in range(num_ranks):
        found = moments(name, rank=rank, **shape)
        assert max(sum(each.alive) + sum(each.waiting) for each in found) == schedule.max_in_flight(rank)
        assert {each.stage for each in found} <= set(schedule.stages_of(rank))


def test_1f1b_holds_as_many_as_ranks_follow_and_gpipe_all() -> None:
    for rank in range(4):
        shape = {"num_ranks": 4, "num_micro_batches": 32, "stages_per_rank": 1, "rank": rank}
        assert max(sum(each.alive) for each in moments("1f1b", **shape)) == 4 - rank
        assert max(sum(each.alive) for each in moments("gpipe", **shape)) == 32


def test_one_rank_accumulates_after_its_first_micro_batch() -> None:
    shape = {"num_ranks": 1, "stages_per_rank": 1, "rank": 0}
    assert not any(each.accumulated for each in moments("1f1b", num_micro_batches=1, **shape))
    assert all(each.accumulated for each in moments("1f1b", num_micro_batches=9, **shape))


def test_a_long_zero_bubble_pipeline_is_bounded_and_not_simulated() -> None:
    found = moments("zero_bubble_v", num_ranks=32, num_micro_batches=512, stages_per_rank=2, rank=0)
    assert max(sum(each.alive) for each in found) == 64
    assert {each.stage for each in found} == {0, 63}


def test_bubbles() -> None:
    """Narayanan et al., section 2.2: (p - 1) / m, and 1 / v of it interleaved. A V's is smaller than either."""
    shape = {"num_ranks": 4, "num_micro_batches": 16}
    assert bubble("gpipe", stages_per_rank=1, **shape) == bubble("1f1b", stages_per_rank=1, **shape) == 3 / 16
    assert bubble("interleaved", stages_per_rank=3, **shape) == 1 / 16
    assert 0 <= bubble("zero_bubble_v", stages_per_rank=2, **shape) < 1 / 16
    assert bubble("zero_bubble_v", num_ranks=16, num_micro_batches=16, stages_per_rank=2) < 15 / 16 / 2
    assert bubble("1f1b", num_ranks=1, num_micro_batches=16, stages_per_rank=1) == 0
