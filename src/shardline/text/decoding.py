"""The bytes of each token, worked out from what `tokenizers` calls the decoder of a vocabulary.

Byte-level BPE writes each byte as one printable character (GPT-2's alphabet); the SentencePiece kind writes a
space as U+2581 and may fall back to tokens such as <0x0A> for a byte. Tokens that were added (special or not)
stand for their own text. Some decoders drop the space that the tokenizer put before the first word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from shardline.config.errors import UsageError

__all__ = ["BYTE_OF_CHARACTER", "TokenDecoding", "read_decoding"]

_METASPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: a printable Latin-1 byte is itself, the others are U+0100 onwards, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + n): byte for n, byte in enumerate(others)})
    return dict(sorted(table.items(), key=lambda item: item[1]))


BYTE_OF_CHARACTER: dict[str, int] = _byte_of_character()


@dataclass(kw_only=True)
class TokenDecoding:
    """How ids of one vocabulary become bytes.

    `leading_space` is what happens to a space before the first token: kept, one dropped, or (the Metaspace
    decoder) every space of the first token dropped.
    """

    kind: Literal["byte-level", "metaspace"]
    leading_space: Literal["keep", "drop one", "drop all"]
    added: dict[int, str]
    special_ids: frozenset[int]
    backend: Any = field(repr=False)
    cache: dict[int, bytes] = field(default_factory=dict, repr=False)

    def token_bytes(self, id: int) -> bytes:
        """Returns the bytes of one token, with the space before a first word; b"" for an id with no token."""
        found = self.cache.get(id)
        if found is None:
            found = self.cache[id] = self._token_bytes(id)
        return found

    def join(self, ids: Iterable[int]) -> bytes:
        """Returns the bytes of a sequence, its leading space treated as the vocabulary's decoder does."""
        pieces = [self.token_bytes(id) for id in ids]
        if self.leading_space == "drop all" and pieces:
            pieces[0] = pieces[0].replace(b" ", b"")
        text = b"".join(pieces)
        return text[1:] if self.leading_space == "drop one" and text[:1] == b" " else text

    def _token_bytes(self, id: int) -> bytes:
        token = self.added.get(id)
        if token is not None:
            return token.encode()
        token = self.backend.id_to_token(id) if 0 <= id < 1 << 32 else None
        if token is None:
            return b""
        if self.kind == "byte-level":
            codes = [BYTE_OF_CHARACTER.get(character) for character in token]
            return token.encode() if None in codes else bytes(codes)  # type: ignore[arg-type]
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_METASPACE, " ").encode()


def read_decoding(backend: Any, name: str) -> TokenDecoding:
    """Returns how ids of `backend`, a `tokenizers.Tokenizer`, become bytes; `UsageError` for other kinds."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    types = {step["type"] for step in steps}
    leading_space: Literal["keep", "drop one", "drop all"] = "keep"
    kind: Literal["byte-level", "metaspace"]
    if "ByteLevel" in types:
        kind = "byte-level"
    elif "Metaspace" in types or any(_replaces_metaspace(step) for step in steps):
        kind = "metaspace"
        for step in steps:
            if step["type"] == "Strip" and step["content"] == " " and step["start"]:
                leading_space = "drop one"
            if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
                leading_space = "drop all"
    else:
        raise UsageError(
            f"{name}: its vocabulary is decoded by {', '.join(sorted(types))}; Shardline reads byte-level "
            "BPE and SentencePiece vocabularies, which every supported model family uses."
        )
    added = backend.get_added_tokens_decoder()
    return TokenDecoding(
        kind=kind,
        leading_space=leading_space,
        added={id: token.content for id, token in added.items()},
        special_ids=frozenset(id for id, token in added.items() if token.special),
        backend=backend,
    )


def _replaces_metaspace(step: dict[str, Any]) -> bool:
    return step["type"] == "Replace" and step.get("pattern", {}).get("String") == _METASPACE
