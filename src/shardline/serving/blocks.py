"""Who owns which block of the KV cache, and what it holds. Pure Python: it moves block numbers, never memory.

    blocks = BlockManager(num_blocks=128, block_size=16)
    table: list[int] = []
    blocks.grow(table, num_tokens=40)      # True: the table now names 3 blocks; False: nothing changed
    blocks.release(table)                  # gives them back, last block first

A block table is append-only: token `p` of a sequence always lives in block `table[p // block_size]`. A block may
stand in several tables; it is free again when the last of them lets go. Free blocks are handed out least recently used
first, and a table's tail is given back before its head, so that the blocks most worth keeping (the beginnings of
prompts) are overwritten last. Block 0 is never handed out: it pads tables and stays zero.

**Prefix cache.** A full block whose keys and values are computed can be remembered, and keeps its contents while it is
free, until it is handed out again:

    hits = blocks.match(token_ids, root)            # the longest remembered beginning: block numbers, never all tokens
    blocks.begin(table, hits, num_tokens=40)        # takes them and grows to the rest, or changes nothing
    chain = blocks.remember(table, chain, token_ids, num_computed_tokens=40, root=root)

What a block holds depends on every token before it, so blocks form chains: a block is looked up by its predecessor's
identity and its own tokens, both compared in full, and an identity is never used twice. Beginnings that differ can't
be taken for each other, whatever their hashes. `root` tells apart what is not in the tokens (a LoRA adapter).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import count

__all__ = ["PADDING_BLOCK", "BlockManager", "Chain"]

PADDING_BLOCK = 0

_Key = tuple[Hashable, tuple[int, ...]]  # (identity of what comes before, or the root; the block's own tokens)
Chain = list[int]
"""Identities of a sequence's first blocks, as far as they are remembered."""


class BlockManager:
    """Reference counts, a free list and a prefix cache over blocks 1 to `num_blocks`."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, num_blocks
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * (num_blocks + 1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._remembered: dict[_Key, tuple[int, int]] = {}  # -> (block, identity)
        self._key_of: dict[int, _Key] = {}
        self._identities = count()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that the prefix cache remembers, in use or free."""
        return len(self._key_of)

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
            self._forget(block)
            self._references[block] = 1
            table.append(block)
        return True

    def begin(self, table: list[int], hits: Sequence[int], num_tokens: int) -> bool:
        """Fills an empty table with `hits` and fresh blocks for the rest of `num_tokens`: all, or none and False."""
        assert not table, table
        idle = sum(self._references[block] == 0 for block in hits)
        if self.blocks_for(num_tokens) - len(hits) > len(self._free) - idle:
            return False
        table.extend(self.share(block) for block in hits)
        return self.grow(table, num_tokens)

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

    def match(self, token_ids: Sequence[int], root: Hashable = None) -> tuple[list[int], Chain]:
        """Returns the blocks of the longest remembered beginning, and their chain.

        The last token is never part of it: its row has to be computed for there to be logits.
        """
        hits: list[int] = []
        chain: Chain = []
        size = self.block_size
        before: Hashable = (root,)
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            found = self._remembered.get((before, tuple(token_ids[start : start + size])))
            if found is None:
                break
            block, before = found
            hits.append(block)
            chain.append(found[1])
        return hits, chain

    def remember(
        self,
        table: Sequence[int],
        chain: Chain,
        token_ids: Sequence[int],
        *,
        num_computed_tokens: int,
        root: Hashable = None,
    ) -> None:
        """Remembers the table's blocks that are full of computed tokens, and extends `chain` by them.

        A block whose contents another one holds already is not remembered, but what follows it is.
        """
        size = self.block_size
        for index in range(len(chain), num_computed_tokens // size):
            key = (chain[-1] if chain else (root,), tuple(token_ids[index * size : (index + 1) * size]))
            found = self._remembered.get(key)
            if found is None:
                found = table[index], next(self._identities)
                self._remembered[key] = found
                self._key_of[table[index]] = key
            chain.append(found[1])

    def forget(self, table: Sequence[int]) -> None:
        """Takes the table's blocks out of the prefix cache: what they hold is not to be used again."""
        for block in table:
            self._forget(block)

    def forget_all(self) -> None:
        """Empties the prefix cache; blocks in use stay in use."""
        self._remembered.clear()
        self._key_of.clear()

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._remembered[key]
