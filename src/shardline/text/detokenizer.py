"""Token ids to text, one at a time, as a server streams them.

    detokenizer = Detokenizer(tokenizer)
    for id in ids:
        print(detokenizer.append(id), end="")
    print(detokenizer.flush())

What has been returned is never taken back, a character is never split, each step costs the length of its
token, and the pieces together are exactly `tokenizer.decode(ids)`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from shardline.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """Incremental decoding of one sequence.

    With `after`, the ids of a prompt, the text is what follows that prompt: a vocabulary whose decoder drops
    the space before the first word then keeps the space before the reply.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> None:
        self._decoding = tokenizer.decoding
        self._hidden = self._decoding.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = all(id in self._hidden for id in after)

    def append(self, id: int) -> str:
        """Returns the text that `id` completes: "" for a part of a character and for a skipped token."""
        if id in self._hidden:
            return ""
        piece = self._decoding.token_bytes(id)
        if self._at_start:
            self._at_start = self._decoding.leading_space == "drop one" and not piece
            piece = self._decoding.join([id])
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """Returns U+FFFD when the last character is incomplete, else "". A second call returns ""."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text
