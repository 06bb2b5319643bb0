"""Memory of a training step without allocating it: the real trainer runs on fake tensors in a fake process group.

    peak = exact_memory(config, preset("llama-3.1-8b"), world_size=64, rank=0)
    peak.step_bytes                     # most bytes of tensors at once in a step

What is counted is what the step's own code asks torch for, storage by storage: no formula of ours is in between, so it
checks the closed form (`planning.memory`). Large tensors are fake (torch's FakeTensorMode): they have a shape, a dtype
and a storage's size, but no bytes; small ones are real, so that code that looks at values goes on. Temporary memory
inside of a kernel, the allocator's rounding and the process itself are not counted.

DDP's reducer refuses a fake process group, so ZeRO-0 and 1 work with one data rank only. A mixture routes by values.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardline.config import InfeasibleError, RunConfig
from shardline.models.config import DecoderConfig
from shardline.parallel.grid import Layout
from shardline.parallel.heartbeat import Heartbeat
from shardline.parallel.world import World
from shardline.text.rows import Batch, PackedDataset
from shardline.training.trainer import Trainer

__all__ = ["ExactMemory", "exact_memory"]

_REAL_BYTES = 1 << 16  # tensors up to this size are real


@dataclass(frozen=True, kw_only=True)
class ExactMemory:
    """Bytes of tensors on one rank.

    build_bytes  most at once while the model is made and laid out
    first_bytes  in the first step, which makes the optimizer's state
    step_bytes   in every step from then on
    kept_bytes   between steps
    """

    build_bytes: int
    first_bytes: int
    step_bytes: int
    kept_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.first_bytes, self.step_bytes)


def exact_memory(config: RunConfig, architecture: DecoderConfig, *, world_size: int, rank: int = 0) -> ExactMemory:
    """Returns what one of `world_size` ranks would hold; takes seconds, and little memory for a model of any size.

    Raises `InfeasibleError` for layouts that need DDP and for mixtures, and whatever the trainer raises for those it
    refuses.
    """
    if architecture.num_experts:
        raise InfeasibleError(
            f"How many tokens each of {architecture.num_experts} experts gets depends on values, and fake tensors "
            "have none; read the closed form's prediction."
        )
    layout = Layout.resolve(config.parallel, world_size=world_size)
    if layout.data > 1 and layout.zero < 2:
        raise InfeasibleError(
            f"parallel.zero = {layout.zero} over {layout.data} data ranks is DDP, which can't run in a fake process "
            "group; set parallel.zero to 2 or 3, or read the closed form's prediction."
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    heartbeat = Heartbeat(rank=rank)
    try:
        with _Ledger() as ledger:
            world = _FakeWorld(
                rank=rank, size=world_size, local_rank=0, device=torch.device("cpu"), heartbeat=heartbeat
            )
            rows: Any = _Rows(config.data.sequence_length)
            trainer = Trainer(config=config, world=world, architecture=architecture, rows=rows, heldout=None)
            build = ledger.take_peak()
            trainer.train_step()
            first = ledger.take_peak()
            trainer.train_step()
            step = ledger.take_peak()
            kept = ledger.held_bytes()
            del trainer
        return ExactMemory(build_bytes=build, first_bytes=first, step_bytes=step, kept_bytes=kept)
    finally:
        heartbeat.close("ended")
        dist.destroy_process_group()


class _FakeWorld(World):
    """Sums of other ranks are not there to be had; ones do in their place."""

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType, *, name: str = "all-reduce") -> Tensor:
        with unset_fake_temporarily():
            return torch.ones(values.shape, dtype=values.dtype)


class _Rows(PackedDataset):
    """Rows of one document each, as many as are asked for."""

    def __init__(self, sequence_length: int) -> None:
        self.sequence_length = sequence_length
        self.num_rows = 1 << 12

    def batch(self, rows: Any) -> Batch:
        shape = len(rows), self.sequence_length
        return Batch(
            tokens_BT=np.ones(shape, dtype=np.int64),
            targets_BT=np.ones(shape, dtype=np.int64),
            documents_BT=np.zeros(shape, dtype=np.int32),
            positions_BT=np.tile(np.arange(shape[1], dtype=np.int64), (shape[0], 1)),
        )


class _Ledger(TorchDispatchMode):
    """Makes large tensors fake, and keeps account of the storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._sizes: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._resized: weakref.WeakSet[Any] = weakref.WeakSet()
        self._held = self._peak = 0

    def take_peak(self) -> int:
        """Returns the most bytes at once since the last call."""
        peak, self._peak = self._peak, self._held
        return peak

    def held_bytes(self) -> int:
        """Returns the bytes that are alive now."""
        self._recount()
        return self._held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in inputs)
        if is_fake and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1  # a look at a value that is not there
        may_be_large = not is_fake and (not inputs or any(leaf.is_meta for leaf in inputs))
        result = self._make(func, args, kwargs) if may_be_large else func(*args, **kwargs)
        communicates = func.namespace in ("fsdp", "c10d", "_c10d_functional")
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._enter(leaf, may_resize=communicates)
        if communicates:
            for leaf in inputs:
                self._enter(leaf, may_resize=True)
            self._recount()
        return result

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a factory: its tensors are fake where they are large."""
        with self._fake:
            result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and not leaf.is_meta]
        if any(leaf.numel() * leaf.element_size() > _REAL_BYTES for leaf in made):
            return result
        return func(*args, **kwargs)

    def _enter(self, tensor: Tensor, *, may_resize: bool) -> None:
        if tensor.is_meta and not isinstance(tensor, FakeTensor):
            return
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage not in self._sizes:
            size = [storage.nbytes()]
            self._sizes[storage] = size
            weakref.finalize(storage, self._leave, size)
            self._grow(size[0])
        if may_resize:
            self._resized.add(storage)

    def _leave(self, size: list[int]) -> None:
        self._held -= size[0]

    def _grow(self, size: int) -> None:
        self._held += size
        self._peak = max(self._peak, self._held)

    def _recount(self) -> None:
        """Looks at what may have been resized: FSDP frees and makes again by that, and no operator shows it."""
        for storage in self._resized:
            size, now = self._sizes[storage], storage.nbytes()
            if now != size[0]:
                size[0], change = now, now - size[0]
                self._grow(change)
