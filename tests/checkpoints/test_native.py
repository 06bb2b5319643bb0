"""A published checkpoint: what damages it is named, and what is kept and thrown away."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardline.checkpoints.native import (
    Checkpoint,
    ModelFolder,
    find_checkpoints,
    load_state,
    prune,
    save_checkpoint,
)
from shardline.checkpoints.peers import Peers
from shardline.config import ShardlineError
from shardline.models.decoder import Decoder
from shardline.models.presets import preset
from shardline.parallel.shards import Shard
from shardline.parallel.world import start_world


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    with start_world(store=dist.HashStore()) as world:
        yield Peers.of(world)


def state_of(decoder: Decoder) -> dict[str, Shard]:
    return {f"model.{name}": Shard.of(parameter) for name, parameter in decoder.named_parameters()}


@pytest.fixture(scope="module")
def saved(peers, tmp_path_factory) -> Path:
    """A folder with step-1 and step-2; each model in several files."""
    folder = tmp_path_factory.mktemp("saved")
    config = preset("tiny")
    decoder = Decoder(config)
    decoder.initialize(seed=1)
    model = ModelFolder(config=config, max_shard_bytes=10**6)
    for step in (1, 2):
        save_checkpoint(folder, step=step, state=state_of(decoder), model=model, facts={"layout": "?"}, peers=peers)
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


KINDS = {
    "distcp": "state/__0_0.distcp",
    "metadata": "state/.metadata",
    "safetensors": "model/model-00002-of-00004.safetensors",
    "index": "model/model.safetensors.index.json",
    "config": "model/config.json",
}


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (_truncate, r"has \d+ bytes instead of \d+"),
    "emptied": (lambda path: path.write_bytes(b""), r"has 0 bytes instead of \d+"),
    "flipped": (_flip, "has other contents than were saved"),
    "missing": (lambda path: path.unlink(), "is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_named(kind, damage, copy):
    act, words = DAMAGES[damage]
    newest, older = find_checkpoints(copy)[::-1]
    newest.verify()
    act(newest.path / KINDS[kind])
    with pytest.raises(ShardlineError, match=rf"step-2/{KINDS[kind]} {words}; delete .*step-2 to resume from step-1"):
        newest.verify()
    older.verify()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_is_named(damage, copy):
    newest = find_checkpoints(copy)[-1]
    act, _ = DAMAGES[damage]
    if damage == "flipped":  # of the manifest nothing else keeps a sum: it must contradict the files
        text = (newest.path / "manifest.json").read_text()
        (newest.path / "manifest.json").write_text(text.replace('"sha256": "', '"sha256": "0', 1))
        wanted = "has other contents than were saved"
    else:
        act(newest.path / "manifest.json")
        wanted = r"manifest\.json is missing or damaged"
    with pytest.raises(ShardlineError, match=wanted):
        newest.verify()


def test_the_manifest_lists_every_file(saved):
    checkpoint = find_checkpoints(saved)[-1]
    found = {str(path.relative_to(checkpoint.path)) for path in checkpoint.path.rglob("*") if path.is_file()}
    assert found == {*checkpoint.verify()["files"], "manifest.json"}
    assert set(KINDS.values()) < found


def test_a_state_of_another_model_is_refused(saved, peers):
    checkpoint = find_checkpoints(saved)[-1]
    with pytest.raises(ShardlineError, match=r"step-2 does not fit this run: .*model\.norm\.weight"):
        load_state(checkpoint, {"model.model.norm.weight": Shard.whole(torch.zeros(3))})
    with pytest.raises(ShardlineError, match=r"step-2 does not fit this run: .*optimizer\.nothing[^.]*\. Resume"):
        load_state(checkpoint, {"optimizer.nothing": Shard.whole(torch.zeros(3))})


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(2, 0, [50, 60]), (1, 0, [60]), (1, 20, [20, 40, 60]), (2, 25, [50, 60]), (9, 1, [10, 20, 30, 40, 50, 60])],
)
def test_retention(keep_last, keep_every, kept, tmp_path):
    for step in (10, 20, 30, 40, 50, 60):
        (tmp_path / f"step-{step}").mkdir()
    (tmp_path / ".step-20.old").mkdir()  # a deletion that a kill cut short
    (tmp_path / ".step-70.tmp" / "state").mkdir(parents=True)
    prune(tmp_path, keep_last=keep_last, keep_every=keep_every)
    assert [each.step for each in find_checkpoints(tmp_path)] == kept
    assert len(list(tmp_path.iterdir())) == len(kept)


def test_a_deletion_never_leaves_half_a_checkpoint(copy, monkeypatch):
    """Whatever instant of a deletion a kill hits: what is called step-N is whole."""

    def killed(path: Path) -> None:
        for file in sorted(Path(path).rglob("*.distcp")):
            file.unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(copy, keep_last=1)
    assert [each.step for each in find_checkpoints(copy)] == [2]
    for each in find_checkpoints(copy):
        each.verify()


def test_what_the_disk_said_is_told(peers, copy):
    """No file of more than 100 kB can be written, as on a full disk."""
    config = preset("tiny")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(ShardlineError, match=r"step 3 was not saved: rank 0 could not write .*File too large"):
            save_checkpoint(
                copy, step=3, state=state_of(Decoder(config)), model=ModelFolder(config=config), facts={}, peers=peers
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in copy.iterdir()) == ["step-1", "step-2"]


def test_a_folder_that_cant_be_written_is_named_and_the_rest_is_whole(peers, copy):
    config = preset("tiny")
    state = state_of(Decoder(config))
    (copy / ".step-3.tmp").write_text("in the way")  # rmtree leaves a file alone, and mkdir stumbles over it
    wanted = r"checkpoint of step 3 was not saved: File exists: .*\.step-3\.tmp\. .*step-2 is whole: --resume goes on"
    with pytest.raises(ShardlineError, match=wanted):
        save_checkpoint(copy, step=3, state=state, model=ModelFolder(config=config), facts={}, peers=peers)
    assert [each.step for each in find_checkpoints(copy)] == [1, 2]
    assert Checkpoint(step=2, path=copy / "step-2").verify()["step"] == 2
