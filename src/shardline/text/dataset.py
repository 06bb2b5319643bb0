"""A source of text into packed rows for training and for evaluation, made once and kept in the cache.

    train, heldout = prepare_dataset(config.data, tokenizer, cache_dir=cache_dir())
    batch = train.batch(sample_rows(step, global_batch=8, num_rows=train.num_rows, seed=0))

Which documents are held out depends on their content and the fraction only. The cache entry's name is a hash of all
that decides the rows: the files with sizes and SHA-256, the tokenizer, the length of a row, the fraction. An entry
is written under another name and renamed when it is complete, so that a kill leaves no half of one. Several
processes may ask at once; to tokenise once only, let one process go first.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardline.config import DataConfig
from shardline.config.cache import scratch_folder
from shardline.config.errors import ShardlineError, UsageError
from shardline.text.chats import encode_chat_for_training
from shardline.text.packing import TokenizedDocument, pack
from shardline.text.rows import Batch, PackedDataset, RowWriter
from shardline.text.sources import Document, Source, open_source
from shardline.text.tokenizer import Tokenizer

__all__ = ["Batch", "PackedDataset", "prepare_dataset"]

_FORMAT = 1  # part of the cache key: raise it when the same inputs would give other rows
_BATCH_CHARACTERS = 2_000_000
_SPLITS = ("train", "heldout")

Progress = Callable[[float], None]


def prepare_dataset(
    data: DataConfig, tokenizer: Tokenizer, *, cache_dir: Path, progress: Progress | None = None
) -> tuple[PackedDataset, PackedDataset]:
    """Returns the rows to train on and the held-out rows (none with `heldout_fraction` 0).

    `progress` is called with the fraction that is done, ending at 1.0. Raises `UsageError` when the source can't
    be used or is too small to be split.
    """
    source = open_source(data.source)
    key = _cache_key(source, data, tokenizer)
    entry = cache_dir / "datasets" / key
    if not _is_complete(entry):
        with scratch_folder(entry) as scratch:
            _build(scratch, source, data, tokenizer, progress or (lambda fraction: None))
            _publish(scratch, entry)
    elif progress:
        progress(1.0)
    summary = _read_summary(entry)
    if summary is None:
        raise ShardlineError(f"The cache entry {entry} vanished while it was being read; run the command again.")
    train, heldout = (
        PackedDataset(entry / split, sequence_length=data.sequence_length, summary=summary) for split in _SPLITS
    )
    return train, heldout


def _build(scratch: Path, source: Source, data: DataConfig, tokenizer: Tokenizer, progress: Progress) -> None:
    keys = np.array([document.split_key() for document in source.documents()], dtype=np.uint64)
    heldout_below = _threshold(keys, data)
    done = 0
    summary: dict[str, Any] = {"source": source.description, "skipped": source.skipped, "splits": {}}
    for split in _SPLITS:
        documents = (d for d in source.documents() if (d.split_key() < heldout_below) == (split == "heldout"))
        num_documents = 0

        def report(count: int) -> None:
            nonlocal done, num_documents
            done, num_documents = done + count, num_documents + count
            progress(done / len(keys))

        with RowWriter(scratch / split, sequence_length=data.sequence_length) as writer:
            for rows in pack(_tokenize(documents, tokenizer, report), sequence_length=data.sequence_length):
                writer.append(rows)
        summary["splits"][split] = {
            "documents": num_documents,
            "rows": writer.num_rows,
            "tokens": writer.num_tokens,
            "targets": writer.num_targets,
            "size_bytes": {path.name: path.stat().st_size for path in sorted((scratch / split).iterdir())},
        }
    if not summary["splits"]["train"]["rows"]:
        raise UsageError(f"Nothing can be learnt from {source.description}: no document has two tokens.")
    (scratch / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def _threshold(keys: np.ndarray, data: DataConfig) -> int:
    """The documents whose key is smaller are held out: `heldout_fraction` of them, at least one, never all."""
    if not data.heldout_fraction:
        return 0
    count = max(1, round(data.heldout_fraction * len(keys)))
    ordered = np.sort(keys)
    threshold = int(ordered[count - 1]) + 1 if len(keys) else 0
    if not len(keys) or threshold > int(ordered[-1]):
        raise UsageError(
            f"data.source = {data.source!r} has {len(np.unique(keys))} different documents, too few to hold out "
            f"data.heldout_fraction = {data.heldout_fraction} of them; add documents, or set data.heldout_fraction 0."
        )
    return threshold


def _tokenize(
    documents: Iterable[Document], tokenizer: Tokenizer, report: Callable[[int], None]
) -> Iterator[TokenizedDocument]:
    for batch in _batches(documents):
        texts = [document.text for document in batch if document.text is not None]
        ids_of_texts = iter(tokenizer.encode_documents(texts))
        for document in batch:
            if document.messages is None:
                yield TokenizedDocument(ids=np.array(next(ids_of_texts), dtype=np.int32))
            else:
                yield _tokenize_chat(document, tokenizer)
        report(len(batch))


def _tokenize_chat(document: Document, tokenizer: Tokenizer) -> TokenizedDocument:
    assert document.messages is not None
    try:
        ids, said = encode_chat_for_training(tokenizer, document.messages)
    except UsageError as error:
        raise UsageError(f"{document.name}: {error}") from error
    return TokenizedDocument(ids=ids, said=said, whole=True)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text or "") + 256
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _cache_key(source: Source, data: DataConfig, tokenizer: Tokenizer) -> str:
    decides = {
        "format": _FORMAT,
        "source": source.fingerprint(),
        "tokenizer": tokenizer.fingerprint(),
        "sequence_length": data.sequence_length,
        "heldout_fraction": data.heldout_fraction,
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]


def _read_summary(entry: Path) -> dict[str, Any] | None:
    try:
        return json.loads((entry / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _is_complete(entry: Path) -> bool:
    """False also for an entry that was cut short after it had been written, by a full disk or by hand."""
    summary = _read_summary(entry)
    if summary is None:
        return False
    try:
        return all(
            (entry / split / name).stat().st_size == size_bytes
            for split in _SPLITS
            for name, size_bytes in summary["splits"][split]["size_bytes"].items()
        )
    except (OSError, KeyError, TypeError, AttributeError):
        return False


def _publish(scratch: Path, entry: Path) -> None:
    try:
        scratch.rename(entry)
    except OSError:
        if _is_complete(entry):  # another process was faster; its rows are the same
            return
        shutil.rmtree(entry, ignore_errors=True)
        scratch.rename(entry)
