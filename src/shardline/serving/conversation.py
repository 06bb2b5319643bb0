"""A conversation with an engine in this process: keeps the history, streams replies, stops on Ctrl-C.

conversation = Conversation(engine, sampling={"temperature": 0.0, "max_tokens": 256})
turn = conversation.ask("Hello", on_text=lambda piece: print(piece, end=""))
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from shardline.serving.engine import Engine
from shardline.serving.errors import GenerationFailedError
from shardline.serving.requests import Request, RequestOutput, SamplingParams

__all__ = ["Conversation", "Turn"]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One reply and what it took; `finish_reason` is "interrupted" where Ctrl-C ended it."""

    reply: str
    finish_reason: str
    num_prompt_tokens: int
    num_tokens: int
    ttft_s: float
    tokens_per_s: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        """Returns one line for people."""
        speed = "" if self.tokens_per_s is None else f", {self.tokens_per_s:.1f} tokens/s"
        cut = {"length": ", cut at the limit", "interrupted": ", interrupted"}.get(self.finish_reason, "")
        return f"[{self.num_tokens} tokens, first after {self.ttft_s:.2f} s{speed}{cut}]"


class Conversation:
    """Messages so far and an engine to answer them. `sampling` are fields of `SamplingParams`."""

    def __init__(self, engine: Engine, *, sampling: dict[str, Any], system: str | None = None) -> None:
        self._engine = engine
        self._sampling = SamplingParams(**sampling)
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._ids = (f"turn-{number}" for number in itertools.count())
        self.messages: list[dict[str, Any]] = list(self._opening)

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = list(self._opening)

    def ask(self, text: str, *, on_text: Callable[[str], None] | None = None) -> Turn:
        """Returns the reply to one more message of the user's. Raises `ServingError` where it can't be answered."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._engine.tokenizer.encode_chat(messages, add_generation_prompt=True)
        request = Request(request_id=next(self._ids), prompt_token_ids=tuple(prompt), sampling=self._sampling)
        answer = RequestOutput(request_id=request.request_id, num_prompt_tokens=len(prompt))
        started_s = time.monotonic()
        self._engine.add_request(request)
        interrupted = False
        try:
            while not answer.finished:
                for output in self._engine.step():
                    answer.extend(output)
                    if output.text and on_text is not None:
                        on_text(output.text)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self._engine.abort(request.request_id)
        if answer.error is not None:
            raise GenerationFailedError(answer.error)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return _turn(answer, started_s, interrupted=interrupted)


def _turn(answer: RequestOutput, started_s: float, *, interrupted: bool) -> Turn:
    ended_s = time.monotonic()
    times = answer.timeline
    first_s = times.first_token_s if times is not None and times.first_token_s is not None else ended_s
    last_s = times.last_token_s if times is not None and times.last_token_s is not None else ended_s
    num_tokens = len(answer.token_ids)
    return Turn(
        reply=answer.text,
        finish_reason="interrupted" if interrupted else str(answer.finish_reason),
        num_prompt_tokens=answer.num_prompt_tokens,
        num_tokens=num_tokens,
        ttft_s=first_s - started_s,
        tokens_per_s=(num_tokens - 1) / (last_s - first_s) if last_s > first_s else None,
    )
