"""Tokenised documents into rows of one length.

    for rows in pack(documents, sequence_length=512):
        rows.tokens_RT, rows.targets_RT, rows.documents_RT

Text fills rows end to end, and a document that does not fit goes on in the next row. A chat that fits in one row is
kept whole: where the rest of a row is too short for it, that rest is padding. The target of a token is the next token
of the same document, also where that stands in the next row; no target crosses into another document. Attention
sees one row only, so positions count from the document's first token *in the row*.

Shapes: R rows, T tokens a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

__all__ = ["IGNORED", "PADDING", "PackedRows", "TokenizedDocument", "pack", "positions_of"]

IGNORED = -100
PADDING = -1
_BLOCK_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class TokenizedDocument:
    """Ids [N]; `said` [N] marks the tokens to learn (None: all of them); `whole`: don't split it if it fits."""

    ids: np.ndarray
    said: np.ndarray | None = None
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """int32 arrays [R, T]. `documents_RT` counts the documents inside a row from 0; PADDING where there is none."""

    tokens_RT: np.ndarray
    targets_RT: np.ndarray
    documents_RT: np.ndarray


def pack(documents: Iterable[TokenizedDocument], *, sequence_length: int) -> Iterator[PackedRows]:
    """Yields blocks of rows that hold every token of every document, in order; the last row is padded.

    A row without a single target is left out, since there is nothing to learn from it.
    """
    block = _empty_block(sequence_length)
    row = column = document_in_row = 0

    def advance() -> Iterator[PackedRows]:
        nonlocal block, row, column, document_in_row
        row, column, document_in_row = row + 1, 0, 0
        if row == _BLOCK_ROWS:
            yield from _with_targets(block)
            block, row = _empty_block(sequence_length), 0

    for document in documents:
        targets = _targets(document)
        length = len(document.ids)
        if document.whole and sequence_length - column < length <= sequence_length:
            yield from advance()
        start = 0
        while start < length:
            stop = min(length, start + sequence_length - column)
            place = slice(column, column + stop - start)
            block.tokens_RT[row, place] = document.ids[start:stop]
            block.targets_RT[row, place] = targets[start:stop]
            block.documents_RT[row, place] = document_in_row
            column, document_in_row, start = place.stop, document_in_row + 1, stop
            if column == sequence_length:
                yield from advance()
    yield from _with_targets(block)


def positions_of(documents_RT: np.ndarray) -> np.ndarray:
    """Returns int64 [R, T]: how far each token stands from its document's first token in the row."""
    columns = np.arange(documents_RT.shape[1])
    starts = np.ones(documents_RT.shape, dtype=bool)
    starts[:, 1:] = documents_RT[:, 1:] != documents_RT[:, :-1]
    return columns - np.maximum.accumulate(np.where(starts, columns, 0), axis=1)


def _targets(document: TokenizedDocument) -> np.ndarray:
    targets = np.full(len(document.ids), IGNORED, dtype=np.int32)
    targets[:-1] = document.ids[1:]
    if document.said is not None:
        targets[:-1][~document.said[1:]] = IGNORED
    return targets


def _empty_block(sequence_length: int) -> PackedRows:
    shape = (_BLOCK_ROWS, sequence_length)
    return PackedRows(
        tokens_RT=np.zeros(shape, dtype=np.int32),
        targets_RT=np.full(shape, IGNORED, dtype=np.int32),
        documents_RT=np.full(shape, PADDING, dtype=np.int32),
    )


def _with_targets(block: PackedRows) -> Iterator[PackedRows]:
    kept = (block.targets_RT != IGNORED).any(axis=1)
    if kept.any():
        yield PackedRows(
            tokens_RT=block.tokens_RT[kept],
            targets_RT=block.targets_RT[kept],
            documents_RT=block.documents_RT[kept],
        )
