"""Which of several equal servers a request goes to: the one that has computed its beginning, unless it is too busy.

    routing = PrefixRouting(num_replicas=2)
    replica = routing.choose(text, loads=[3, None])     # requests in flight on each; None: not to be used

Pure Python. A request's text is cut into pieces, and every piece is known by all the text up to its end. Each replica
is remembered with the pieces that were sent to it lately, which is roughly what its prefix cache holds. The longest
beginning wins if it is half of the text and its replica is not far busier than the idlest one; otherwise the idlest.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["PrefixRouting"]


class PrefixRouting:
    """piece: characters; remembered: pieces kept for each replica; max_imbalance: requests more than the idlest has."""

    def __init__(
        self, num_replicas: int, *, piece: int = 128, remembered: int = 50_000, max_imbalance: int = 8
    ) -> None:
        self._piece, self._remembered, self._max_imbalance = piece, remembered, max_imbalance
        self._sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._next = 0

    def choose(self, text: str, loads: Sequence[int | None]) -> int | None:
        """Returns the replica and remembers it for this text; None where no replica can be used."""
        usable = [index for index, load in enumerate(loads) if load is not None]
        if not usable:
            return None
        pieces = self._pieces(text)
        known = {index: self._known(index, pieces) for index in usable}
        load_of = {index: load for index, load in enumerate(loads) if load is not None}
        least = min(load_of.values())
        warm = [
            index
            for index in usable
            if known[index] * 2 >= max(len(pieces), 1) and load_of[index] - least <= self._max_imbalance
        ]
        if warm:
            chosen = max(warm, key=lambda index: (known[index], -load_of[index]))
        else:  # of equally idle ones each in turn
            idle = [index for index in usable if load_of[index] == least]
            chosen = next((index for index in idle if index >= self._next), idle[0])
            self._next = chosen + 1
        self._remember(chosen, pieces)
        return chosen

    def forget(self, replica: int) -> None:
        """The replica's cache is empty: it was restarted, or has other weights."""
        self._sent[replica].clear()

    def _pieces(self, text: str) -> list[bytes]:
        digest, found = hashlib.blake2b(digest_size=12), []
        for start in range(0, len(text) - self._piece + 1, self._piece):
            digest.update(text[start : start + self._piece].encode("utf-8", "surrogatepass"))
            found.append(digest.digest())
        return found

    def _known(self, replica: int, pieces: list[bytes]) -> int:
        sent = self._sent[replica]
        count = 0
        for piece in pieces:
            if piece not in sent:
                break
            count += 1
        return count

    def _remember(self, replica: int, pieces: list[bytes]) -> None:
        sent = self._sent[replica]
        for piece in reversed(pieces):  # the beginning is forgotten last
            sent[piece] = None
            sent.move_to_end(piece)
        while len(sent) > self._remembered:
            sent.popitem(last=False)
