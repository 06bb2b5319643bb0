from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardline.config import DataConfig, UsageError
from shardline.text.dataset import prepare_dataset
from shardline.text.rows import PackedDataset
from shardline.text.tokenizer import Tokenizer


def write_documents(folder: Path, count: int = 40) -> Path:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:03}.txt").write_text(f"document {number} " * (1 + number % 7))
    return folder


def data(source: Path, **other) -> DataConfig:
    return DataConfig(**{"source": str(source), "sequence_length": 32, "heldout_fraction": 0.1, **other})


def documents_of(dataset: PackedDataset, tokenizer: Tokenizer) -> list[str]:
    batch = dataset.batch(range(dataset.num_rows))
    ids = batch.tokens_BT[batch.documents_BT >= 0].tolist()
    return tokenizer.decode(ids, skip_special_tokens=False).split("<|im_end|>")[:-1]


def test_rows_hold_the_documents(tmp_path: Path, byte: Tokenizer):
    source = write_documents(tmp_path / "source")
    seen: list[float] = []
    train, heldout = prepare_dataset(data(source), byte, cache_dir=tmp_path / "cache", progress=seen.append)
    expected = [path.read_text() for path in sorted(source.iterdir())]
    ours, theirs = documents_of(train, byte), documents_of(heldout, byte)
    assert sorted([*ours, *theirs]) == sorted(expected)
    assert [text for text in expected if text in ours] == ours, "in the source's order"
    assert len(theirs) == 4
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    summary = train.summary["splits"]["train"]
    assert (summary["documents"], summary["rows"]) == (36, train.num_rows)
    assert summary["tokens"] == sum(len(text) + 1 for text in ours)


def test_a_batch_has_the_shapes_and_types_that_training_reads(tmp_path: Path, byte: Tokenizer):
    train, _ = prepare_dataset(data(write_documents(tmp_path / "s")), byte, cache_dir=tmp_path)
    batch = train.batch([3, 0, 3])
    for array, dtype in (
        (batch.tokens_BT, np.int64),
        (batch.targets_BT, np.int64),
        (batch.documents_BT, np.int32),
        (batch.positions_BT, np.int64),
    ):
        assert (array.shape, array.dtype) == ((3, 32), dtype)
        assert array.flags.writeable
        assert (array[0] == array[2]).all()
    inside = (batch.documents_BT[:, 1:] == batch.documents_BT[:, :-1]) & (batch.documents_BT[:, 1:] >= 0)
    assert (batch.targets_BT[:, :-1][inside] == batch.tokens_BT[:, 1:][inside]).all()
    assert train.batch([]).tokens_BT.shape == (0, 32)


def test_a_second_call_reads_the_cache(tmp_path: Path, byte: Tokenizer):
    source, cache = write_documents(tmp_path / "source"), tmp_path / "cache"
    first, _ = prepare_dataset(data(source), byte, cache_dir=cache)
    written = {path: path.stat().st_mtime_ns for path in cache.rglob("*.npy")}
    seen: list[float] = []
    second, _ = prepare_dataset(data(source), byte, cache_dir=cache, progress=seen.append)
    assert seen == [1.0]
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.npy")} == written
    everything = range(first.num_rows)
    assert (first.batch(everything).tokens_BT == second.batch(everything).tokens_BT).all()


def test_the_cache_key_follows_everything_that_decides(tmp_path: Path, byte: Tokenizer, bpe: Tokenizer):
    source, cache = write_documents(tmp_path / "source"), tmp_path / "cache"
    prepare_dataset(data(source), byte, cache_dir=cache)
    prepare_dataset(data(source), bpe, cache_dir=cache)
    prepare_dataset(data(source, sequence_length=16), byte, cache_dir=cache)
    prepare_dataset(data(source, heldout_fraction=0.5), byte, cache_dir=cache)
    (source / "000.txt").write_text("changed")
    prepare_dataset(data(source), byte, cache_dir=cache)
    assert len(list((cache / "datasets").iterdir())) == 5


def test_a_damaged_entry_is_made_again(tmp_path: Path, byte: Tokenizer):
    source, cache = write_documents(tmp_path / "source"), tmp_path / "cache"
    train, _ = prepare_dataset(data(source), byte, cache_dir=cache)
    expected = train.batch(range(train.num_rows)).targets_BT
    path = train.folder / "targets.npy"
    del train
    path.write_bytes(path.read_bytes()[:-100])
    again, _ = prepare_dataset(data(source), byte, cache_dir=cache)
    assert (again.batch(range(again.num_rows)).targets_BT == expected).all()
    for damaged in ("{", "{}", "[]"):
        (again.folder.parent / "summary.json").write_text(damaged)
        again, _ = prepare_dataset(data(source), byte, cache_dir=cache)
        assert again.num_rows == len(expected)


def test_a_kill_leaves_no_bad_entry_and_its_remains_are_removed(tmp_path: Path, byte: Tokenizer):
    source, cache = write_documents(tmp_path / "source"), tmp_path / "cache"
    code = (
        "import sys, time; from pathlib import Path\n"
        "from shardline.config import DataConfig\n"
        "from shardline.text.dataset import prepare_dataset\n"
        "from shardline.text.tokenizer import byte_tokenizer\n"
        "def wait(fraction):\n"
        "    print(fraction, flush=True); time.sleep(60)\n"
        "data = DataConfig(source=sys.argv[1], sequence_length=32, heldout_fraction=0.1)\n"
        "prepare_dataset(data, byte_tokenizer(), cache_dir=Path(sys.argv[2]), progress=wait)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(source), str(cache)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline(), "it is now in the middle of its work"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    (left,) = (cache / "datasets").iterdir()
    assert left.name.startswith("."), "only a hidden scratch folder, no entry"
    train, _ = prepare_dataset(data(source), byte, cache_dir=cache)
    assert list((cache / "datasets").iterdir()) == [train.folder.parent]


def test_two_processes_may_prepare_the_same_data_at_once(tmp_path: Path, byte: Tokenizer):
    source, cache = write_documents(tmp_path / "source"), tmp_path / "cache"
    inner: list[PackedDataset] = []

    def meanwhile(fraction: float) -> None:
        if not inner:
            inner.extend(prepare_dataset(data(source), byte, cache_dir=cache))

    train, _ = prepare_dataset(data(source), byte, cache_dir=cache, progress=meanwhile)
    assert train.folder == inner[0].folder
    assert len(list((cache / "datasets").iterdir())) == 1


def test_the_split(tmp_path: Path, byte: Tokenizer):
    source = write_documents(tmp_path / "source")
    _, heldout = prepare_dataset(data(source), byte, cache_dir=tmp_path / "c")
    before = documents_of(heldout, byte)
    for path in source.iterdir():
        path.rename(path.with_name(f"renamed-{path.name}"))
    _, heldout = prepare_dataset(data(source), byte, cache_dir=tmp_path / "c")
    assert sorted(documents_of(heldout, byte)) == sorted(before), "names and order decide nothing"
    _, heldout = prepare_dataset(data(source, heldout_fraction=0.001), byte, cache_dir=tmp_path / "c")
    assert len(documents_of(heldout, byte)) == 1, "at least one"
    train, heldout = prepare_dataset(data(source, heldout_fraction=0.0), byte, cache_dir=tmp_path / "c")
    assert (heldout.num_rows, len(documents_of(train, byte))) == (0, 40)
    assert heldout.batch([]).tokens_BT.shape == (0, 32)


def test_equal_documents_fall_on_one_side(tmp_path: Path, byte: Tokenizer):
    source = write_documents(tmp_path / "source", 10)
    for path in list(source.iterdir()):
        shutil.copy(path, source / f"copy-{path.name}")
    train, heldout = prepare_dataset(data(source, heldout_fraction=0.25), byte, cache_dir=tmp_path / "c")
    ours, theirs = documents_of(train, byte), documents_of(heldout, byte)
    assert not set(ours) & set(theirs)
    assert len(theirs) == 6, "a quarter of 20, rounded up to whole pairs"


def test_too_few_documents_to_hold_one_out(tmp_path: Path, byte: Tokenizer):
    path = tmp_path / "one.txt"
    path.write_text("a single document")
    with pytest.raises(UsageError, match=r"has 1 different documents, too few.*set data\.heldout_fraction 0"):
        prepare_dataset(data(path), byte, cache_dir=tmp_path / "c")
    train, _ = prepare_dataset(data(path, heldout_fraction=0.0), byte, cache_dir=tmp_path / "c")
    assert train.num_rows == 1


def test_chats_learn_the_replies_only(tmp_path: Path, byte: Tokenizer):
    path = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    path.write_text(json.dumps({"messages": chat}) + "\n" + json.dumps({"text": "plain"}) + "\n")
    train, _ = prepare_dataset(data(path, sequence_length=64, heldout_fraction=0.0), byte, cache_dir=tmp_path)
    batch = train.batch(range(train.num_rows))
    learnt = batch.targets_BT[batch.targets_BT >= 0].tolist()
    assert byte.decode(learnt, skip_special_tokens=False) == "cd<|im_end|>lain<|im_end|>"


def test_a_chat_that_cannot_be_learnt_names_its_line(tmp_path: Path, byte: Tokenizer):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"text": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    with pytest.raises(UsageError, match=r"chats\.jsonl:2: The chat has no message of the role 'assistant'"):
        prepare_dataset(data(path, heldout_fraction=0.0), byte, cache_dir=tmp_path / "c")
    assert not any((tmp_path / "c" / "datasets").iterdir()), "nothing is left behind"


def test_the_standard_library(tmp_path: Path, bpe: Tokenizer):
    train, heldout = prepare_dataset(DataConfig(sequence_length=512), bpe, cache_dir=tmp_path)
    assert train.num_rows > 1000
    assert 0 < heldout.num_rows < train.num_rows / 10
