"""Guesses of what a reply says next, which the model then checks in one step (speculative decoding).

    drafter = PromptLookup(longest=4)                       # n-grams of the sequence itself
    drafter = DraftModel(runner, scheduler)                 # a smaller model, on the same block tables
    drafter.propose(sequences, 4)                           # fills sequence.draft_token_ids

A guess is kept while it equals what the model samples at its place, which is exact for greedy and for random replies: a
proposal without randomness of its own is accepted with the target's own probability (Leviathan et al., 2023,
arXiv:2211.17192; prompt lookup: Saxena, 2023). A wrong guess costs its row of the step and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from shardline.serving.runner import Runner
from shardline.serving.scheduler import Chunk, Scheduler
from shardline.serving.sequence import Sequence

__all__ = ["DraftModel", "Drafter", "PromptLookup"]


class Drafter(Protocol):
    """Guesses; `sequences` are running and have one known token left to compute."""

    def propose(self, sequences: Items[Sequence], count: int) -> None:
        """Sets `draft_token_ids` of each, at most `count` tokens."""
        ...

    def forget(self, request_id: str) -> None:
        """Drops what is kept of a sequence that has ended."""
        ...


class PromptLookup:
    """What followed the last few tokens when they last occurred, the longest match first."""

    def __init__(self, scheduler: Scheduler, *, longest: int = 4) -> None:
        assert longest > 0, longest
        self._scheduler = scheduler
        self._longest = longest
        # of each sequence: tokens indexed so far, and n-gram -> where it last ended
        self._seen: dict[str, tuple[int, dict[tuple[int, ...], int]]] = {}

    def propose(self, sequences: Items[Sequence], count: int) -> None:
        for sequence in sequences:
            end = self._find(sequence)
            if end is not None:
                room = self._scheduler.reserve(sequence, count)
                sequence.draft_token_ids = sequence.token_ids[end : end + room]

    def forget(self, request_id: str) -> None:
        self._seen.pop(request_id, None)

    def _find(self, sequence: Sequence) -> int | None:
        """Returns the place after the latest earlier occurrence of the last tokens."""
        tokens, length = sequence.token_ids, sequence.num_tokens
        indexed, index = self._seen.get(sequence.request_id, (0, {}))
        # The n-grams that end with the last token come in only now that others were looked for: none finds itself.
        for end in range(indexed + 1, length):
            for size in range(1, min(self._longest, end) + 1):
                index[tuple(tokens[end - size : end])] = end
        self._seen[sequence.request_id] = (length - 1, index)
        for size in range(min(self._longest, length), 0, -1):
            end = index.get(tuple(tokens[length - size :]))
            if end is not None:
                return end
        return None


class DraftModel:
    """A smaller model that continues each sequence greedily.

    It keeps keys and values of its own in blocks of the same numbers, so that tables, sharing and preemption are the
    target's. Where the prefix cache found a beginning that this model has not computed, its guesses are poor there, and
    only that.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler

    def propose(self, sequences: Items[Sequence], count: int) -> None:
        rooms = []
        for sequence in sequences:
            # Of the last guesses, those that were right are computed; the last of them never was.
            sequence.num_draft_computed_tokens = min(sequence.num_draft_computed_tokens, sequence.num_tokens - 1)
            rooms.append(self._scheduler.reserve(sequence, count))
        for guess in range(count):
            guessing = [sequence for sequence, room in zip(sequences, rooms, strict=True) if room > guess]
            if not guessing:
                return
            if guess == 0:
                for sequence in guessing:
                    self._catch_up(sequence)
            chunks = [
                Chunk(each, each.num_draft_computed_tokens, _reach(each) - each.num_draft_computed_tokens, samples=True)
                for each in guessing
            ]
            for sequence, token in zip(guessing, self._runner.greedy(chunks), strict=True):
                sequence.num_draft_computed_tokens = _reach(sequence)
                sequence.draft_token_ids.append(token)

    def forget(self, request_id: str) -> None:
        """Keeps nothing."""

    def _catch_up(self, sequence: Sequence) -> None:
        """Computes a prompt that is new here in parts of the step's budget, so that memory stays what it was."""
        budget = self._scheduler.max_num_batched_tokens
        while sequence.num_tokens - sequence.num_draft_computed_tokens > budget:
            self._runner.greedy([Chunk(sequence, sequence.num_draft_computed_tokens, budget, samples=False)])
            sequence.num_draft_computed_tokens += budget


def _reach(sequence: Sequence) -> int:
    """Tokens that are known or guessed."""
    return sequence.num_tokens + len(sequence.draft_token_ids)
