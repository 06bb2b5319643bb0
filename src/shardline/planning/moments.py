"""How many micro-batches' activations a pipeline rank holds at the moments that matter, from the schedule itself.

    for moment in moments("1f1b", num_ranks=4, num_micro_batches=16, stages_per_rank=1, rank=0): ...

A moment is one pass: its kind and stage, the forward passes alive on each of the rank's stages (this one counted), the
backward passes whose weights' part still waits (zero_bubble_v), and whether a backward pass has left gradients before.
Of the moments of one kind, only those are returned that no other one exceeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from shardline.parallel.schedules import DURATIONS, Action, Kind, Schedule, ScheduleName, make_schedule

__all__ = ["Moment", "bubble", "moments", "pass_ends"]

_SIMULATED_RANKS = 8  # zero_bubble_v's simulation takes too long for a search beyond


class Moment(NamedTuple):
    """`alive` and `waiting` are counts, in the order of the rank's stages."""

    kind: Kind
    stage: int
    alive: tuple[int, ...]
    waiting: tuple[int, ...]
    accumulated: bool


@lru_cache(maxsize=4096)
def moments(
    name: ScheduleName, *, num_ranks: int, num_micro_batches: int, stages_per_rank: int, rank: int
) -> tuple[Moment, ...]:
    """Returns the moments of one pipeline rank; a pipeline of one rank runs a forward and a backward pass in turn."""
    if num_ranks == 1:
        two = min(2, num_micro_batches)
        actions = tuple(chain.from_iterable((Action("F", 0, index), Action("B", 0, index)) for index in range(two)))
        return _walk(actions, (0,), splits=False)
    if name == "gpipe":
        first = [Moment(kind, rank, (num_micro_batches,), (0,), False) for kind in ("F", "B")]
        return (
            (*first, Moment("B", rank, (num_micro_batches - 1,), (0,), True)) if num_micro_batches > 1 else tuple(first)
        )
    stages = tuple(range(rank, num_ranks * stages_per_rank, num_ranks))
    if name == "zero_bubble_v":
        stages = rank, 2 * num_ranks - 1 - rank
        if num_ranks > _SIMULATED_RANKS:  # as many as its limit allows, half on each stage
            count = min(num_micro_batches, num_ranks)
            return tuple(Moment(kind, stage, (count, count), (0, 0), True) for kind in ("F", "B") for stage in stages)
    schedule = _schedule(name, num_ranks, _representative(num_ranks, num_micro_batches), stages_per_rank)
    return _walk(schedule.actions[rank], stages, splits=schedule.split_backward)


def bubble(name: ScheduleName, *, num_ranks: int, num_micro_batches: int, stages_per_rank: int) -> float:
    """Returns idle time over busy time of a step. A zero_bubble_v of more ranks than are simulated counts 1f1b's
    third (arXiv:2401.10241, table 2, its first schedule: only weights' gradients fill the bubble).
    """
    if num_ranks == 1:
        return 0.0
    plain = (num_ranks - 1) / num_micro_batches
    if name == "zero_bubble_v":
        if num_ranks > _SIMULATED_RANKS:
            return plain / 3
        return _simulated_bubble(num_ranks, _representative(num_ranks, num_micro_batches)) / num_micro_batches
    return plain / stages_per_rank


@lru_cache(maxsize=256)
def _schedule(name: ScheduleName, num_ranks: int, num_micro_batches: int, stages_per_rank: int) -> Schedule:
    return make_schedule(
        name, num_ranks=num_ranks, num_micro_batches=num_micro_batches, stages_per_rank=stages_per_rank
    )


def _representative(num_ranks: int, num_micro_batches: int) -> int:
    """Few micro-batches among which the steady state is reached; a multiple of the ranks where the number is."""
    return min(num_micro_batches, 3 * num_ranks)


@lru_cache(maxsize=256)
def _simulated_bubble(num_ranks: int, num_micro_batches: int) -> float:
    """Idle time over that of one micro-batch."""
    ends = pass_ends(_schedule("zero_bubble_v", num_ranks, num_micro_batches, 2), DURATIONS)
    busy = 2 * sum(DURATIONS.values())  # of one micro-batch
    return max(ends.values()) / busy - num_micro_batches


def pass_ends(schedule: Schedule, durations: Mapping[Kind, float]) -> dict[Action, float]:
    """Returns when each pass ends, if every rank takes its passes in turn and each waits for its inputs."""
    done: dict[Action, float] = {}
    clocks, next_at = [0.0] * len(schedule.actions), [0] * len(schedule.actions)
    while any(at < len(actions) for at, actions in zip(next_at, schedule.actions, strict=True)):
        for rank, actions in enumerate(schedule.actions):
            while next_at[rank] < len(actions):
                action = actions[next_at[rank]]
                needed = _needed(action, schedule.num_stages)
                if any(each not in done for each in needed):
                    break
                clocks[rank] = max([clocks[rank], *(done[each] for each in needed)]) + durations[action.kind]
                done[action] = clocks[rank]
                next_at[rank] += 1
    return done


def _needed(action: Action, num_stages: int) -> list[Action]:
    kind, stage, index = action
    if kind == "F":
        return [Action("F", stage - 1, index)] if stage else []
    if kind == "B":
        after = [Action("B", stage + 1, index)] if stage + 1 < num_stages else []
        return [Action("F", stage, index), *after]
    return [Action("B", stage, index)]


def _walk(actions: tuple[Action, ...], stages: tuple[int, ...], *, splits: bool) -> tuple[Moment, ...]:
    place = {stage: index for index, stage in enumerate(stages)}
    alive, waiting = [0] * len(stages), [0] * len(stages)
    accumulated, found = False, set()
    for kind, stage, _ in actions:
        index = place[stage]
        alive[index] += kind == "F"
        found.add(Moment(kind, stage, tuple(alive), tuple(waiting), accumulated))
        if kind == "B":
            alive[index] -= 1
            waiting[index] += splits
        waiting[index] -= kind == "W"
        accumulated |= kind == "W" or (kind == "B" and not splits)
    return tuple(each for each in found if not any(_exceeds(other, each) for other in found))


def _exceeds(one: Moment, other: Moment) -> bool:
    if one == other or (one.kind, one.stage) != (other.kind, other.stage) or one.accumulated < other.accumulated:
        return False
    counts = zip(one.alive + one.waiting, other.alive + other.waiting, strict=True)
    return all(mine >= theirs for mine, theirs in counts)
