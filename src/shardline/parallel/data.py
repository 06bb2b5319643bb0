"""Data parallelism over PyTorch's own parts: DDP, ZeroRedundancyOptimizer and FSDP2, behind one small interface.

    ranks = parallelize(model, layers=..., layout=layout, mesh=mesh, precision="fp32", device=device, fill=fill)
    optimizer = ranks.make_optimizer(torch.optim.AdamW, groups, lr=1e-3)
    with ranks.micro_batch(last=True):
        loss = ranks.module(batch)
    ranks.prepare_backward(last=True)
    loss.backward()
    ranks.finish_gradients()

ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054) by stage:

    0  DDP: every rank holds all
    1  DDP, optimizer state dealt out by whole parameters (ZeroRedundancyOptimizer)
    2  FSDP2 with parameters kept from forward to backward: gradients and optimizer state sharded
    3  FSDP2: parameters sharded too, gathered layer by layer in forward and again in backward

Each of them averages gradients over the data ranks; a loss meant as a sum is therefore scaled by `num_ranks` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardline.parallel.grid import Layout

__all__ = ["DataParallel", "clip_gradients", "gradient_norm", "local_tensor", "owned_state", "parallelize"]

Precision = Literal["fp32", "bf16", "bf16_pure", "fp16"]

_BUCKET_BYTES = 25 << 20  # of gradients that are reduced together, as DDP does it


class DataParallel(Protocol):
    """A model laid out over the data ranks.

    module       what a forward pass calls
    num_ranks    the divisor that the gradient average applies
    num_copies   data ranks that hold the same gradient afterwards
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def num_copies(self) -> int: ...

    def make_optimizer(self, kind: type[Optimizer], groups: list[dict[str, Any]], **options: Any) -> Optimizer: ...

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """The context of a forward pass; gradients need to be complete only after the last one's backward pass."""
        ...

    def prepare_backward(self, *, last: bool) -> None:
        """To be called before each backward pass; `last`: of the step."""
        ...

    def finish_gradients(self) -> None:
        """Completes what the backward passes have not averaged yet."""
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
    device: torch.device,
    fill: Callable[[], None],
    offload_parameters: bool = False,
) -> DataParallel:
    """Returns a model that was on the meta device laid out and filled.

    layers              the modules that ZeRO-2 and 3 gather one at a time
    fill                writes the values into the parameters, once their memory is there
    offload_parameters  ZeRO-3: shards, gradients and the optimizer's step are on the CPU; a layer comes up when used
    """
    if offload_parameters or (layout.zero >= 2 and layout.data > 1):
        # Pinned memory is what a GPU copies from in the background; without one there is nothing to pin for.
        offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload_parameters else OffloadPolicy()
        sharded = _Sharded(
            model, layers, layout.zero_mesh(mesh), precision, keep_parameters=layout.zero == 2, offload=offload
        )
        model.to_empty(device=torch.device("cpu") if offload_parameters else device)
        fill()
        return sharded
    model.to_empty(device=device)
    fill()
    if layout.data == 1:
        return _Single(model, precision)
    return _Replicated(model, mesh, precision, shard_optimizer=layout.zero == 1, overlap=layout.pipeline == 1)


class _Single:
    """One data rank: nothing to average and nothing to shard, whatever the stage."""

    num_ranks = num_copies = 1

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.module = model
        self._precision = precision

    def make_optimizer(self, kind: type[Optimizer], groups: list[dict[str, Any]], **options: Any) -> Optimizer:
        return kind(groups, **options)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        return _autocast(self._precision)

    def prepare_backward(self, *, last: bool) -> None: ...

    def finish_gradients(self) -> None: ...

    def evaluation(self) -> AbstractContextManager[object]:
        return _autocast(self._precision)


class _Replicated:
    """Stages 0 and 1.

    overlap   DDP reduces buckets while backward goes on. It expects one backward pass for each forward pass, which a
              pipeline does not give it: there the buckets are reduced once, after the last
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, precision: Precision, *, shard_optimizer: bool, overlap: bool
    ) -> None:
        group = mesh["data"].get_group()
        self.num_ranks = self.num_copies = group.size()
        self._group = group
        self._precision = precision
        self._shard_optimizer = shard_optimizer
        self._overlap = overlap
        self.module = model
        if overlap:  # gradients as views into the buckets: no second copy of them
            self.module = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)

    def make_optimizer(self, kind: type[Optimizer], groups: list[dict[str, Any]], **options: Any) -> Optimizer:
        if not self._shard_optimizer:
            return kind(groups, **options)
        return ZeroRedundancyOptimizer(groups, optimizer_class=kind, process_group=self._group, **options)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        no_sync = nullcontext()
        if isinstance(self.module, DistributedDataParallel) and not last:
            no_sync = self.module.no_sync()
        with no_sync, _autocast(self._precision):
            yield

    def prepare_backward(self, *, last: bool) -> None: ...

    def finish_gradients(self) -> None:
        if self._overlap:
            return
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        pending = []
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            pending.append((bucket, flat, dist.all_reduce(flat, group=self._group, async_op=True)))
        for bucket, flat, work in pending:
            work.wait()
            flat /= self.num_ranks
            for gradient, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

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
        offload: OffloadPolicy,
    ) -> None:
        policy = MixedPrecisionPolicy()
        if precision != "fp32":
            compute = torch.float16 if precision == "fp16" else torch.bfloat16
            policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
        for layer in layers:
            fully_shard(layer, reshard_after_forward=not keep_parameters, **options)
        fully_shard(model, reshard_after_forward=not keep_parameters, **options)
        self.module = model
        self._gathering = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.num_ranks = mesh.size()
        self.num_copies = mesh.size(0) if mesh.ndim == 2 else 1
        self._keep_parameters = keep_parameters

    def make_optimizer(self, kind: type[Optimizer], groups: list[dict[str, Any]], **options: Any) -> Optimizer:
        return kind(groups, **options)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def prepare_backward(self, *, last: bool) -> None:
        if self._keep_parameters:
            assert isinstance(self.module, FSDPModule)
            self.module.set_reshard_after_backward(last)

    def finish_gradients(self) -> None:
        if self._keep_parameters:
            self._reshard()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._reshard()

    def _reshard(self) -> None:
        """Drops what forward gathered and no backward pass has dropped, or a save would see whole parameters."""
        for module in self._gathering:
            module.reshard()


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups tensors of one dtype into buckets of about `_BUCKET_BYTES`."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size > _BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
    if bucket:
        yield bucket


def _autocast(precision: Precision) -> AbstractContextManager[object]:
    if precision in ("fp32", "bf16_pure"):
        return nullcontext()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autocast(kind, dtype=torch.float16 if precision == "fp16" else torch.bfloat16)


@torch.no_grad()
def gradient_norm(parameters: Mapping[nn.Parameter, float], *, total: Callable[[Tensor], Tensor]) -> float:
    """Returns the norm of the whole model's gradient, the same on every rank.

    parameters   this rank's, each with the share of its gradient that counts here, so that copies on several ranks
                 count once in all
    total        sums a tensor over all ranks
    """
    squared = torch.zeros(1, dtype=torch.float64)
    held = [(local_tensor(each.grad), share) for each, share in parameters.items() if each.grad is not None]
    if held:
        norms = torch._foreach_norm([gradient for gradient, _ in held])
        shares = torch.tensor([share for _, share in held], dtype=torch.float64)
        squared[0] = (torch.stack([norm.float() for norm in norms]).double().cpu().square() * shares).sum()
    return total(squared).sqrt().item()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], *, norm: float, max_norm: float) -> None:
    """Scales all gradients down so that their global norm, now `norm`, is at most `max_norm` (0: leaves them)."""
    if max_norm <= 0 or norm <= max_norm:
        return
    gradients = [local_tensor(each.grad) for each in parameters if each.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))


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


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's memory of a tensor that FSDP2 may have cut."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
