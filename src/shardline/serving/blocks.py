"""Who owns which block of the KV cache. Pure Python: it moves block numbers, never memory.

    blocks = BlockManager(num_blocks=128, block_size=16)
    table: list[int] = []
    blocks.grow(table, num_tokens=40)      # True: the table now names 3 blocks; False: nothing changed
    blocks.release(table)                  # gives them back, last block first

A block table is append-only: token `p` of a sequence always lives in block `table[p // block_size]`. A block may
stand in several tables (`share`); it is free again when the last of them lets go. Free blocks are handed out
least recently used first, and a table's tail is given back before its head, so that the blocks most worth keeping
(the beginnings of prompts) are overwritten last. Block 0 is never handed out: it pads tables and stays zero.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["PADDING_BLOCK", "BlockManager"]

PADDING_BLOCK = 0


class BlockManager:
    """Reference counts and a free list over blocks 1 to `num_blocks`."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, num_blocks
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * (num_blocks + 1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Returns how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def grow(self, table: list[int], num_tokens: int) -> bool:
        """Appends blocks to `table` until it holds `num_tokens` tokens: all of them, or none and False."""
        num_missing = self.blocks_for(num_tokens) - len(table)
        if num_missing > len(self._free):
            return False
        for _ in range(num_missing):
            block, _ = self._free.popitem(last=False)
            self._references[block] = 1
            table.append(block)
        return True

    def share(self, block: int) -> int:
        """Takes one more reference to `block`, in use or free with its contents intact, and returns it."""
        assert 0 < block <= self.num_blocks, block
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1
        return block

    def release(self, table: list[int]) -> None:
        """Drops the table's reference to each of its blocks and empties the table."""
        while table:
            block = table.pop()
            assert self._references[block] > 0, f"block {block} was given back twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
