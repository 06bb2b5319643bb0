"""Which rank writes which shard, and the copies that a background save reads while training changes the originals.

share = Share(state, peers)            # once: every rank calls it
mine = share.of(state)                 # of shards that several ranks hold, each is written by one
copy = Staging().copy(mine)            # the same shards in CPU memory, in the same buffers every time
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardline.checkpoints.peers import Peers
from shardline.parallel.shards import Shard

__all__ = ["Share", "Staging"]


class Share:
    """Deals shards that several ranks hold: each to that of its holders which has least so far, the largest first.

    So a copy of the state takes 1/N of it on each of N ranks, under ZeRO-0 as under ZeRO-3.
    """

    def __init__(self, state: Mapping[str, Shard], peers: Peers) -> None:
        held = {
            name: (shard.offsets, shard.local.nbytes)
            for name, shard in state.items()
            if shard.local.numel() or 0 in shard.shape
        }
        holders: dict[tuple[int, str, tuple[int, ...]], list[int]] = {}
        for rank, theirs in enumerate(peers.each(lambda: held)):
            for name, (offsets, size) in theirs.items():
                holders.setdefault((size, name, offsets), []).append(rank)
        load = [0] * peers.size
        self._names: set[str] = set()
        for (size, name, _), ranks in sorted(holders.items(), reverse=True):
            writer = min(ranks, key=lambda rank: load[rank])
            load[writer] += size
            if writer == peers.rank:
                self._names.add(name)

    def of(self, state: Mapping[str, Shard]) -> dict[str, Shard]:
        return {name: shard for name, shard in state.items() if name in self._names}


class Staging:
    """CPU buffers for one state at a time; pinned where the state is on a GPU, so that the copies need not wait for
    each other."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def copy(self, state: Mapping[str, Shard]) -> dict[str, Shard]:
        """Returns `state` as it is now. The next call overwrites what this one returned."""
        on_gpu = False
        for name, shard in state.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != shard.local.shape or buffer.dtype != shard.local.dtype:
                buffer = torch.empty_like(shard.local, device="cpu", pin_memory=shard.local.is_cuda)
                self._buffers[name] = buffer
            on_gpu |= shard.local.is_cuda
            buffer.copy_(shard.local, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        for name in set(self._buffers) - set(state):
            del self._buffers[name]
        return {
            name: Shard(local=self._buffers[name], shape=shard.shape, offsets=shard.offsets)
            for name, shard in state.items()
        }
