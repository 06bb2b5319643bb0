"""Pipeline parallelism: a decoder cut into stages, and the run of a schedule over them.

    ranges = balance(layer_costs, first=embedding_cost, last=head_cost, num_stages=4)
    cut(decoder, ranges[stage], is_first=..., is_last=...)
    pipeline = Pipeline(schedule, modules, group=group, shape=(2, 512, 576), dtype=torch.float32, device=device)
    losses = pipeline.step(micro_batches, call)

Activations go forward and gradients backward between neighbouring stages, on a process group for each direction, so
that on every link messages arrive in the order in which they are awaited. `shardline.parallel.schedules` says in which
order a rank works; this file moves tensors and calls autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from shardline.models.decoder import Decoder
from shardline.parallel.schedules import Action, Schedule
from shardline.parallel.tensor import RowParallelLinear

__all__ = ["Pipeline", "WeightGradients", "balance", "cut"]


def balance(costs: Sequence[float], *, first: float, last: float, num_stages: int) -> list[range]:
    """Returns the layers of each stage, so that the dearest stage is as cheap as can be.

    first, last   what the first and the last stage pay beside their layers: embedding and head
    Every stage gets a layer, except that the last may be the head alone when it is that dear.
    """
    num_layers = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def price(start: int, end: int, stage: int) -> float:
        return sums[end] - sums[start] + (first if stage == 0 else 0) + (last if stage == num_stages - 1 else 0)

    # best[end]: (dearest stage, starts) of the first stages over the first `end` layers
    best: dict[int, tuple[float, list[int]]] = {
        end: (price(0, end, 0), [0]) for end in range(1, num_layers - num_stages + 2)
    }
    for stage in range(1, num_stages):
        best = {
            end: min(
                (max(dearest, price(start, end, stage)), [*starts, start])
                for start, (dearest, starts) in best.items()
                if start < end
            )
            for end in range(stage + 1, num_layers - num_stages + stage + 2)
        }
    starts = best[num_layers][1]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], num_layers], strict=True)]


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


class WeightGradients:
    """Linears whose weights' gradients wait: backward leaves (input, output gradient), `compute` does the product."""

    def __init__(self, module: nn.Module) -> None:
        self._waiting: list[tuple[str, Tensor, Tensor]] = []
        self._parameters = dict(module.named_parameters())
        for name, child in module.named_modules():
            if isinstance(child, RowParallelLinear):
                child.multiply = self._linear(f"{name}.weight")
            elif type(child) is nn.Linear and not name.endswith("lm_head"):  # the loss reads the head's weight itself
                child.forward = _BoundLinear(child, self._linear(f"{name}.weight"))  # type: ignore[method-assign]

    def rebind(self, module: nn.Module) -> None:
        """Takes the parameters anew, after sharding has replaced them."""
        self._parameters = dict(module.named_parameters())

    def take(self) -> list[tuple[str, Tensor, Tensor]]:
        """Returns what the last backward left."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def compute(self, waiting: list[tuple[str, Tensor, Tensor]]) -> None:
        """Adds the weights' gradients of one micro-batch."""
        for name, x, slope in waiting:
            parameter = self._parameters[name]
            gradient: Tensor = torch.mm(slope.flatten(0, -2).T, x.flatten(0, -2)).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                gradient = DTensor.from_local(gradient, mesh, [Partial("avg")] * mesh.ndim).redistribute(
                    placements=parameter.placements
                )
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        waiting.clear()

    def _linear(self, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        def multiply(x: Tensor, weight: Tensor) -> Tensor:
            if torch.is_autocast_enabled(x.device.type):
                dtype = torch.get_autocast_dtype(x.device.type)
                x, weight = x.to(dtype), weight.to(dtype)
            return _DeferredProduct.apply(x, weight, self._waiting if torch.is_grad_enabled() else None, name, self)

        return multiply


class _BoundLinear:
    """The forward of a linear over a product of ours."""

    def __init__(self, linear: nn.Linear, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._linear = linear
        self._multiply = multiply

    def __call__(self, x: Tensor) -> Tensor:
        out = self._multiply(x, self._linear.weight)
        return out if self._linear.bias is None else out + self._linear.bias


class _DeferredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, waiting: object, name: str, owner: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name, ctx.owner = name, owner
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.owner._waiting.append((ctx.name, x, slopes[0]))
        return slopes[0] @ weight, None, None, None, None


class Pipeline:
    """This rank's stages, and the messages between them and their neighbours.

    modules   {stage: module}; module(x_BTD or None, micro-batch) returns x_BTD, or the last stage's loss
    shape     of x_BTD between stages
    """

    def __init__(
        self,
        schedule: Schedule,
        modules: Mapping[int, nn.Module],
        *,
        group: dist.ProcessGroup,
        backward_group: dist.ProcessGroup,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._schedule = schedule
        self._modules = modules
        self._groups = {"F": group, "B": backward_group}
        self._rank = group.rank()
        self._global_ranks = dist.get_process_group_ranks(group)
        self._shape, self._dtype, self._device = shape, dtype, device
        self._deferred = {
            stage: WeightGradients(module) for stage, module in modules.items() if schedule.split_backward
        }

    def rebind(self) -> None:
        """Takes the parameters anew, after sharding has replaced them."""
        for stage, deferred in self._deferred.items():
            deferred.rebind(self._modules[stage])

    def step(self, call: Callable[[int, Tensor | None, int], Tensor], backward: Callable[[int, int], Any]) -> Tensor:
        """Runs the schedule once and returns the sum of the last stage's losses (0 on the other ranks).

        call      (stage, x_BTD or None, micro-batch) -> x_BTD or loss to differentiate
        backward  (stage, micro-batch) -> the context of that backward pass
        """
        return _Run(self, call, backward).all()


class _Run:
    """One step's tensors in flight."""

    def __init__(
        self,
        pipeline: Pipeline,
        call: Callable[[int, Tensor | None, int], Tensor],
        backward: Callable[[int, int], Any],
    ) -> None:
        self._pipeline = pipeline
        self._schedule = pipeline._schedule
        self._call, self._backward = call, backward
        self._inputs: dict[tuple[int, int], Tensor | None] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._here: dict[Action, Tensor] = {}  # what another stage of this rank hands over
        self._weights: dict[tuple[int, int], list[tuple[str, Tensor, Tensor]]] = {}
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._awaited: dict[Action, tuple[dist.Work, Tensor]] = {}
        self._loss = torch.zeros((), device=pipeline._device)

    def all(self) -> Tensor:
        actions = self._schedule.actions[self._pipeline._rank]
        for index, action in enumerate(actions):
            # The next message is awaited while this pass computes; one ahead keeps every link in order.
            for each in actions[index : index + 2]:
                self._await(each)
            if action.kind == "F":
                self._forward(action)
            elif action.kind == "B":
                self._backward_pass(action)
            else:
                key = action.stage, action.micro_batch
                self._pipeline._deferred[action.stage].compute(self._weights.pop(key))
            self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        for work, _ in self._sent:
            work.wait()
        return self._loss

    def _forward(self, action: Action) -> None:
        _, stage, micro_batch = action
        x = self._take(action) if stage else None
        if x is not None:
            x.requires_grad_()
        out = self._call(stage, x, micro_batch)
        if stage + 1 == self._schedule.num_stages:
            self._loss += out.detach()
        else:
            self._give(Action("F", stage + 1, micro_batch), out.detach())
        self._inputs[stage, micro_batch], self._outputs[stage, micro_batch] = x, out

    def _backward_pass(self, action: Action) -> None:
        _, stage, micro_batch = action
        slope = self._take(action) if stage + 1 < self._schedule.num_stages else None
        x, out = self._inputs.pop((stage, micro_batch)), self._outputs.pop((stage, micro_batch))
        with self._backward(stage, micro_batch):
            torch.autograd.backward(out, slope)
        if self._schedule.split_backward:
            self._weights[stage, micro_batch] = self._pipeline._deferred[stage].take()
        if x is not None:
            assert x.grad is not None
            self._give(Action("B", stage - 1, micro_batch), x.grad)

    def _give(self, to: Action, tensor: Tensor) -> None:
        """Sends what the pass `to` waits for."""
        owner = self._schedule.rank_of_stage[to.stage]
        if owner == self._pipeline._rank:
            self._here[to] = tensor
            return
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._pipeline._global_ranks[owner], group=self._pipeline._groups[to.kind])
        assert work is not None
        self._sent.append((work, tensor))

    def _await(self, action: Action) -> None:
        """Begins to receive what a pass needs from another rank, if anything."""
        kind, stage, _ = action
        source = stage - 1 if kind == "F" else stage + 1
        if kind == "W" or not 0 <= source < self._schedule.num_stages or action in self._awaited:
            return
        owner = self._schedule.rank_of_stage[source]
        if owner == self._pipeline._rank:
            return
        tensor = torch.empty(self._pipeline._shape, dtype=self._pipeline._dtype, device=self._pipeline._device)
        work = dist.irecv(tensor, self._pipeline._global_ranks[owner], group=self._pipeline._groups[kind])
        assert work is not None
        self._awaited[action] = work, tensor

    def _take(self, action: Action) -> Tensor:
        """Returns what a pass needs, once it is there."""
        if action in self._here:
            return self._here.pop(action)
        work, tensor = self._awaited.pop(action)
        work.wait()
        return tensor
