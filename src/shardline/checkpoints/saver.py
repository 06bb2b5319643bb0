"""Saves a run's checkpoints, in the foreground or behind the steps that follow.

    saver = Saver(folder, world=world, asynchronous=True, published=prune_and_report, say=print)
    saver.save(step=40, state=trainer.state(), model=model, facts=facts)    # every rank
    ...                                                                     # training goes on
    saver.wait()                                                            # the end: raises what went wrong
    saver.newest                                                            # the last checkpoint that is complete

An asynchronous save copies the state to CPU memory, 1/N of it on each of N ranks, and a thread does the rest. One save
is in flight: the next one waits for it. What went wrong in the background is raised by the next call, whatever it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardline.checkpoints.native import Checkpoint, ModelFolder, save_checkpoint
from shardline.checkpoints.peers import Peers
from shardline.checkpoints.staging import Share, Staging
from shardline.parallel.shards import Shard
from shardline.parallel.world import World

__all__ = ["Saver"]

_WORTH_TELLING_S = 0.1


class Saver:
    """published(checkpoint) is called on rank 0 once a checkpoint is complete; say(text) is for people."""

    def __init__(
        self,
        folder: Path,
        *,
        world: World,
        asynchronous: bool,
        published: Callable[[Checkpoint], None],
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._world, self._asynchronous = folder, world, asynchronous
        self._published, self._say = published, say
        self._peers: Peers | None = None
        self._share: Share | None = None
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.newest: Checkpoint | None = None

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed: the next call raises why."""
        return self._error is not None

    def save(self, *, step: int, state: Mapping[str, Shard], model: ModelFolder, facts: Mapping[str, Any]) -> None:
        """Saves `state` as step `step`. Every rank calls it; when it returns, the state may change."""
        started = time.perf_counter()
        self.wait()
        waited_s = time.perf_counter() - started
        if waited_s > _WORTH_TELLING_S:
            self._say(f"step {step} waited {waited_s:.1f}s for the save before it; raise checkpoint.every")
        if self._peers is None or self._share is None:
            self._peers = Peers.of(self._world)
            self._share = Share(state, self._peers)
        mine = self._share.of(state)
        if not self._asynchronous:
            self._write(step, mine, model, facts, peers=self._peers, note="")
            return
        started = time.perf_counter()
        copy = self._staging.copy(mine)
        note = f" in the background, after {time.perf_counter() - started:.1f}s of copying"
        self._thread = threading.Thread(
            target=self._write_behind,
            args=(step, copy, model, facts),
            kwargs={"peers": self._peers, "note": note},
            name=f"save-step-{step}",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Returns when no save is in flight; raises the error of one that failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def abandon(self, *, within_s: float) -> Exception | None:
        """For a run that fails for another reason: gives the save in flight some time and returns its error, if any."""
        if self._thread is not None:
            self._thread.join(within_s)
        return self._error

    def _write_behind(self, *args: Any, **options: Any) -> None:
        try:
            self._write(*args, **options)
        except Exception as error:  # noqa: BLE001 - a thread's edge: the next call raises it
            self._error = error

    def _write(
        self,
        step: int,
        state: Mapping[str, Shard],
        model: ModelFolder,
        facts: Mapping[str, Any],
        *,
        peers: Peers,
        note: str,
    ) -> None:
        started = time.perf_counter()
        checkpoint = save_checkpoint(self._folder, step=step, state=state, model=model, facts=facts, peers=peers)
        self.newest = checkpoint
        self._say(f"saved {checkpoint.path} in {time.perf_counter() - started:.1f}s{note}")
        peers.first(lambda: self._published(checkpoint))
