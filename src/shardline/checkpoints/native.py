"""Native checkpoints: sharded state that any layout can load, and a Hugging Face folder, published whole or not at all.

    RUN/checkpoints/step-40/
        manifest.json      every file's size and SHA-256, the step, the layout that wrote it
        state/             torch.distributed.checkpoint: weights and optimizer under layout-free names
        model/             a Hugging Face folder

A checkpoint is written as `.step-40.tmp`, flushed to disk, and renamed last: what is called `step-N` is complete.
Each rank writes its shards, then reads from `state/` the tensors of the model's files that are dealt to it: no rank
ever holds more of the model than one tensor beside its own shards. That takes one file system that all ranks see.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardline.checkpoints.atomic import publish_folder
from shardline.checkpoints.hub import resolve
from shardline.checkpoints.huggingface import MAX_SHARD_BYTES, write_descriptions
from shardline.checkpoints.peers import Peers
from shardline.checkpoints.sharded import StoredState
from shardline.checkpoints.weights import WeightFiles
from shardline.config import ShardlineError, UsageError
from shardline.models.config import DecoderConfig
from shardline.parallel.shards import LoadShards, SaveShards, Shard
from shardline.text.tokenizer import Tokenizer

__all__ = [
    "Checkpoint",
    "ModelFolder",
    "find_checkpoints",
    "find_model_folder",
    "load_state",
    "prune",
    "save_checkpoint",
]

_NAME = re.compile(r"step-(\d+)")
_MANIFEST = "manifest.json"
_VISIBLE_WITHIN_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A published checkpoint: its folder, and what the trainer wrote into the manifest."""

    step: int
    path: Path

    @property
    def model_folder(self) -> Path:
        return self.path / "model"

    def read_manifest(self) -> dict[str, Any]:
        path = self.path / _MANIFEST
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            assert isinstance(manifest["files"], dict)
        except (OSError, ValueError, KeyError, TypeError, AssertionError):
            raise ShardlineError(f"{path} is missing or damaged; {self._way_out()}") from None
        return manifest

    def verify(self) -> dict[str, Any]:
        """Reads every file against the manifest and returns it; raises `ShardlineError` naming the first bad file."""
        manifest = self.read_manifest()
        for name, facts in manifest["files"].items():
            path = self.path / name
            if not path.is_file():
                raise ShardlineError(f"{path} is missing; {self._way_out()}")
            size = path.stat().st_size
            if size != facts["bytes"]:
                raise ShardlineError(f"{path} has {size} bytes instead of {facts['bytes']}; {self._way_out()}")
            if _sha256(path) != facts["sha256"]:
                raise ShardlineError(f"{path} has other contents than were saved; {self._way_out()}")
        return manifest

    def _way_out(self) -> str:
        older = [each.path.name for each in find_checkpoints(self.path.parent) if each.step < self.step]
        if older:
            return f"delete {self.path} to resume from {older[-1]}."
        return f"there is no older checkpoint beside {self.path}; start the run again in a new folder."


def find_checkpoints(folder: Path) -> list[Checkpoint]:
    """Returns the published checkpoints below RUN/checkpoints, oldest first; unfinished ones are not among them."""
    if not folder.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(
        (Checkpoint(step=int(match[1]), path=path) for match, path in found if match),
        key=lambda checkpoint: checkpoint.step,
    )


def find_model_folder(path: str | Path) -> Path:
    """Returns the Hugging Face folder that `path` means: itself, a checkpoint's, a run's newest checkpoint's, or, for
    an `hf://` name, the downloaded one."""
    path = resolve(path)
    if (path / "config.json").exists():
        return path
    if (path / "model" / "config.json").exists():
        return path / "model"
    found = find_checkpoints(path / "checkpoints")
    if found:
        return found[-1].model_folder
    raise UsageError(f"{path} is neither a model folder (config.json) nor a run with a checkpoint; pass one of them.")


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """What a checkpoint's Hugging Face folder holds beside the weights, which lie in `state/` as `model.NAME`."""

    config: DecoderConfig
    tokenizer: Tokenizer | None = None
    generation_config: Mapping[str, Any] | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES

    def write(self, folder: Path, stored: StoredState, peers: Peers) -> list[Path]:
        """Writes this rank's share of the folder and returns the files; one tensor at a time is in memory."""
        folder.mkdir(exist_ok=True)
        files = WeightFiles.plan(self.config, stored.shapes("model."), max_shard_bytes=self.max_shard_bytes)
        mine = [folder / name for name in files.names[peers.rank :: peers.size]]
        for path in mine:
            files.write(path, lambda names: [stored.read(f"model.{name}") for name in names])
        if peers.rank == 0:
            write_descriptions(folder, files=files, tokenizer=self.tokenizer, generation_config=self.generation_config)
            mine += [path for path in folder.iterdir() if path.suffix != ".safetensors"]
        return mine


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    state: Mapping[str, Shard],
    model: ModelFolder,
    facts: Mapping[str, Any],
    peers: Peers,
) -> Checkpoint:
    """Writes RUN/checkpoints/step-N. Every rank calls it and returns when the checkpoint is published.

    state  this rank's shards under layout-free names; equal ones are written once
    facts  what else the manifest says

    Raises `ShardlineError` on every rank when one of them fails; what was written is removed, and older checkpoints
    stay as they are.
    """
    target = folder / f"step-{step}"
    scratch = folder / f".{target.name}.tmp"
    try:
        peers.first(lambda: _make_empty(scratch))
        peers.each(lambda: _require_visible(scratch, written_by=0, peers=peers))
        _write_state(scratch / "state", state, peers)
        peers.each(lambda: _require_visible(scratch / "state" / ".metadata", written_by=0, peers=peers))
        written = peers.each(lambda: _write_model(scratch, model, peers))
        peers.first(lambda: _publish(scratch, target, step=step, facts=facts, written=written, peers=peers))
    except ShardlineError as error:
        if peers.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
        older = find_checkpoints(folder)
        rest = f"{older[-1].path} is whole: --resume goes on from it" if older else "No checkpoint is complete yet"
        raise ShardlineError(f"The checkpoint of step {step} was not saved: {error}. {rest}.") from None
    return Checkpoint(step=step, path=target)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _require_visible(path: Path, *, written_by: int, peers: Peers) -> None:
    """Raises `ShardlineError` when this rank does not see what another wrote: network file systems get some seconds."""
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise ShardlineError(
                f"rank {peers.rank} ({socket.gethostname()}) can't see {path}, which rank {written_by} wrote; all "
                "ranks must see the run directory on one file system: choose such a folder with --run"
            )
        with contextlib.suppress(OSError):  # listing a folder makes NFS look again
            os.listdir(path.parent)
        time.sleep(0.1)


class _Writer(dcp.FileSystemWriter):
    """Raises what the disk said: torch's zip writer hides "No space left on device" behind an error of its own."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


def _write_state(folder: Path, state: Mapping[str, Shard], peers: Peers) -> None:
    try:
        dcp.save(dict(state), storage_writer=_Writer(folder), planner=SaveShards(), process_group=peers.group)
    except dcp.api.CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        raise ShardlineError(f"rank {rank} could not write {folder}: {first}") from None


def _write_model(scratch: Path, model: ModelFolder, peers: Peers) -> dict[str, dict[str, Any]]:
    """Writes this rank's part of the model folder and returns the facts of all files that this rank has written."""
    mine = model.write(scratch / "model", StoredState(scratch / "state"), peers)
    mine += (scratch / "state").glob(f"__{peers.rank}_*.distcp")
    if peers.rank == 0:
        mine.append(scratch / "state" / ".metadata")
    return {str(path.relative_to(scratch)): _facts(path) for path in mine}


def _publish(
    scratch: Path,
    target: Path,
    *,
    step: int,
    facts: Mapping[str, Any],
    written: list[dict[str, dict[str, Any]]],
    peers: Peers,
) -> None:
    files: dict[str, Any] = {}
    for rank, theirs in enumerate(written):
        for name in theirs:
            _require_visible(scratch / name, written_by=rank, peers=peers)
        files.update(theirs)
    found = {str(path.relative_to(scratch)) for path in scratch.rglob("*") if path.is_file()}
    assert found == set(files), f"files that no rank wrote: {found - set(files)}"
    manifest = {**facts, "step": step, "files": dict(sorted(files.items()))}
    (scratch / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    publish_folder(scratch, target)


def load_state(checkpoint: Checkpoint, state: Mapping[str, Shard]) -> None:
    """Fills `state`'s tensors in place from a checkpoint of any layout; every rank calls it with its own tensors."""
    try:
        dcp.load(dict(state), checkpoint_id=checkpoint.path / "state", planner=LoadShards())
    except dcp.api.CheckpointException as error:
        first = str(next(iter(error.failures.values()))[0]) if error.failures else str(error)
        raise ShardlineError(
            f"{checkpoint.path} does not fit this run: {first.rstrip('.')}. Resume with the model and optimizer that "
            f"wrote it, or start a new run from its weights (model.path = {checkpoint.path / 'model'})."
        ) from None


def prune(folder: Path, *, keep_last: int, keep_every: int = 0) -> None:
    """Deletes all but the newest checkpoints and those at multiples of `keep_every`, and what unfinished saves left."""
    for checkpoint in find_checkpoints(folder)[:-keep_last]:
        if not keep_every or checkpoint.step % keep_every:
            # Under another name first: a kill in mid-deletion must not leave half a checkpoint that looks whole.
            checkpoint.path.rename(checkpoint.path.with_name(f".{checkpoint.path.name}.old"))
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover)


def _facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
