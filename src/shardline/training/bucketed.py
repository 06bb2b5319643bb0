"""The optimizer of everything but the plain AdamW: it steps a bucket of parameters at a time.

For a bucket it brings together, as fp32 tensors: the values, the gradients and the state. The library's optimizer steps
them, and they go back to where they live:

    values      this rank's parts (`LocalSource`), or whole parameters at their owner (`WholeSource`)
    state       device, pinned host memory or memory-mapped files (`parallel.offload`), in fp32 or bf16
    bf16        stochastically rounded (`training.rounding`), where the run is pure bf16

So no more than one bucket is in memory twice, and none of the combinations needs code of its own. AdamW looks at one
element at a time: its state is stepped in slices of `bucket_elements`. The other optimizers look at whole matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardline.parallel.dealing import largest_first
from shardline.parallel.offload import DeviceMemory, HostMemory, HostStream, Memory
from shardline.parallel.shards import Shard
from shardline.parallel.whole import Place, WholeParameters, local_part
from shardline.training.groups import Kind
from shardline.training.kinds import initial_state
from shardline.training.rounding import StochasticRounding, global_index

__all__ = ["BUCKET_ELEMENTS", "BucketedOptimizer", "LocalSource", "Source", "WholeSource"]

BUCKET_ELEMENTS = 1 << 22
"""16 MiB of each fp32 tensor of a bucket. Slices start at multiples of it, so a slice's arithmetic is the whole's."""


class Source(Protocol):
    """Where values and gradients come from, and go back to.

    shapes      of the whole parameters
    num_ranks   that share the work
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def num_ranks(self) -> int: ...

    def part(self, name: str) -> Shard | None:
        """Returns the part of the parameter that this rank steps (its tensor may be on the meta device), or None."""
        ...

    def fetch(self, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns values and gradients of the parts that this rank steps; what is written to the values is theirs."""
        ...

    def put(self, names: Sequence[str], values: Mapping[str, Tensor]) -> None:
        """Takes the new values, for every rank that holds them."""
        ...


class LocalSource:
    """Each rank steps the part that it holds: for AdamW, whatever the layout. Nothing is sent."""

    num_ranks = 1

    def __init__(self, parameters: Mapping[str, nn.Parameter], placements: Mapping[str, Place]) -> None:
        self._parameters, self._placements = parameters, placements
        self.shapes = {name: self._part(name, parameter).shape for name, parameter in parameters.items()}

    def part(self, name: str) -> Shard | None:
        return self._part(name, self._parameters[name])

    def fetch(self, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        values = {name: self._part(name, self._parameters[name]).local for name in names}
        return values, {name: self._part(name, _gradient(self._parameters[name])).local for name in names}

    def put(self, names: Sequence[str], values: Mapping[str, Tensor]) -> None:
        pass  # the values were the parameters' own memory

    def _part(self, name: str, tensor: Tensor) -> Shard:
        return local_part(tensor, self._placements.get(name))


class WholeSource:
    """Whole parameters, each stepped by its owner."""

    def __init__(self, whole: WholeParameters) -> None:
        self._whole = whole
        self.shapes, self.num_ranks = whole.shapes, whole.num_ranks

    def part(self, name: str) -> Shard | None:
        if not self._whole.owns(name):
            return None
        shape = self.shapes[name]
        return Shard(local=torch.empty(shape, device="meta"), shape=shape, offsets=(0,) * len(shape))

    def fetch(self, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self._whole.gather(names, lambda parameter: parameter), self._whole.gather(names, _gradient)

    def put(self, names: Sequence[str], values: Mapping[str, Tensor]) -> None:
        self._whole.scatter(names, values)


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """What is stepped at once: elements [begin, end) of this rank's part of a parameter, flat; or the part as it is."""

    name: str
    group: dict[str, Any]
    begin: int
    end: int
    flat: bool
    state: dict[str, Any] = field(default_factory=dict)  # where it lives

    @property
    def numel(self) -> int:
        return self.end - self.begin

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.view(-1)[self.begin : self.end] if self.flat else tensor


class BucketedOptimizer(Optimizer):
    """`groups` are dicts of params, names, kind, lr, lr_scale and weight_decay; frozen parameters are in none of them.

    libraries   the library's optimizer of each kind
    device      where this rank's parameters are
    memory      where state lives that is offloaded; None: nothing is
    fraction    share of the state that is offloaded, largest parameters first
    rounding    for bf16 weights: they, and the state in bf16, are rounded stochastically
    copies      AdamW's offloaded parameters are stepped on copies in the host's memory; None: where the device is a GPU
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        source: Source,
        libraries: Mapping[Kind, Optimizer],
        device: torch.device,
        memory: Memory | None = None,
        fraction: float = 1.0,
        rounding: StochasticRounding | None = None,
        bucket_elements: int = BUCKET_ELEMENTS,
        copies: bool | None = None,
    ) -> None:
        super().__init__(groups, {})
        self._copies = device.type == "cuda" if copies is None else copies
        self.step_index = 0  # of the run: the random bits of the rounding depend on it
        self._source = source
        self._libraries = libraries
        self._device = device
        self._rounding = rounding
        self._bucket_elements = bucket_elements
        self._groups = {name: group for group in self.param_groups for name in group["names"]}
        parts = {name: source.part(name) for name in self._groups}
        self._parts = {name: part for name, part in parts.items() if part is not None and part.local.numel()}
        self._state: dict[str, dict[str, Any]] = {}
        self._memory: dict[str, Memory] = {}
        self._masters: dict[str, Tensor] = {}  # fp32 values in the host's memory, while the device has a copy
        self._masters_are_current = False
        self._make_state(memory, fraction)
        self._slices = {name: self._cut(name) for name in self._parts}
        self._buckets = list(self._fetched_together())
        self._stream = HostStream(device, num_elements=bucket_elements) if self._masters else None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Steps every parameter; every rank calls it."""
        assert closure is None, "the loss of a step is known before it"
        for slices in self._slices.values():
            for each in slices[1:]:  # the first one's count is what a checkpoint has
                each.state["step"].copy_(slices[0].state["step"])
        for names in self._buckets:
            values, gradients = self._source.fetch(names)
            mine = [name for name in names if name in self._parts]
            self._step_on_device([name for name in mine if name not in self._masters], values, gradients)
            self._step_on_host([name for name in mine if name in self._masters], values, gradients)
            self._source.put(names, values)
        self._masters_are_current = True

    def shards(self) -> dict[str, Shard]:
        """Returns this rank's state as NAME.KEY: live tensors, to save, or to fill before the next step."""
        self._masters_are_current = False  # whoever fills the state has filled the weights too
        shards: dict[str, Shard] = {}
        for name, state in self._state.items():
            part = self._parts[name]
            for key, value in state.items():
                if hasattr(value, "codes"):  # torchao's blocks
                    shards[f"{name}.{key}.codes"] = Shard.whole(value.codes)
                    shards[f"{name}.{key}.scale"] = Shard.whole(value.scale)
                elif value.ndim and value.shape == part.local.shape:
                    shards[f"{name}.{key}"] = Shard(local=value, shape=part.shape, offsets=part.offsets)
                else:
                    shards[f"{name}.{key}"] = Shard.whole(value)
        return shards

    def _step_on_device(
        self, names: Sequence[str], values: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> None:
        """Where the parameters are: the state comes there if it is elsewhere."""
        slices = [each for name in names for each in self._slices[name]]
        for together in _up_to(self._bucket_elements, slices):
            fresh = [each.of(values[each.name]).float() for each in together]  # fp32 values are stepped in place
            self._run(together, fresh, [each.of(gradients[each.name].contiguous()).float() for each in together])
            for each, value in zip(together, fresh, strict=True):
                self._store(value, each.of(values[each.name]), each, each.name)

    def _step_on_host(
        self, names: Sequence[str], values: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> None:
        """On the CPU, for a GPU: gradients come down a bucket ahead of the step, parameters go up behind it."""
        if not names:
            return
        assert self._stream is not None
        if not self._masters_are_current:
            for name in names:
                self._masters[name].copy_(values[name])
        buckets = list(_up_to(self._bucket_elements, [each for name in names for each in self._slices[name]]))
        for index in range(-1, len(buckets)):
            if index + 1 < len(buckets):
                ahead = buckets[index + 1]
                self._stream.fetch((index + 1) % 2, [each.of(gradients[each.name].contiguous()) for each in ahead])
            if index < 0:
                continue
            masters = [each.of(self._masters[each.name]) for each in buckets[index]]
            self._run(buckets[index], masters, self._stream.take(index % 2))
            for each, master in zip(buckets[index], masters, strict=True):
                self._stream.push(master, each.of(values[each.name]))
        self._stream.finish()

    def _run(self, slices: Sequence[_Slice], values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Steps fp32 values in place by the libraries' optimizers, one call for each group."""
        proxies: dict[int, list[nn.Parameter]] = {}
        states: list[dict[str, Any]] = []
        for each, value, gradient in zip(slices, values, gradients, strict=True):
            proxy = nn.Parameter(value)
            proxy.grad = gradient
            states.append({key: self._bring(home, value.device) for key, home in each.state.items()})
            self._libraries[each.group["kind"]].state[proxy] = states[-1]
            proxies.setdefault(id(each.group), []).append(proxy)
        for group in self.param_groups:
            if id(group) not in proxies:
                continue
            library = self._libraries[group["kind"]]
            inner = library.param_groups[0]
            inner["params"], inner["weight_decay"] = proxies[id(group)], group["weight_decay"]
            if isinstance(inner["lr"], Tensor):  # torchao's
                inner["lr"].fill_(group["lr"])
            else:
                inner["lr"] = group["lr"]
            library.step()
        for library in self._libraries.values():
            library.state.clear()
            library.param_groups[0]["params"] = []
        for each, state in zip(slices, states, strict=True):
            for key, home in each.state.items():
                self._store(state[key], home, each, f"{each.name}.{key}")
                self._memory[each.name].release(home)

    def _bring(self, home: Any, device: torch.device) -> Any:
        """Returns state as the step wants it: its own memory where that will do, otherwise a copy."""
        if type(home) is not Tensor or home.ndim == 0:
            return home
        return home.to(device, torch.float32)

    def _store(self, value: Any, home: Any, each: _Slice, name: str) -> None:
        """Writes a stepped value or state back where it lives, if it was a copy."""
        if value is home or type(home) is not Tensor or value.data_ptr() == home.data_ptr():
            return
        if home.dtype == torch.float32:
            home.copy_(value)
            return
        assert self._rounding is not None
        part = self._parts[each.name]
        index = global_index(
            part.shape,
            offsets=part.offsets,
            sizes=part.local.shape,
            begin=each.begin,
            end=each.end,
            device=value.device,
        )
        rounded = torch.empty(value.shape, dtype=torch.bfloat16, device=value.device)
        self._rounding.copy(value.contiguous(), rounded, step=self.step_index, name=name, index=index)
        home.copy_(rounded)

    def _make_state(self, memory: Memory | None, fraction: float) -> None:
        sizes = [part.local.numel() for part in self._parts.values()]
        moved = largest_first(sizes, fraction=fraction) if memory is not None else set[int]()
        for index, (name, part) in enumerate(self._parts.items()):
            place = memory if memory is not None and index in moved else DeviceMemory(self._device)
            kind: Kind = self._groups[name]["kind"]
            device = self._device
            if isinstance(place, HostMemory) and self._copies and kind == "adamw" and self._rounding is None:
                self._masters[name] = place.zeros(part.local.shape)
                device = torch.device("cpu")
            like = torch.empty(part.local.shape, device=device)
            dtype = torch.float32 if self._rounding is None else torch.bfloat16
            self._state[name] = initial_state(kind, like, place, dtype=dtype)
            self._memory[name] = place

    def _cut(self, name: str) -> list[_Slice]:
        group, numel = self._groups[name], self._parts[name].local.numel()
        flat = group["kind"] == "adamw"
        size = self._bucket_elements if flat else numel
        slices = []
        for begin in range(0, numel, size):
            each = _Slice(name=name, group=group, begin=begin, end=min(begin + size, numel), flat=flat)
            for key, value in self._state[name].items():
                if value.ndim == 0:
                    each.state[key] = value.clone() if begin else value
                else:
                    each.state[key] = each.of(value)
            slices.append(each)
        return slices

    def _fetched_together(self) -> Iterator[list[str]]:
        """Names, the same on every rank, largest first, so that each owner has its share of every bucket."""
        sizes = {name: math.prod(self._source.shapes[name]) for name in self._groups}
        names: list[str] = []
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            if names and sum(sizes[other] for other in names) >= self._bucket_elements * self._source.num_ranks:
                yield names
                names = []
            names.append(name)
        if names:
            yield names


def _up_to(num_elements: int, slices: Sequence[_Slice]) -> Iterator[list[_Slice]]:
    """Yields the slices in runs of at most `num_elements` together; one that is larger comes alone."""
    together: list[_Slice] = []
    for each in slices:
        if together and sum(other.numel for other in together) + each.numel > num_elements:
            yield together
            together = []
        together.append(each)
    if together:
        yield together


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "backward reaches every parameter that is not frozen"
    return parameter.grad
