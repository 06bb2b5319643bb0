"""A request on its way through the engine: the tokens it knows, how many are computed, and the blocks they live in."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

from shardline.serving.blocks import Chain
from shardline.serving.requests import Request, Timeline, TopLogprobs

__all__ = ["Sequence"]


class Sequence:
    """The mutable state of one request. `max_num_tokens` bounds prompt and reply together.

    draft_token_ids    guesses of what follows, computed in the next step and kept as far as they are right
    chain              the prefix cache's identities of the table's first blocks
    edits              the sampler's notes on what the request changes in its logits
    num_cached_tokens  of the prompt, found in the prefix cache when it was first admitted; None: not admitted yet
    """

    __slots__ = (
        "block_table",
        "chain",
        "draft_token_ids",
        "edits",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_draft_computed_tokens",
        "num_prompt_tokens",
        "order",
        "pooled",
        "prompt_logprobs",
        "prompt_top_logprobs",
        "request",
        "rng",
        "running",
        "timeline",
        "token_ids",
    )

    def __init__(self, request: Request, *, max_num_tokens: int, arrived_s: float) -> None:
        self.request = request
        self.token_ids = list(request.prompt_token_ids)
        self.draft_token_ids: list[int] = []
        self.num_prompt_tokens = len(self.token_ids)
        self.max_num_tokens = max_num_tokens
        self.num_computed_tokens = 0
        self.num_draft_computed_tokens = 0  # by the draft model
        self.num_cached_tokens: int | None = None
        self.block_table: list[int] = []
        self.chain: Chain = []
        self.running = False
        self.order = (request.priority, 0)  # the scheduler adds the number of arrival
        # One generator a request, drawn from once a sampled token: what else is in the batch can't move it.
        self.rng = random.Random(request.sampling.seed)
        self.prompt_logprobs: list[float | None] = []
        self.prompt_top_logprobs: list[TopLogprobs] = []
        self.pooled: list[float] = []  # sums over the prompt's hidden states so far, or the last of them
        self.edits: Any = None
        self.timeline = Timeline(arrived_s=arrived_s)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_output_tokens(self) -> int:
        return self.max_num_tokens - self.num_prompt_tokens

    @property
    def root(self) -> Hashable:
        """What keys and values depend on beside the tokens."""
        return self.request.adapter

    @property
    def reads_cache(self) -> bool:
        """Whether a remembered beginning is of use: not where every position's hidden state is asked for."""
        return self.request.sampling.prompt_logprobs is None and self.request.pooling != "mean"

    def tokens(self, start: int, num_tokens: int) -> list[int]:
        """Returns known tokens and then guessed ones, from `start` on."""
        end = start + num_tokens
        if end <= len(self.token_ids):
            return self.token_ids[start:end]
        return (self.token_ids + self.draft_token_ids)[start:end]

    def restart(self) -> None:
        """Forgets what was computed; the blocks must have been given back."""
        self.num_computed_tokens = self.num_draft_computed_tokens = 0
        self.chain = []
        self.draft_token_ids = []

    def __repr__(self) -> str:
        return f"Sequence({self.request_id!r}, {self.num_computed_tokens}/{self.num_tokens} tokens computed)"
