"""A request on its way through the engine: the tokens it knows, how many are computed, and the blocks they live in."""

from __future__ import annotations

import random

from shardline.serving.requests import Request, Timeline, TopLogprobs

__all__ = ["Sequence"]


class Sequence:
    """The mutable state of one request. `max_num_tokens` bounds prompt and reply together."""

    __slots__ = (
        "block_table",
        "max_num_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
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
        self.num_prompt_tokens = len(self.token_ids)
        self.max_num_tokens = max_num_tokens
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.running = False
        # One generator a request, drawn from once a sampled token: what else is in the batch can't move it.
        self.rng = random.Random(request.sampling.seed)
        self.prompt_logprobs: list[float | None] = []
        self.prompt_top_logprobs: list[TopLogprobs] = []
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

    def __repr__(self) -> str:
        return f"Sequence({self.request_id!r}, {self.num_computed_tokens}/{self.num_tokens} tokens computed)"
