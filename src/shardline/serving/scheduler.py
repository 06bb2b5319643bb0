"""Which tokens the next step computes. Pure Python, one rule, no separate prefill and decode:

    every sequence knows `num_tokens` tokens and has computed `num_computed_tokens` of them;
    a step computes up to `num_tokens - num_computed_tokens` of each, within a budget of tokens.

Running sequences come first, in order of arrival, then waiting ones, first come first served. A prompt longer than
what is left of the budget is computed in chunks; a sequence that has caught up samples one token, knows one more,
and is chased again. So one step mixes chunks of prompts with single tokens of running replies.

A sequence is admitted when there are blocks for every token that it knows, so a prompt is never evicted half-read.
When a running sequence needs a block and none is free, the youngest running sequence is preempted: it gives its
blocks back and waits, at the front, to be computed again. The oldest is never preempted, so work always goes on.
Running and waiting together stay in order of arrival, which is why nothing starves.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from shardline.serving.blocks import BlockManager
from shardline.serving.sequence import Sequence

__all__ = ["Chunk", "Schedule", "Scheduler"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """`num_tokens` tokens of one sequence, from `start` on; `samples`: the last of them predicts a new token."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class Schedule:
    """What one step computes."""

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0


class Scheduler:
    """Holds the sequences and their blocks; `schedule`, then `advance` for what was computed."""

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        assert max_num_seqs > 0, max_num_seqs
        assert max_num_batched_tokens > 0, max_num_batched_tokens
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self._sequences: dict[str, Sequence] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence. It must fit in an empty cache, or it could wait for ever."""
        assert sequence.request_id not in self._sequences, sequence.request_id
        assert self.blocks.blocks_for(sequence.max_num_tokens) <= self.blocks.num_blocks, sequence.request_id
        self._sequences[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def remove(self, request_id: str) -> Sequence | None:
        """Forgets a sequence in whatever state it is and frees its blocks; None if it is not here (any more)."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        (self.running if sequence.running else self.waiting).remove(sequence)
        self.blocks.release(sequence.block_table)
        sequence.running = False
        return sequence

    def schedule(self) -> Schedule:
        """Returns the chunks of the next step, decode rows and prompt chunks alike, with their blocks allocated."""
        step = Schedule()
        position = 0
        while position < len(self.running) and step.num_tokens < self.max_num_batched_tokens:
            sequence = self.running[position]
            if self._make_room(sequence, step):
                self._take(sequence, step)
                position += 1
        if not step.preempted:
            self._admit(step)
        return step

    def advance(self, chunk: Chunk) -> None:
        """Notes that a chunk was computed."""
        chunk.sequence.num_computed_tokens += chunk.num_tokens

    def _admit(self, step: Schedule) -> None:
        while (
            self.waiting
            and len(self.running) < self.max_num_seqs
            and step.num_tokens < self.max_num_batched_tokens
            and self.blocks.grow(self.waiting[0].block_table, self.waiting[0].num_tokens)
        ):
            sequence = self.waiting.popleft()
            sequence.running = True
            self.running.append(sequence)
            self._take(sequence, step)

    def _take(self, sequence: Sequence, step: Schedule) -> None:
        start = sequence.num_computed_tokens
        num_missing = sequence.num_tokens - start
        num_tokens = min(num_missing, self.max_num_batched_tokens - step.num_tokens)
        assert num_tokens > 0, sequence.request_id
        step.chunks.append(Chunk(sequence, start, num_tokens, samples=num_tokens == num_missing))
        step.num_tokens += num_tokens

    def _make_room(self, sequence: Sequence, step: Schedule) -> bool:
        """Gives `sequence` its blocks, preempting from the youngest on; False if it had to go itself."""
        while not self.blocks.grow(sequence.block_table, sequence.num_tokens):
            victim = self.running.pop()
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.block_table)
        sequence.num_computed_tokens = 0
        sequence.running = False
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1
