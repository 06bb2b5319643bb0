"""Gives an engine's memory back to the machine, and takes it again.

    released = give_back(kv_tensors(engine))        # the tensors keep their shapes; what they held is lost
    released.num_bytes
    released.take_again()                           # they are zero

On the CPU the pages of a tensor are handed to the kernel and come back as zeros when they are next touched: addresses
stay, so nothing that holds a view is left with a stale one. On an accelerator the storage is shrunk and grown again.
Buffers (rope tables and the like) are never given back: they are small, and no checkpoint holds them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardline.kernels import PackedWeight
from shardline.serving.engine import Engine

__all__ = ["Released", "drop_packed_weights", "give_back", "kv_tensors", "weight_tensors"]

_MADV_DONTNEED = 4


@dataclass(frozen=True, kw_only=True)
class Released:
    """What was given back."""

    num_bytes: int
    _shrunk: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)

    def take_again(self) -> None:
        """Makes the tensors usable, as zeros."""
        for storage, num_bytes in self._shrunk:
            storage.resize_(num_bytes)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()


def kv_tensors(engine: Engine) -> list[Tensor]:
    """Returns every tensor that the KV caches hold, in whatever format they keep them."""
    return [tensor for cache in engine.kv_caches for tensor in cache.tensors()]


def weight_tensors(engine: Engine) -> list[Tensor]:
    """Returns what a reload writes again: the decoder's parameters."""
    return [parameter.data for parameter in engine.decoder.parameters()]


def drop_packed_weights(engine: Engine) -> Released:
    """Drops quantised and reordered weights: a reload puts others in their place."""
    num_bytes = 0
    for module in engine.decoder.modules():
        if isinstance(module, PackedWeight):
            num_bytes += module.num_bytes
            module.release()
    return Released(num_bytes=num_bytes)


def give_back(tensors: Iterable[Tensor]) -> Released:
    """Releases the tensors' memory, each storage once."""
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    num_bytes = sum(storage.nbytes() for storage in storages.values())
    shrunk = []
    for storage in storages.values():
        if storage.device.type == "cpu":
            _drop_pages(storage.data_ptr(), storage.nbytes())
        else:
            shrunk.append((storage, storage.nbytes()))
            storage.resize_(0)
    if shrunk:
        torch.accelerator.empty_cache()
    return Released(num_bytes=num_bytes, _shrunk=shrunk)


def _drop_pages(address: int, num_bytes: int) -> None:
    """Zeroes memory of ours; under Linux its whole pages go back to the kernel."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform != "linux" or end <= first:
        ctypes.memset(address, 0, num_bytes)
        return
    ctypes.memset(address, 0, first - address)
    ctypes.memset(end, 0, address + num_bytes - end)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), "madvise refused to take the memory back")
