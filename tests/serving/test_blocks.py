"""The block manager: no block is lost, none is given twice."""

from __future__ import annotations

import pytest

from shardline.serving.blocks import PADDING_BLOCK, BlockManager


def test_a_table_grows_by_whole_blocks_and_never_moves():
    blocks = BlockManager(num_blocks=4, block_size=16)
    table: list[int] = []
    assert blocks.grow(table, 1)
    first = list(table)
    assert blocks.grow(table, 16)
    assert table == first
    assert blocks.grow(table, 17)
    assert table[: len(first)] == first
    assert len(table) == 2
    assert blocks.num_free == 2
    assert blocks.usage == pytest.approx(0.5)


def test_growing_is_all_or_nothing():
    blocks = BlockManager(num_blocks=3, block_size=4)
    table: list[int] = []
    assert blocks.grow(table, 8)
    before = list(table)
    assert not blocks.grow(table, 17)
    assert table == before
    assert blocks.num_free == 1


def test_the_padding_block_is_never_handed_out():
    blocks = BlockManager(num_blocks=5, block_size=1)
    table: list[int] = []
    assert blocks.grow(table, 5)
    assert sorted(table) == [1, 2, 3, 4, 5]
    assert PADDING_BLOCK not in table


def test_free_blocks_are_reused_least_recently_used_first_and_heads_of_tables_last():
    blocks = BlockManager(num_blocks=4, block_size=1)
    old, new = [], []
    blocks.grow(old, 2)
    blocks.grow(new, 2)
    old_blocks, new_blocks = list(old), list(new)
    blocks.release(old)
    blocks.release(new)
    reused: list[int] = []
    blocks.grow(reused, 4)
    assert reused == [*reversed(old_blocks), *reversed(new_blocks)]


def test_a_shared_block_is_free_only_when_everyone_let_go():
    blocks = BlockManager(num_blocks=2, block_size=4)
    first: list[int] = []
    blocks.grow(first, 4)
    second = [blocks.share(first[0])]
    blocks.release(first)
    assert blocks.num_free == 1
    blocks.release(second)
    assert blocks.num_free == 2


def test_a_free_block_can_be_taken_back_with_its_contents():
    blocks = BlockManager(num_blocks=2, block_size=4)
    table: list[int] = []
    blocks.grow(table, 4)
    [block] = table
    blocks.release(table)
    again = [blocks.share(block)]
    other: list[int] = []
    assert blocks.grow(other, 4)
    assert other != [block]
    assert not blocks.grow([], 4)
    blocks.release(again)
    blocks.release(other)
    assert blocks.num_free == 2


def test_giving_a_block_back_twice_is_a_broken_invariant():
    blocks = BlockManager(num_blocks=2, block_size=4)
    table: list[int] = []
    blocks.grow(table, 4)
    copy = list(table)
    blocks.release(table)
    with pytest.raises(AssertionError, match="given back twice"):
        blocks.release(copy)
