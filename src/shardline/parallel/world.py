"""The processes of a run: who am I, how many are we, and the process group between us.

    with start_world() as world:          # one process, our launcher, torchrun or srun: no difference to the caller
        if world.is_first: ...

The group is `gloo` on CPU and `cpu:gloo,cuda:nccl` on CUDA, so that tensors on the CPU can be reduced there too.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardline.config import ShardlineError, UsageError
from shardline.parallel.heartbeat import Heartbeat

__all__ = ["World", "read_environment", "start_world"]

Result = TypeVar("Result")

_START_S = 600  # what the slowest rank may take to arrive; from then on `limit_groups` rules


@dataclass(frozen=True, kw_only=True)
class World:
    rank: int
    size: int
    local_rank: int
    device: torch.device
    heartbeat: Heartbeat = field(compare=False)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Returns the elementwise sum of `values` over all ranks, the same on each."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Returns the elementwise maximum of `values` over all ranks, the same on each."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def barrier(self) -> None:
        """Waits for every rank."""
        self._reduce(torch.zeros(1), dist.ReduceOp.SUM, name="barrier")

    def limit_groups(self, timeout_s: float) -> None:
        """Makes every collective of every group that exists now fail once a rank keeps the others waiting this long.

        A group made later, or made by torch for a mesh, starts out with torch's own limit, which is half an hour.
        """
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)

    def first(self, act: Callable[[], Result]) -> Result:
        """Runs `act` on rank 0 alone and returns what it returned on every rank; its `ShardlineError` is raised on all.

        For what one process must do while the others wait, such as writing files: none hangs when it fails.
        """
        answer: list[Any] = [None, None]
        if self.is_first:
            try:
                answer[0] = act()
            except ShardlineError as error:
                answer[1] = error
        self.heartbeat.enter("waits for what rank 0 does alone")
        dist.broadcast_object_list(answer, src=0)
        self.heartbeat.leave()
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType, *, name: str = "all-reduce") -> Tensor:
        total = values.detach().clone()
        self.heartbeat.enter(name)
        dist.all_reduce(total, operation)
        self.heartbeat.leave()
        return total


def read_environment(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Returns (rank, world size, local rank) as torchrun or Slurm set them; (0, 1, 0) where neither did."""
    for rank, size, local_rank in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ):
        if rank in environment and size in environment:
            return int(environment[rank]), int(environment[size]), int(environment.get(local_rank, 0))
    return 0, 1, 0


@contextmanager
def start_world(*, store: dist.Store | None = None, rank: int = 0, size: int = 1) -> Iterator[World]:
    """Yields the world and tears its process group down afterwards.

    Without `store` the environment says who we are (torchrun's variables or Slurm's); tests pass a store of their own.
    """
    local_rank = rank
    if store is None:
        rank, size, local_rank = read_environment(os.environ)
        if size == 1:
            store = dist.HashStore()
        elif missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            raise UsageError(
                f"This is rank {rank} of {size}, but {' and '.join(missing)} is not set, so the ranks can't find each "
                "other; start them with `shardline train FILE.yaml --nproc N` or torchrun."
            )
        else:
            store = _store_of_this_attempt(os.environ, size)
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=_START_S))
    heartbeat = Heartbeat(rank=rank)
    try:
        yield World(rank=rank, size=size, local_rank=local_rank, device=device, heartbeat=heartbeat)
    except BaseException as error:
        if heartbeat.broken:
            atexit.register(_leave_at_once, getattr(error, "exit_code", getattr(error, "code", 1)))
        else:
            traceback.clear_frames(error.__traceback__)  # an error's frames would keep the modules alive, see below
        raise
    finally:
        heartbeat.close("ended")
        if not heartbeat.broken:  # a broken group waits for what is under way, and so for the rank that does not come
            # Sharded modules hold the group in reference cycles. While one of them lives so do gloo's threads, and a
            # thread that meets the interpreter's end aborts the process: one run in four did.
            gc.collect()
            dist.destroy_process_group()


def _store_of_this_attempt(environment: Mapping[str, str], size: int) -> dist.Store | None:
    """Returns torchrun's store without what an earlier attempt of this machine's ranks left there; None: torch chooses.

    torch 2.13 keeps one store over `--max-restarts`, and gloo would connect to the addresses of processes that are
    gone. Of several machines' ranks some may not have been restarted, so the count is no common name there.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or environment.get("GROUP_WORLD_SIZE") != "1":
        return None
    server = dist.TCPStore(
        environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), size, is_master=False, wait_for_workers=False
    )
    return dist.PrefixStore(f"attempt-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", server)


def _leave_at_once(exit_code: int) -> None:
    """Ends the process without torch's own farewells, which may wait for ever for a rank that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
