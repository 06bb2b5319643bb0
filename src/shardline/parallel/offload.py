"""Where optimizer state lives: on the device, in the host's memory, or in memory-mapped files.

    memory = DiskMemory(Path("runs/my-run/offload/rank-0"))
    exp_avg = memory.zeros((4096, 4096))       # a tensor like any other; its pages come and go
    memory.release(exp_avg)                    # its pages leave this process; the values stay

`HostStream` carries gradients from a GPU and parameters back to it while the host computes.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shardline.config import ShardlineError

__all__ = ["DeviceMemory", "DiskMemory", "HostMemory", "HostStream", "Memory"]


class Memory(Protocol):
    """A place that state is allocated in."""

    def zeros(self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> Tensor: ...

    def release(self, tensor: Tensor) -> None:
        """Says that the tensor, a view of one that was allocated here, is not needed until the next step."""
        ...


class DeviceMemory:
    """The memory of the device that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def zeros(self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self._device)

    def release(self, tensor: Tensor) -> None:
        pass


class HostMemory:
    """The host's memory, pinned where a GPU is, so that copies to and from it run beside its computation."""

    def zeros(self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, pin_memory=torch.cuda.is_available())

    def release(self, tensor: Tensor) -> None:
        pass


class DiskMemory:
    """Files in `folder`, mapped into memory.

    A file loses its name as soon as it is mapped, so that a run that is killed leaves nothing behind; its blocks are
    reserved before, so that a full disk is an error here and not a crash later.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._maps: dict[int, mmap.mmap] = {}

    def zeros(self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.zeros(*shape, dtype=dtype)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise ShardlineError(
                    f"{self._folder} has no room for {size:,} bytes of optimizer state more; free some, put the run on "
                    "another disk, or lower parallel.offload.optimizer_fraction."
                ) from None
            pages = mmap.mmap(file.fileno(), size)
        tensor = torch.frombuffer(pages, dtype=dtype).view(*shape)
        self._maps[tensor.untyped_storage().data_ptr()] = pages
        return tensor

    def release(self, tensor: Tensor) -> None:
        """Drops the pages that hold the tensor from this process: the file has what was written to them."""
        pages = self._maps.get(tensor.untyped_storage().data_ptr())
        if pages is None:
            return
        begin = int(tensor.storage_offset()) * tensor.element_size()
        end = begin + tensor.numel() * tensor.element_size()
        start = begin - begin % mmap.PAGESIZE
        pages.madvise(mmap.MADV_DONTNEED, start, end - start)


class HostStream:
    """Copies between a GPU and pinned memory, on streams of their own: one bucket comes down while another is stepped.

    Where `device` is the CPU the copies are plain ones, made at once.

    fetch(slot, tensors)   starts copying them into that slot's buffer; two slots take turns
    take(slot)             waits for it and returns the copies, in pinned memory
    push(host, target)     starts copying the host's values up
    finish()               the device's own stream waits for all that was pushed
    """

    def __init__(self, device: torch.device, *, num_elements: int) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._events = [torch.cuda.Event() for _ in range(2)]
        self._buffers = [torch.empty(num_elements, dtype=torch.float32, pin_memory=self._on_gpu) for _ in range(2)]
        self._copies: list[list[Tensor]] = [[], []]

    def fetch(self, slot: int, tensors: Sequence[Tensor]) -> None:
        sizes = [tensor.numel() for tensor in tensors]
        parts = self._buffers[slot][: sum(sizes)].split(sizes)
        self._copies[slot] = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        if not self._on_gpu:
            for copy, tensor in zip(self._copies[slot], tensors, strict=True):
                copy.copy_(tensor)
            return
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            for copy, tensor in zip(self._copies[slot], tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._down)
            self._events[slot].record(self._down)

    def take(self, slot: int) -> list[Tensor]:
        if self._on_gpu:
            self._events[slot].synchronize()
        return self._copies[slot]

    def push(self, host: Tensor, target: Tensor) -> None:
        if not self._on_gpu:
            target.copy_(host)
            return
        with torch.cuda.stream(self._up):
            target.copy_(host, non_blocking=True)
        target.record_stream(self._up)

    def finish(self) -> None:
        if self._on_gpu:
            torch.cuda.current_stream(self._device).wait_stream(self._up)
