"""Native checkpoints: sharded state that any layout can load, and a Hugging Face folder, published whole or not at all.

    RUN/checkpoints/step-40/
        manifest.json      every file's size and SHA-256, the step, the layout that wrote it
        state/             torch.distributed.checkpoint: weights and optimizer under layout-free names
        model/             a Hugging Face folder

A checkpoint is written as `.step-40.tmp`, flushed to disk, and renamed last: what is called `step-N` is complete.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from shardline.checkpoints.atomic import publish_folder
from shardline.checkpoints.hub import resolve
from shardline.config import ShardlineError, UsageError
from shardline.parallel.shards import LoadShards, SaveShards, Shard
from shardline.parallel.world import World

__all__ = ["Checkpoint", "find_checkpoints", "find_model_folder", "load_state", "prune", "save_checkpoint"]

_NAME = re.compile(r"step-(\d+)")
_MANIFEST = "manifest.json"


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


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    state: Mapping[str, Shard],
    write_model: Callable[[Path], None],
    facts: Mapping[str, Any],
    world: World,
) -> Checkpoint:
    """Writes RUN/checkpoints/step-N. Every rank calls it and returns when the checkpoint is published.

    state        this rank's shards under layout-free names; equal ones are written once
    write_model  writes the Hugging Face folder; called on every rank, since gathering shards takes all of them
    facts        what else the manifest says
    """
    target = folder / f"step-{step}"
    scratch = folder / f".{target.name}.tmp"
    if world.is_first:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    world.barrier()
    dcp.save(dict(state), checkpoint_id=scratch / "state", planner=SaveShards())
    write_model(scratch / "model")
    world.barrier()
    if world.is_first:
        files = {
            str(path.relative_to(scratch)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in sorted(scratch.rglob("*"))
            if path.is_file()
        }
        manifest = {**facts, "step": step, "files": files}
        (scratch / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        publish_folder(scratch, target)
    world.barrier()
    return Checkpoint(step=step, path=target)


def load_state(checkpoint: Checkpoint, state: Mapping[str, Shard]) -> None:
    """Fills `state`'s tensors in place from a checkpoint of any layout; every rank calls it with its own tensors."""
    try:
        dcp.load(dict(state), checkpoint_id=checkpoint.path / "state", planner=LoadShards())
    except dcp.api.CheckpointException as error:
        first = str(next(iter(error.failures.values()))[0]) if error.failures else str(error)
        raise ShardlineError(f"{checkpoint.path} does not fit this run: {first}.") from None


def prune(folder: Path, *, keep_last: int) -> None:
    """Deletes all but the newest checkpoints, and what unfinished saves left."""
    for checkpoint in find_checkpoints(folder)[:-keep_last]:
        shutil.rmtree(checkpoint.path)
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
