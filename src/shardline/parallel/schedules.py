"""In which order the ranks of a pipeline run forward and backward passes. Pure Python: no torch, no communication.

    schedule = make_schedule("1f1b", num_ranks=4, num_micro_batches=8)
    schedule.actions[rank]          # (Action("F", stage, micro_batch), ...)
    schedule.stages_of(rank)        # the stages that live there

    gpipe           all forward passes, then all backward (Huang et al., 2019, arXiv:1811.06965)
    1f1b            backward as soon as possible: few activations are alive (Harlap et al., 2018, arXiv:1806.03377)
    interleaved     the same with several stages a rank, far apart, and a smaller bubble (Narayanan et al., 2021,
                    arXiv:2104.04473, section 2.2)
    zero_bubble_v   two stages a rank, placed like a V; backward is split into the gradient of the input (B), which the
                    neighbour waits for, and that of the weights (W), which fills bubbles (Qi et al., 2023,
                    arXiv:2401.10241, and 2024, arXiv:2405.15362)

gpipe, 1f1b and interleaved are written down as published. zero_bubble_v is simulated: a rank takes, of the passes whose
inputs are there, the one that it prefers; of several preferences the shortest schedule is kept. An order that was
simulated can't deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from typing import Literal, NamedTuple

__all__ = ["DURATIONS", "Action", "Kind", "Schedule", "ScheduleName", "make_schedule"]

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble_v"]
Kind = Literal["F", "B", "W"]
Orders = tuple[tuple["Action", ...], ...]

# How long the passes of a stage take, in proportion: of 12 small layers 0.13, 0.18 and 0.10 s. Attention has backward
# work but no weights. With equal durations the simulated order left ranks waiting (docs/decisions/0013).
DURATIONS: dict[Kind, int] = {"F": 4, "B": 5, "W": 3}
# (kind, which of a rank's two stages), the dearest first.
_PREFERENCES: tuple[tuple[tuple[Kind, int], ...], ...] = (
    (("B", 0), ("F", 1), ("B", 1), ("F", 0)),
    (("F", 1), ("B", 1), ("B", 0), ("F", 0)),
    (("F", 1), ("B", 0), ("B", 1), ("F", 0)),
    (("F", 1), ("F", 0), ("B", 0), ("B", 1)),
    (("B", 1), ("F", 1), ("F", 0), ("B", 0)),
)


class Action(NamedTuple):
    """One pass of one micro-batch through one stage: F forward, B backward, W the weights' part where B leaves it."""

    kind: Kind
    stage: int
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of every rank's passes, and where the stages live.

    split_backward   B computes the inputs' gradients only, and W the weights'
    """

    actions: Orders
    rank_of_stage: tuple[int, ...]
    num_micro_batches: int
    split_backward: bool = False

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    def max_in_flight(self, rank: int) -> int:
        """Returns the most forward passes whose activations a rank holds at once."""
        last: Kind = "W" if self.split_backward else "B"
        alive = most = 0
        for action in self.actions[rank]:
            alive += (action.kind == "F") - (action.kind == last)
            most = max(most, alive)
        return most


def make_schedule(name: ScheduleName, *, num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """Returns the schedule of a pipeline.

    stages_per_rank   1 for gpipe and 1f1b, 2 for zero_bubble_v, 2 or more for interleaved, whose micro-batches must be
                      a multiple of the ranks
    """
    if name == "zero_bubble_v":
        return Schedule(
            actions=_zero_bubble_v(num_ranks, num_micro_batches),
            rank_of_stage=(*range(num_ranks), *reversed(range(num_ranks))),
            num_micro_batches=num_micro_batches,
            split_backward=True,
        )
    orders = [
        _alternating(name, rank, num_ranks=num_ranks, num_micro_batches=num_micro_batches, stages=stages_per_rank)
        for rank in range(num_ranks)
    ]
    return Schedule(
        actions=tuple(orders),
        rank_of_stage=tuple(range(num_ranks)) * stages_per_rank,
        num_micro_batches=num_micro_batches,
    )


def _alternating(
    name: ScheduleName, rank: int, *, num_ranks: int, num_micro_batches: int, stages: int
) -> tuple[Action, ...]:
    """Forward passes to warm up, then one of each in turn, then the backward passes that are left.

    With several stages a rank, passes go through them in groups of as many micro-batches as there are ranks.
    """
    total = num_micro_batches * stages
    forward, backward = [], []
    for step in range(total):
        group = num_ranks if stages > 1 else num_micro_batches
        within = step // group % stages
        micro_batch = step // (group * stages) * group + step % group
        forward.append(Action("F", within * num_ranks + rank, micro_batch))
        backward.append(Action("B", (stages - 1 - within) * num_ranks + rank, micro_batch))
    warm_up = total
    if name == "1f1b":
        warm_up = min(total, num_ranks - 1 - rank)
    if name == "interleaved":
        warm_up = min(total, 2 * (num_ranks - 1 - rank) + (stages - 1) * num_ranks)
    steady = total - warm_up
    pairs = zip(forward[warm_up:], backward[:steady], strict=True)
    return (*forward[:warm_up], *chain.from_iterable(pairs), *backward[steady:])


def _zero_bubble_v(num_ranks: int, num_micro_batches: int) -> Orders:
    """The shortest of the simulated schedules, whose ranks hold at most as many activations as 1f1b's first one."""
    found = [_Simulation(num_ranks, num_micro_batches, preferred).run() for preferred in _PREFERENCES]
    return min(found, key=lambda each: each[0])[1]


class _Simulation:
    """Passes take their `DURATIONS`. Stage s < n lives on rank s, stage s >= n on rank 2n-1-s.

    A rank that is free takes, of the passes whose inputs are there, the first of `preferred`: (kind, which of its two
    stages), and when there is none a weights' part.
    """

    def __init__(self, num_ranks: int, num_micro_batches: int, preferred: tuple[tuple[Kind, int], ...]) -> None:
        self._num_ranks = num_ranks
        self._num_stages = 2 * num_ranks
        self._num_micro_batches = num_micro_batches
        self._preferred = preferred
        self._next: dict[tuple[Kind, int], int] = {
            (kind, stage): 0 for kind in DURATIONS for stage in range(self._num_stages)
        }
        self._done_at: dict[Action, int] = {}
        self._orders: list[list[Action]] = [[] for _ in range(num_ranks)]

    def run(self) -> tuple[int, Orders]:
        """Returns (length, orders)."""
        total = len(DURATIONS) * self._num_micro_batches * self._num_stages
        free_at = [0] * self._num_ranks
        ends = [0]  # of passes: only then can a rank begin another
        while len(self._done_at) < total:
            now = heappop(ends)
            for rank in range(self._num_ranks):
                if free_at[rank] > now or (action := self._choose(rank, now)) is None:
                    continue
                self._orders[rank].append(action)
                self._next[action.kind, action.stage] += 1
                free_at[rank] = self._done_at[action] = now + DURATIONS[action.kind]
                heappush(ends, free_at[rank])
        return max(free_at), tuple(tuple(order) for order in self._orders)

    def _choose(self, rank: int, now: int) -> Action | None:
        stages = rank, self._num_stages - 1 - rank
        alive = sum(self._next["F", stage] - self._next["W", stage] for stage in stages)
        # One place stays for the second stage's pass, which leads to backward passes.
        room = 2 * self._num_ranks - 1 > alive, 2 * self._num_ranks > alive
        for kind, which in (*self._preferred, ("W", 1), ("W", 0)):
            if kind != "F" or room[which]:
                action = self._ready(kind, stages[which], now)
                if action is not None:
                    return action
        return None

    def _ready(self, kind: Kind, stage: int, now: int) -> Action | None:
        """The next pass of a kind through a stage, if its inputs are there."""
        micro_batch = self._next[kind, stage]
        if micro_batch == self._num_micro_batches:
            return None
        needed: list[Action] = []
        if kind == "F" and stage:
            needed = [Action("F", stage - 1, micro_batch)]
        if kind == "B":
            needed = [Action("F", stage, micro_batch)]
            needed += [Action("B", stage + 1, micro_batch)] if stage + 1 < self._num_stages else []
        if kind == "W":
            needed = [Action("B", stage, micro_batch)]
        ready = all(self._done_at.get(each, now + 1) <= now for each in needed)
        return Action(kind, stage, micro_batch) if ready else None
