"""Pipeline parallelism: a decoder cut into stages, and the run of a schedule over them.

    cut(decoder, ranges[stage], is_first=..., is_last=...)
    pipeline = Pipeline(schedule, modules, mesh=mesh, shape=(2, 512, 576), dtype=torch.float32, device=device)
    loss = pipeline.step(call, loss_scale=scale, prepare=prepare)

Activations go forward and gradients backward between neighbouring stages, on a process group for each direction, so
that on every link messages arrive in the order in which they are awaited. `shardline.parallel.schedules` says in which
order a rank works; this file moves tensors and calls autograd.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from shardline.models.decoder import Decoder
from shardline.parallel.grid import make_groups
from shardline.parallel.schedules import Action, Schedule
from shardline.parallel.tensor import RowParallelLinear

__all__ = ["Pipeline", "cut"]


def cut(decoder: Decoder, layers: range, *, is_first: bool, is_last: bool) -> None:
    """Leaves of a decoder what one stage computes; the names of what stays do not change."""
    trunk = decoder.model
    for layer in list(trunk.layers):
        if layer.index not in layers:
            del trunk.layers._modules[str(layer.index)]
    if not is_first:
        for name in ("embed_positions", "embed_norm", "project_in"):
            if hasattr(trunk, name):
                delattr(trunk, name)
        if not (is_last and decoder.config.tie_word_embeddings):
            del trunk.embed_tokens
    if not is_last:
        for owner, name in ((trunk, "norm"), (trunk, "project_out"), (decoder, "lm_head")):
            if hasattr(owner, name):
                delattr(owner, name)


class _WeightGradients:
    """Linears whose weights' gradients wait: backward leaves (input, output gradient), `compute` does the product."""

    def __init__(self, module: nn.Module) -> None:
        self.waiting: list[_Product] = []
        self._parameters = dict(module.named_parameters())
        for name, child in module.named_modules():
            if isinstance(child, RowParallelLinear):
                child.multiply = self._product(f"{name}.weight")
            # The loss reads the head's weight itself.
            elif isinstance(child, nn.Linear) and not name.endswith("lm_head"):
                child.forward = _linear(child, self._product(f"{name}.weight"))  # type: ignore[method-assign]

    def take(self) -> list[_Product]:
        """Returns what the last backward left."""
        waiting, self.waiting = self.waiting, []
        return waiting

    @torch.no_grad()
    def compute(self, products: list[_Product]) -> None:
        """Adds the weights' gradients of one micro-batch, averaged over data ranks where FSDP2 shards the weights."""
        for name, x, slope in products:
            parameter = self._parameters[name]
            if not parameter.requires_grad:
                continue
            gradient: Tensor = torch.mm(slope.flatten(0, -2).T, x.flatten(0, -2)).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                gradient = DTensor.from_local(gradient, mesh, [Partial("avg")] * mesh.ndim).redistribute(
                    placements=parameter.placements
                )
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def _product(self, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        @torch.compiler.disable  # what backward leaves behind here is no tensor of a graph
        def multiply(x: Tensor, weight: Tensor) -> Tensor:
            if torch.is_autocast_enabled(x.device.type):
                dtype = torch.get_autocast_dtype(x.device.type)
                x, weight = x.to(dtype), weight.to(dtype)
            return _DeferredProduct.apply(x, weight, name, self)

        return multiply


_Product = tuple[str, Tensor, Tensor]


def _linear(linear: nn.Linear, multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        out = multiply(x, linear.weight)
        return out if linear.bias is None else out + linear.bias

    return forward


class _DeferredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str, owner: _WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name, ctx.owner = name, owner
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.owner.waiting.append((ctx.name, x.detach(), slopes[0]))
        return slopes[0] @ weight, None, None, None


class Pipeline:
    """This rank's stages, and the messages between them and their neighbours.

    modules   stage -> module, laid out over data ranks already
    shape     of x_BTD between stages
    """

    def __init__(
        self,
        schedule: Schedule,
        modules: nn.ModuleDict,
        *,
        mesh: DeviceMesh,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.schedule = schedule
        self.rank = mesh["pipeline"].get_local_rank()
        self.global_ranks = dist.get_process_group_ranks(mesh["pipeline"].get_group())
        backward = make_groups(mesh.mesh.flatten(1).T.tolist())
        assert backward is not None
        self.groups = {"F": mesh["pipeline"].get_group(), "B": backward}
        self.shape, self.dtype, self.device = shape, dtype, device
        self._open_links()
        self.deferred: dict[int, _WeightGradients] = {}
        if schedule.split_backward:
            self.deferred = {stage: _WeightGradients(modules[str(stage)]) for stage in schedule.stages_of(self.rank)}

    def _open_links(self) -> None:
        """Sends something over every link once, one after the other.

        NCCL makes a pair's connection at its first message and waits for the other side: in the middle of a schedule,
        where a rank awaits one message ahead, that other side may be waiting too.
        """
        stages = self.schedule.rank_of_stage
        nothing = torch.zeros(1, device=self.device)
        for source, target in sorted({(a, b) for a, b in itertools.pairwise(stages) if a != b}):
            for group, sender, receiver in ((self.groups["F"], source, target), (self.groups["B"], target, source)):
                if self.rank == sender:
                    dist.send(nothing, self.global_ranks[receiver], group=group)
                if self.rank == receiver:
                    dist.recv(nothing, self.global_ranks[sender], group=group)

    def step(
        self,
        call: Callable[[int, Tensor | None, int], Tensor],
        *,
        loss_scale: float,
        prepare: Callable[..., None],
    ) -> Tensor:
        """Runs the schedule once and returns the sum of the last stage's losses, fp32 (0 on the other ranks).

        call         (stage, x_BTD or None, micro-batch) -> x_BTD for the next stage, or the loss
        loss_scale   what each loss is multiplied by before its backward pass
        prepare      called before every backward pass with `last`, whether it is this rank's last of the step
        """
        return _Step(self, call, loss_scale=loss_scale, prepare=prepare).run()

    def forward(self, call: Callable[[int, Tensor | None], Tensor]) -> Tensor:
        """Runs one batch forward through all stages, without gradients; returns its loss, or 0 on the other ranks."""
        loss = torch.zeros((), device=self.device)
        here: Tensor | None = None
        for stage, owner in enumerate(self.schedule.rank_of_stage):
            if owner != self.rank:
                continue
            x = here
            if stage and self.schedule.rank_of_stage[stage - 1] != self.rank:
                x = torch.empty(self.shape, dtype=self.dtype, device=self.device)
                source = self.schedule.rank_of_stage[stage - 1]
                dist.recv(x, self.global_ranks[source], group=self.groups["F"])
            out = call(stage, x)
            if stage + 1 == self.schedule.num_stages:
                loss = out
            elif self.schedule.rank_of_stage[stage + 1] == self.rank:
                here = out
            else:
                target = self.schedule.rank_of_stage[stage + 1]
                dist.send(out.to(self.dtype).contiguous(), self.global_ranks[target], group=self.groups["F"])
        return loss


class _Step:
    """One step's tensors in flight."""

    def __init__(
        self,
        pipeline: Pipeline,
        call: Callable[[int, Tensor | None, int], Tensor],
        *,
        loss_scale: float,
        prepare: Callable[..., None],
    ) -> None:
        self._pipeline, self._schedule = pipeline, pipeline.schedule
        self._call, self._prepare = call, prepare
        self._loss_scale = loss_scale
        self._actions = self._schedule.actions[pipeline.rank]
        self._backward_left = sum(action.kind == "B" for action in self._actions)
        self._inputs: dict[tuple[int, int], Tensor | None] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._products: dict[tuple[int, int], list[_Product]] = {}
        self._here: dict[Action, Tensor] = {}  # what another stage of this rank hands over
        self._awaited: dict[Action, tuple[dist.Work, Tensor]] = {}
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._loss = torch.zeros((), device=pipeline.device)

    def run(self) -> Tensor:
        for index, action in enumerate(self._actions):
            # The next message is awaited while this pass computes; one ahead keeps every link in order.
            for each in self._actions[index : index + 2]:
                self._await(each)
            if action.kind == "F":
                self._forward(action)
            elif action.kind == "B":
                self._backward(action)
            else:
                key = action.stage, action.micro_batch
                self._pipeline.deferred[action.stage].compute(self._products.pop(key))
            self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        for work, _ in self._sent:
            work.wait()
        return self._loss

    def _forward(self, action: Action) -> None:
        _, stage, micro_batch = action
        x = self._take(action).requires_grad_() if stage else None
        out = self._call(stage, x, micro_batch)
        if stage + 1 == self._schedule.num_stages:
            self._loss += out.detach().float()
            out = out.float() * self._loss_scale
        else:
            self._give(Action("F", stage + 1, micro_batch), out.detach().to(self._pipeline.dtype))
        self._inputs[stage, micro_batch], self._outputs[stage, micro_batch] = x, out

    def _backward(self, action: Action) -> None:
        _, stage, micro_batch = action
        slope = self._take(action) if stage + 1 < self._schedule.num_stages else None
        x, out = self._inputs.pop((stage, micro_batch)), self._outputs.pop((stage, micro_batch))
        self._backward_left -= 1
        self._prepare(last=self._backward_left == 0)
        if out.requires_grad:  # a first stage whose weights are all frozen has no backward pass
            torch.autograd.backward(out, None if slope is None else slope.to(out.dtype))
        if self._schedule.split_backward:
            self._products[stage, micro_batch] = self._pipeline.deferred[stage].take()
        if x is not None:
            assert x.grad is not None
            self._give(Action("B", stage - 1, micro_batch), x.grad)

    def _give(self, to: Action, tensor: Tensor) -> None:
        """Hands a pass what it waits for, or sends it there."""
        owner = self._schedule.rank_of_stage[to.stage]
        if owner == self._pipeline.rank:
            self._here[to] = tensor
            return
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._pipeline.global_ranks[owner], group=self._pipeline.groups[to.kind])
        assert work is not None
        self._sent.append((work, tensor))

    def _await(self, action: Action) -> None:
        """Begins to receive what a pass needs from another rank, if anything."""
        kind, stage, _ = action
        source = stage - 1 if kind == "F" else stage + 1
        if kind == "W" or not 0 <= source < self._schedule.num_stages or action in self._awaited:
            return
        owner = self._schedule.rank_of_stage[source]
        if owner == self._pipeline.rank:
            return
        tensor = torch.empty(self._pipeline.shape, dtype=self._pipeline.dtype, device=self._pipeline.device)
        work = dist.irecv(tensor, self._pipeline.global_ranks[owner], group=self._pipeline.groups[kind])
        assert work is not None
        self._awaited[action] = work, tensor

    def _take(self, action: Action) -> Tensor:
        """Returns what a pass needs, once it is there."""
        if action in self._here:
            return self._here.pop(action)
        work, tensor = self._awaited.pop(action)
        work.wait()
        return tensor
