"""The safetensors files of a Hugging Face folder, planned by shapes alone and written one tensor at a time.

    files = WeightFiles.plan(config, shapes, max_shard_bytes=5 * 10**9)
    for name in files.names:                       # or only those that are this process's to write
        files.write(folder / name, read)           # read(our names) -> our whole tensors
    files.write_index(folder)                      # nothing, where there is one file

Nothing but the tensor that is being written is in memory: not the model, and not a file. The bytes are those that
safetensors' own `save_file` writes (https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from shardline.config import ShardlineError
from shardline.models.config import DecoderConfig
from shardline.models.families import TensorRule, family_of

__all__ = ["INDEX", "WEIGHTS", "Read", "WeightFiles"]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

Read = Callable[[Sequence[str]], list[Tensor]]

# In the order that a file has them: the widest alignment first.
_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """Which tensor goes into which file.

    contents   file name -> the tensors in it, each with what it is made of and its shape and dtype (a meta tensor)
    metadata   what the index says beside; None where the folder has one file and no index
    """

    config: DecoderConfig
    contents: dict[str, dict[str, tuple[TensorRule, Tensor]]]
    metadata: dict[str, Any] | None

    @classmethod
    def plan(cls, config: DecoderConfig, ours: Mapping[str, Tensor], *, max_shard_bytes: int) -> WeightFiles:
        """Returns the files of a model whose tensors have the shapes and dtypes of `ours`, of any device (only meta
        copies are kept). Raises `ShardlineError` when tensors are missing.
        """
        rules = list(family_of(config.family).tensors(config))
        missing = sorted({name for rule in rules for name in rule.ours} - set(ours))
        if missing:
            raise ShardlineError(
                f"Can't write the model: {len(missing)} tensors are missing, the first is {missing[0]}."
            )
        shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in ours.items()}
        theirs = {rule.theirs: rule.op.save([shapes[name] for name in rule.ours], config) for rule in rules}
        split = split_torch_state_dict_into_shards(
            theirs, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_bytes
        )
        by_name = {rule.theirs: (rule, theirs[rule.theirs]) for rule in rules}
        contents = {file: {name: by_name[name] for name in names} for file, names in split.filename_to_tensors.items()}
        total = sum(tensor.numel() for tensor in theirs.values())
        metadata = {"total_parameters": total, **split.metadata} if split.is_sharded else None
        return cls(config=config, contents=contents, metadata=metadata)

    @property
    def names(self) -> list[str]:
        return list(self.contents)

    @property
    def dtype(self) -> str:
        """The dtype that config.json names: that of the first tensor."""
        _, first = next(iter(next(iter(self.contents.values())).values()))
        return str(first.dtype).removeprefix("torch.")

    def write(self, path: Path, read: Read) -> None:
        """Writes the file that `path` names, down to the disk."""
        tensors = self.contents[path.name]
        order = list(_DTYPES)
        names = sorted(tensors, key=lambda name: (order.index(tensors[name][1].dtype), name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            shape = tensors[name][1]
            begin, end = end, end + math.prod(shape.shape) * shape.dtype.itemsize
            header[name] = {
                "dtype": _DTYPES[shape.dtype],
                "shape": list(shape.shape),
                "data_offsets": [begin, end],
            }
        head = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        head += b" " * (-len(head) % 8)
        with path.open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for name in names:
                rule, shape = tensors[name]
                tensor = rule.op.save(read(rule.ours), self.config).detach()
                assert (tensor.shape, tensor.dtype) == (shape.shape, shape.dtype), name
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                del tensor  # before the next one is read
            file.flush()
            os.fsync(file.fileno())

    def write_index(self, folder: Path) -> None:
        """Writes the index where there are several files."""
        if self.metadata is None:
            return
        weight_map = {tensor: file for file, tensors in self.contents.items() for tensor in tensors}
        text = json.dumps({"metadata": self.metadata, "weight_map": weight_map}, indent=2, ensure_ascii=False)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")
