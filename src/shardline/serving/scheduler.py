"""Which tokens the next step computes. Pure Python, one rule, no separate prefill and decode:

    every sequence knows `num_tokens` tokens and has computed `num_computed_tokens` of them;
    a step computes up to `num_tokens - num_computed_tokens` of each, within a budget of tokens.

Running sequences come first, then waiting ones, both by priority and then by arrival. A prompt longer than what is left
of the budget is computed in chunks; a sequence that has caught up samples one token, knows one more, and is chased
again. So one step mixes chunks of prompts with single tokens of running replies. Guessed tokens (speculation) are
computed after the known ones where budget and blocks allow, and never at another sequence's cost.

A sequence is admitted when there are blocks for every token that it knows, so a prompt is never evicted half-read; what
the prefix cache holds of it counts as computed. When a running sequence needs a block and none is free, the last
running sequence of that order is preempted: it gives its blocks back and waits to be computed again. The first is never
preempted, so work always goes on, and among equals running and waiting together stay in order of arrival, which is why
nothing starves.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from shardline.serving.blocks import BlockManager
from shardline.serving.sequence import Sequence

__all__ = ["Chunk", "Schedule", "Scheduler"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """`num_tokens` tokens of one sequence, from `start` on; the last `num_drafts` of them are guesses.

    samples   the last known token and every guess predict a token
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    num_drafts: int = 0


@dataclass(slots=True)
class Schedule:
    """What one step computes."""

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0


class Scheduler:
    """Holds the sequences and their blocks; `schedule`, then `advance` for what was computed."""

    def __init__(
        self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, prefix_caching: bool = True
    ) -> None:
        assert max_num_seqs > 0, max_num_seqs
        assert max_num_batched_tokens > 0, max_num_batched_tokens
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []  # both in order
        self.waiting: list[Sequence] = []
        self.num_preemptions = 0
        self.num_queried_tokens = 0  # of the prefix cache
        self.num_hit_tokens = 0
        self._prefix_caching = prefix_caching
        self._sequences: dict[str, Sequence] = {}
        self._num_arrived = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence. It must fit in an empty cache, or it could wait for ever."""
        assert sequence.request_id not in self._sequences, sequence.request_id
        assert self.blocks.blocks_for(sequence.max_num_tokens) <= self.blocks.num_blocks, sequence.request_id
        sequence.order = (sequence.request.priority, self._num_arrived)
        self._num_arrived += 1
        self._sequences[sequence.request_id] = sequence
        insort(self.waiting, sequence, key=_order)

    def remove(self, request_id: str) -> Sequence | None:
        """Forgets a sequence in whatever state it is and frees its blocks; None if it is not here (any more)."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        (self.running if sequence.running else self.waiting).remove(sequence)
        self.blocks.release(sequence.block_table)
        sequence.running = False
        return sequence

    def preempt_all(self) -> None:
        """Sends every running sequence back to wait with what it knows; nothing that is computed is kept."""
        while self.running:
            self._preempt(self.running.pop())

    def sharing(self, blocks: set[int]) -> list[Sequence]:
        """Returns the sequences whose tables name any of these blocks."""
        return [sequence for sequence in self.running if not blocks.isdisjoint(sequence.block_table)]

    def reserve(self, sequence: Sequence, num_drafts: int) -> int:
        """Gives a running sequence blocks for guesses, while any are free; returns for how many there is room."""
        num_drafts = min(num_drafts, sequence.max_num_tokens - sequence.num_tokens - 1)
        while num_drafts > 0 and not self.blocks.grow(sequence.block_table, sequence.num_tokens + num_drafts):
            num_drafts -= 1
        return max(num_drafts, 0)

    def schedule(self) -> Schedule:
        """Returns the chunks of the next step, decode rows and prompt chunks alike, with their blocks allocated."""
        step = Schedule()
        position = 0
        while position < len(self.running) and step.num_tokens < self.max_num_batched_tokens:
            sequence = self.running[position]
            if self._make_room(sequence, step):
                # Those behind it get their one token before it gets its guesses.
                self._take(sequence, step, reserved=len(self.running) - position - 1)
                position += 1
        if not step.preempted:
            self._admit(step)
        return step

    def advance(self, chunk: Chunk, *, num_rejected: int = 0) -> None:
        """Notes that a chunk was computed, and of how many of its guesses no use can be made."""
        sequence = chunk.sequence
        sequence.num_computed_tokens += chunk.num_tokens - num_rejected
        self._remember(sequence, sequence.num_computed_tokens)

    def _remember(self, sequence: Sequence, num_computed_tokens: int) -> None:
        if self._prefix_caching:
            self.blocks.remember(
                sequence.block_table,
                sequence.chain,
                sequence.token_ids,
                num_computed_tokens=num_computed_tokens,
                root=sequence.root,
            )

    def _admit(self, step: Schedule) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs and step.num_tokens < self.max_num_batched_tokens:
            sequence = self.waiting[0]
            reads = self._prefix_caching and sequence.reads_cache
            hits, chain = self.blocks.match(sequence.token_ids, sequence.root) if reads else ([], [])
            if not self.blocks.begin(sequence.block_table, hits, sequence.num_tokens):
                return
            self.waiting.pop(0)
            sequence.chain = chain
            sequence.num_computed_tokens = sequence.num_draft_computed_tokens = len(hits) * self.blocks.block_size
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = sequence.num_computed_tokens
                self.num_queried_tokens += sequence.num_tokens if reads else 0
                self.num_hit_tokens += sequence.num_computed_tokens
            sequence.running = True
            insort(self.running, sequence, key=_order)
            self._take(sequence, step)

    def _take(self, sequence: Sequence, step: Schedule, *, reserved: int = 0) -> None:
        start = sequence.num_computed_tokens
        budget = self.max_num_batched_tokens - step.num_tokens
        num_missing = sequence.num_tokens - start
        num_tokens = min(num_missing, budget)
        assert num_tokens > 0, sequence.request_id
        num_drafts = 0
        if num_tokens == num_missing:
            num_drafts = max(0, min(len(sequence.draft_token_ids), budget - num_tokens - reserved))
        del sequence.draft_token_ids[num_drafts:]
        # Already now: a step writes all keys and values of a layer before it reads any, so of several requests that
        # begin alike and come together the later ones can read what the first one computes in this very step.
        self._remember(sequence, start + num_tokens)
        num_tokens += num_drafts
        step.chunks.append(
            Chunk(sequence, start, num_tokens, samples=start + num_tokens >= sequence.num_tokens, num_drafts=num_drafts)
        )
        step.num_tokens += num_tokens

    def _make_room(self, sequence: Sequence, step: Schedule) -> bool:
        """Gives `sequence` its blocks, preempting from the last on; False if it had to go itself."""
        while not self.blocks.grow(sequence.block_table, sequence.num_tokens):
            victim = self.running.pop()
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is sequence:
                return False
        room = len(sequence.block_table) * self.blocks.block_size - sequence.num_tokens
        if len(sequence.draft_token_ids) > room:
            del sequence.draft_token_ids[max(room, self.reserve(sequence, len(sequence.draft_token_ids))) :]
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.block_table)
        sequence.restart()
        sequence.running = False
        insort(self.waiting, sequence, key=_order)
        self.num_preemptions += 1


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
