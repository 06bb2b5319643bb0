from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.config import UsageError
from shardline.text.sampler import sample_rows

SIZES = st.integers(1, 40)


def order(num_rows: int, count: int, *, seed: int, global_batch: int) -> list[int]:
    steps = range(-(-count // global_batch))
    drawn = [sample_rows(step, global_batch=global_batch, num_rows=num_rows, seed=seed) for step in steps]
    return np.concatenate(drawn)[:count].tolist()


@given(num_rows=SIZES, global_batch=SIZES, seed=st.integers(0, 9))
def test_each_epoch_sees_each_row_once(num_rows: int, global_batch: int, seed: int):
    drawn = order(num_rows, 3 * num_rows, seed=seed, global_batch=global_batch)
    for epoch in range(3):
        assert sorted(drawn[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


@given(num_rows=SIZES, batches=st.tuples(SIZES, SIZES), seed=st.integers(0, 9))
def test_the_order_does_not_depend_on_the_batch(num_rows: int, batches: tuple[int, int], seed: int):
    first, second = (order(num_rows, 60, seed=seed, global_batch=size) for size in batches)
    assert first == second


@given(step=st.integers(0, 50), per_rank=st.integers(1, 4), num_ranks=st.integers(1, 4), num_rows=SIZES)
def test_any_number_of_ranks_covers_the_same_rows(step: int, per_rank: int, num_ranks: int, num_rows: int):
    size = per_rank * num_ranks
    whole = sample_rows(step, global_batch=size, num_rows=num_rows, seed=1)
    shares = [
        sample_rows(step, global_batch=size, num_rows=num_rows, seed=1)[rank * per_rank : (rank + 1) * per_rank]
        for rank in range(num_ranks)
    ]
    assert np.concatenate(shares).tolist() == whole.tolist()


def test_epochs_and_seeds_differ():
    first, second = order(50, 50, seed=0, global_batch=5), order(50, 100, seed=0, global_batch=5)[50:]
    assert first != second
    assert first != order(50, 50, seed=1, global_batch=5)
    assert first != list(range(50))


def test_the_order_is_the_same_for_ever():
    """A resumed run may run under a newer numpy: these rows must not move."""
    assert sample_rows(3, global_batch=6, num_rows=20, seed=7).tolist() == [19, 16, 11, 1, 3, 2]


def test_a_batch_larger_than_the_dataset_spans_epochs():
    rows = sample_rows(0, global_batch=7, num_rows=3, seed=0)
    assert sorted(rows[:3]) == sorted(rows[3:6]) == [0, 1, 2]


def test_writing_to_a_batch_does_not_change_the_order():
    rows = sample_rows(0, global_batch=4, num_rows=4, seed=0)
    expected = rows.tolist()
    rows[:] = 0
    assert sample_rows(0, global_batch=4, num_rows=4, seed=0).tolist() == expected


def test_an_empty_dataset_is_an_error():
    with pytest.raises(UsageError, match="has 0 rows; at least 1 is needed to draw a batch of 8"):
        sample_rows(0, global_batch=8, num_rows=0, seed=0)
