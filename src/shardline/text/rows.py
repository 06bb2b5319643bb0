"""Packed rows on disk: a folder with tokens.npy, targets.npy and documents.npy, int32 [R, T] each, read by mapping
them into memory. `RowWriter` appends blocks of rows, so that no more than a block is ever held.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardline.text.packing import PackedRows, positions_of

__all__ = ["Batch", "PackedDataset", "RowWriter"]

_NAMES = ("tokens", "targets", "documents")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B rows of T tokens. targets: -100 is ignored; documents: index inside the row, -1 is padding."""

    tokens_BT: np.ndarray
    targets_BT: np.ndarray
    documents_BT: np.ndarray
    positions_BT: np.ndarray


class PackedDataset:
    """The rows of one split, mapped into memory; `summary` says what they were made of."""

    def __init__(self, folder: Path, *, sequence_length: int, summary: dict[str, Any]) -> None:
        self.folder = folder
        self.sequence_length = sequence_length
        self.summary = summary
        self._tokens_RT, self._targets_RT, self._documents_RT = (_open_rows(folder / f"{n}.npy") for n in _NAMES)
        self.num_rows: int = self._tokens_RT.shape[0]

    def batch(self, rows: Sequence[int] | np.ndarray) -> Batch:
        """Returns the given rows: int64 tokens, targets and positions, int32 documents, [B, T] each."""
        index = np.asarray(rows, dtype=np.int64)
        documents_BT = np.asarray(self._documents_RT[index])
        return Batch(
            tokens_BT=self._tokens_RT[index].astype(np.int64),
            targets_BT=self._targets_RT[index].astype(np.int64),
            documents_BT=documents_BT,
            positions_BT=positions_of(documents_BT),
        )


class RowWriter:
    """Writes blocks of rows to a new folder, inside a `with` block; its end puts the number of rows in the headers."""

    def __init__(self, folder: Path, *, sequence_length: int) -> None:
        folder.mkdir()
        self._sequence_length = sequence_length
        self._files: list[BinaryIO] = [(folder / f"{name}.npy").open("wb+") for name in _NAMES]
        self.num_rows = self.num_tokens = self.num_targets = 0
        self._write_headers()

    def append(self, rows: PackedRows) -> None:
        blocks = (rows.tokens_RT, rows.targets_RT, rows.documents_RT)
        for file, block_RT in zip(self._files, blocks, strict=True):
            file.write(np.ascontiguousarray(block_RT, dtype="<i4").data)
        self.num_rows += len(rows.tokens_RT)
        self.num_tokens += int((rows.documents_RT >= 0).sum())
        self.num_targets += int((rows.targets_RT >= 0).sum())

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._write_headers()
        for file in self._files:
            file.close()

    def _write_headers(self) -> None:
        # numpy pads a header so that the first dimension can grow in place: the second writing has the same length.
        header = {"descr": "<i4", "fortran_order": False, "shape": (self.num_rows, self._sequence_length)}
        for file in self._files:
            file.seek(0)
            np.lib.format.write_array_header_1_0(file, header)


def _open_rows(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, _ = np.lib.format.read_array_header_1_0(file)
        if not shape[0]:  # an empty array can't be mapped
            return np.zeros(shape, dtype=np.int32)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # Rows are read in random order; read-ahead would only fill this process's resident memory with neighbours.
        if hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(mapped, dtype="<i4", offset=file.tell()).reshape(shape)
