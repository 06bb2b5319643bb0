"""The text of one reply as it grows: whole characters only, and nothing that may still become a stop string.

    reply = ReplyText(tokenizer, sampling, prompt_token_ids=ids)
    shown = reply.append(token)       # text that is safe to show; reply.stop is the stop string once one is complete
    shown += reply.flush()            # what was held back, when the reply ends for another reason

Stop strings are found wherever tokens are cut; the first to begin wins, and of those the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardline.serving.requests import SamplingParams
from shardline.text.detokenizer import Detokenizer
from shardline.text.tokenizer import Tokenizer

__all__ = ["ReplyText"]


class ReplyText:
    """Detokenises one reply and watches for its stop strings."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, *, prompt_token_ids: Sequence[int] = ()) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=sampling.skip_special_tokens, after=prompt_token_ids
        )
        self._stops = sampling.stop
        self._include_stop = sampling.include_stop_str_in_output
        self._held = ""  # the longest end of the text that a stop string could begin with
        self.stop: str | None = None

    def append(self, token_id: int, *, may_stop: bool = True) -> str:
        """Returns the text that may now be shown. `may_stop=False` lets stop strings pass (before min_tokens)."""
        return self._push(self._detokenizer.append(token_id), may_stop=may_stop)

    def flush(self) -> str:
        """Returns what was held back; call it once, when the reply ends without a stop string."""
        text = self._push(self._detokenizer.flush(), may_stop=True)
        held, self._held = self._held, ""
        return text + ("" if self.stop else held)

    def _push(self, new: str, *, may_stop: bool) -> str:
        if not self._stops:
            return new
        text, self._held = self._held + new, ""
        if not may_stop:
            return text
        found = [(text.find(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            begin, _, self.stop = min(found)
            return text[: begin + len(self.stop)] if self._include_stop else text[:begin]
        keep = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held = text[keep:]
        return text[:keep]


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
