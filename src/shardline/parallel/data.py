"""Data parallelism over PyTorch's own parts: DDP, ZeroRedundancyOptimizer and FSDP2, behind one small interface.

    ranks = parallelize(model, layers=..., layout=layout, mesh=mesh, precision="fp32")
    optimizer = ranks.make_optimizer(torch.optim.AdamW, groups, lr=1e-3)
    with ranks.micro_batch(last=True):
        ranks.module(batch).backward()

ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054) by stage:

    0  DDP: every rank holds all
    1  DDP, optimizer state dealt out by whole parameters (ZeroRedundancyOptimizer)
    2  FSDP2 with parameters kept from forward to backward: gradients and optimizer state sharded
    3  FSDP2: parameters sharded too, gathered layer by layer in forward and again in backward

Each of them averages gradients over the data ranks; a loss meant as a sum is therefore scaled by `num_ranks` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardline.parallel.grid import Layout

__all__ = ["DataParallel", "clip_gradients", "full_tensor", "owned_state", "parallelize"]

Precision = Literal["fp32", "bf16", "bf16_pure", "fp16"]


class DataParallel(Protocol):
    """A model laid out over the data ranks.

    module      what a forward pass calls
    num_ranks   the divisor that the gradient average applies
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def num_ranks(self) -> int: ...

    def make_optimizer(self, kind: type[Optimizer], groups: list[dict[str, Any]], **options: Any) -> Optimizer: ...

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """The context of one forward and backward; gradients need to be complete only after the last."""
        ...

    def evaluation(self) -> AbstractContextManager[object]:
        """The context of forward passes that no backward follows."""
        ...


def parallelize(
    model: nn.Module,
    *,
    layers: Iterable[nn.Module],
    layout: Layout,
    mesh: DeviceMesh,
    precision: Precision,
    offload_parameters: bool = False,
) -> DataParallel:
    """Returns `model` laid out; `layers` are the modules that ZeRO-2 and 3 gather one at a time.

    offload_parameters  ZeRO-3: shards, gradients and the optimizer's step are on the CPU; a layer comes up when used
    """
    if offload_parameters:
        # Pinned memory is what a GPU copies from in the background; without one there is nothing to pin for.
        policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        return _Sharded(model, layers, mesh["data"], precision, keep_parameters=False, offload=policy)
    if layout.data == 1:
        return _Single(model, precision)
    if layout.zero <= 1:
        return _Replicated(model, mesh, precision, shard_optimizer=layout.zero == 1)
    return _Sharded(model, layers, mesh["data"], precision, keep_parameters=layout.zero == 2)


class _Single:
    """One data rank: nothing to average and nothing to shard, whatever the stage."""

    num_ranks = 1

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.module = model
        self._precision = precision

    def make_optimizer(self, kind: type[Optimizer], groups: list[dict[str, Any]], **options: Any) -> Optimizer:
        return kind(groups, **options)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        return _autocast(self._precision)

    def evaluation(self) -> AbstractContextManager[object]:
        return _autocast(self._precision)


class _Replicated:
    """Stages 0 and 1."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, precision: Precision, *, shard_optimizer: bool) -> None:
        group = mesh["data"].get_group()
        self.num_ranks = group.size()
        self._group = group
        self._bare = model
        self._precision = precision
        self._shard_optimizer = shard_optimizer
        # Gradients as views into the buckets: no second copy of them.
        self.module = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)

    def make_optimizer(self, kind: type[Optimizer], groups: list[dict[str, Any]], **options: Any) -> Optimizer:
        if not self._shard_optimizer:
            return kind(groups, **options)
        return ZeroRedundancyOptimizer(groups, optimizer_class=kind, process_group=self._group, **options)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        assert isinstance(self.module, DistributedDataParallel)
        with nullcontext() if last else self.module.no_sync(), _autocast(self._precision):
            yield

    def evaluation(self) -> AbstractContextManager[object]:
        return _autocast(self._precision)


class _Sharded:
    """Stages 2 and 3. Every micro-batch reduce-scatters, so that full gradients never pile up.

    In a step of several micro-batches stage 2 gathers the parameters once, stage 3 twice for each micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
        mesh: DeviceMesh,
        precision: Precision,
        *,
        keep_parameters: bool,
        offload: OffloadPolicy | None = None,
    ) -> None:
        policy = MixedPrecisionPolicy()
        if precision != "fp32":
            compute = torch.float16 if precision == "fp16" else torch.bfloat16
            policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload or OffloadPolicy()}
        for layer in layers:
            fully_shard(layer, reshard_after_forward=not keep_parameters, **options)
        fully_shard(model, reshard_after_forward=not keep_parameters, **options)
        self.module = model
        self.num_ranks = mesh.size()
        self._keep_parameters = keep_parameters

    def make_optimizer(self, kind: type[Optimizer], groups: list[dict[str, Any]], **options: Any) -> Optimizer:
        return kind(groups, **options)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        if self._keep_parameters:
            assert isinstance(self.module, FSDPModule)
            self.module.set_reshard_after_backward(last)
        return nullcontext()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        try:
            yield
        finally:
            # Without a backward nothing reshards what forward gathered, and a save would see whole parameters.
            for module in self.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def _autocast(precision: Precision) -> AbstractContextManager[object]:
    if precision in ("fp32", "bf16_pure"):
        return nullcontext()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autocast(kind, dtype=torch.float16 if precision == "fp16" else torch.bfloat16)


def clip_gradients(parameters: Iterable[nn.Parameter], *, max_norm: float) -> float:
    """Scales all gradients down to a global norm of `max_norm` (0: leaves them) and returns the norm before."""
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


def owned_state(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Returns {parameter: state} of the parameters whose state this rank holds, made if it is not there yet."""
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    for group in inner.param_groups:
        for parameter in group["params"]:
            if not inner.state[parameter]:
                inner.state[parameter].update(
                    step=torch.tensor(0.0),
                    exp_avg=torch.zeros_like(parameter, requires_grad=False),
                    exp_avg_sq=torch.zeros_like(parameter, requires_grad=False),
                )
    return dict(inner.state)


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the whole tensor on the CPU; every rank of a sharded one must call."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
