"""The ranks of a run as those that save it together: a process group of their own, and errors that all of them raise.

    peers = Peers.of(world)                    # every rank calls it, once
    sizes = peers.each(lambda: write_mine())   # runs on every rank; returns what each of them returned
    peers.first(make_folder)                   # runs on rank 0

Saves run in a background thread beside training: in a group of their own their messages can't be taken for others',
and gloo takes what lies in the CPU's memory.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from shardline.config import ShardlineError
from shardline.parallel.world import World

__all__ = ["Peers"]

Result = TypeVar("Result")

# A rank with nothing to write waits for those that write and hash files of gigabytes.
_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True, kw_only=True)
class Peers:
    rank: int
    size: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, world: World) -> Peers:
        group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        return cls(rank=world.rank, size=world.size, group=group)

    def each(self, act: Callable[[], Result]) -> list[Result]:
        """Runs `act` on every rank and returns all results by rank; what it raises on one is raised on all.

        An OSError (disk full, no permission) becomes a `ShardlineError` that names the rank and its machine. Any other
        error is a bug: it is raised as it is where it happened, and told to the others.
        """
        answer: Any = None
        failure: ShardlineError | None = None
        bug: Exception | None = None
        where = f" on rank {self.rank} ({socket.gethostname()})" if self.size > 1 else ""
        try:
            answer = act()
        except ShardlineError as error:
            failure = error
        except OSError as error:
            failure = ShardlineError(f"{error.strerror or error}: {error.filename or 'a file'}{where}")
        except Exception as error:  # noqa: BLE001 - the other ranks must not wait for this one
            bug, failure = error, ShardlineError(f"{type(error).__name__}: {error}{where}")
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, (answer, failure), group=self.group)
        if bug is not None:
            raise bug
        for _, error in answers:
            if error is not None:
                raise error
        return [result for result, _ in answers]

    def first(self, act: Callable[[], Result]) -> Result:
        """Runs `act` on rank 0 alone and returns its result on every rank; what it raises is raised on all."""
        return self.each(lambda: act() if self.rank == 0 else None)[0]  # type: ignore[return-value]
