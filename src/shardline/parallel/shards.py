"""A rank's part of a tensor, and where it lies in the whole: what checkpoints save and load, whatever the layout.

    Shard(local=rows_3_to_5, shape=(8, 16), offsets=(3, 0))     # rows 3, 4 and 5 of an 8 x 16 tensor
    Shard.whole(tensor)

Shards follow the protocol of `torch.distributed.checkpoint` for objects that it plans saves and loads of; its planners
find their tensors by `SaveShards` and `LoadShards`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["LoadShards", "SaveShards", "Shard"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """`local` lies at `offsets` of a tensor of `shape`; it may be empty. Ranks may hold equal shards (replicas)."""

    local: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Shard:
        return cls(local=tensor, shape=tuple(tensor.shape), offsets=(0,) * tensor.ndim)

    @classmethod
    def of(
        cls, tensor: Tensor, *, shape: tuple[int, ...] | None = None, offsets: tuple[int, ...] | None = None
    ) -> Shard:
        """Returns the shard of a tensor that FSDP2 may have cut; it lies at `offsets` of a tensor of `shape`."""
        tensor = tensor.detach()
        shape = tuple(tensor.shape) if shape is None else shape
        offsets = (0,) * tensor.ndim if offsets is None else offsets
        if isinstance(tensor, DTensor):
            _, inner = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            offsets = tuple(outer + own for outer, own in zip(offsets, inner, strict=True))
            tensor = tensor.to_local()
        return cls(local=tensor, shape=shape, offsets=offsets)

    def part_of(self, whole: Tensor) -> Tensor:
        """Returns the part of `whole` that lies where this shard does."""
        return whole[tuple(slice(at, at + size) for at, size in zip(self.offsets, self.local.shape, strict=True))]

    def size(self) -> torch.Size:
        """Returns the whole tensor's size, which a checkpoint's reader compares."""
        return torch.Size(self.shape)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        if not self.local.numel() and 0 not in self.shape:
            return []
        data = TensorWriteData(
            chunk=self._chunk(),
            properties=TensorProperties.create_from_tensor(self.local),
            size=self.size(),
        )
        return [WriteItem(index=self._index(fqn), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()] if self.local.numel() else []

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.local.size())

    def _index(self, fqn: str) -> MetadataIndex:
        return MetadataIndex(fqn, torch.Size(self.offsets))


class SaveShards(DefaultSavePlanner):
    """Writes a state of shards, each distinct one once."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].local


class LoadShards(DefaultLoadPlanner):
    """Fills the tensors of a state of shards in place, from shards cut in any other way."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        # The inherited one copies objects that it does not know, and the copies would be filled.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local
