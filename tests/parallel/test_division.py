"""Layers dealt out to stages, against all ways to do it."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.parallel.division import balance


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_dearest_stage_is_as_cheap_as_can_be(data):
    costs = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    num_stages = data.draw(st.integers(1, len(costs)))
    first, last = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 12))

    def dearest(starts: tuple[int, ...]) -> int:
        edges = [0, *starts, len(costs)]
        prices = [sum(costs[begin:end]) for begin, end in itertools.pairwise(edges)]
        prices[0] += first
        prices[-1] += last
        return max(prices)

    ranges = balance([float(cost) for cost in costs], first=first, last=last, num_stages=num_stages)
    assert [layer for layers in ranges for layer in layers] == list(range(len(costs)))
    assert all(len(layers) > 0 for layers in ranges)
    cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
    assert dearest(tuple(layers.start for layers in ranges[1:])) == min(map(dearest, cuts))
