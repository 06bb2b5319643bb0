"""The tensors in a checkpoint's `state/`, read one at a time and whole, by one process, whatever layout wrote them.

stored = StoredState(checkpoint / "state")
stored.shapes("model.")                                  # {name without the prefix: meta tensor}
stored.read("model.model.norm.weight")                   # a whole tensor on the CPU
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardline.parallel.shards import LoadShards, Shard

__all__ = ["StoredState"]


class StoredState:
    def __init__(self, folder: Path) -> None:
        self._reader = FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def shapes(self, prefix: str) -> dict[str, Tensor]:
        """Returns {name without `prefix`: meta tensor of its shape and dtype}."""
        return {
            name.removeprefix(prefix): torch.empty(each.size, dtype=each.properties.dtype, device="meta")
            for name, each in self._metadata.state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(each, TensorStorageMetadata)
        }

    def read(self, name: str) -> Tensor:
        """Returns the whole tensor; beside it no more than one of its stored parts is in memory."""
        meta = self.shapes(name)[""]
        tensor = torch.empty_like(meta, device="cpu")
        planner = LoadShards()
        planner.set_up_planner({name: Shard.whole(tensor)}, self._metadata, is_coordinator=True)
        self._reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        return tensor
