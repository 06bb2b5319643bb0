"""Whole parameters out of the parts that ranks hold: for optimizers that look at more than one element at a time.

    whole = WholeParameters(decoder.named_parameters(), placements=placements, group=group)
    values = whole.gather(names, lambda parameter: parameter)          # what this rank owns of them, whole
    whole.scatter(names, values)                                       # every holder's part is overwritten

Each parameter has one owner among the ranks of `group` (the data x tensor ranks of a pipeline stage), dealt out by
size times `weights`, which says how much is kept for an element of it. A gather and a scatter are one all-to-all each.
Where the owner holds the whole parameter anyway its own tensor is handed out, not a copy. Which ranks hold which parts
is asked once, so that any layout will do: replicas, FSDP2's rows, tensor-parallel rows or columns, and parts of parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardline.parallel.dealing import deal
from shardline.parallel.shards import Shard

__all__ = ["Place", "WholeParameters", "local_part"]

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) of a part."""


class Place(Protocol):
    """Where this rank's tensor-parallel part of a parameter lies in the whole (`parallel.tensor.Placement`)."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def offsets(self) -> tuple[int, ...]: ...


def local_part(tensor: Tensor, place: Place | None) -> Shard:
    """Returns this rank's part of a parameter, or of a tensor like it, without place: all that its data ranks hold."""
    if place is None:
        return Shard.of(tensor)
    return Shard.of(tensor, shape=place.shape, offsets=place.offsets)


class WholeParameters:
    """The parameters of a pipeline stage, who holds which part of each, and who owns it."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        placements: Mapping[str, Place],
        group: dist.ProcessGroup | None,
        weights: Mapping[str, int] | None = None,
    ) -> None:
        self._parameters = dict(parameters)
        self._placements = placements
        self._group = group
        self._rank = group.rank() if group is not None else 0
        self.num_ranks = group.size() if group is not None else 1
        parts = {name: local_part(parameter, placements.get(name)) for name, parameter in self._parameters.items()}
        self.shapes = {name: part.shape for name, part in parts.items()}
        mine = {name: (part.offsets, tuple(part.local.shape)) for name, part in parts.items()}
        self._regions = [mine] if group is None else _all_gather(mine, group)
        sizes = [math.prod(shape) * (weights or {}).get(name, 1) for name, shape in self.shapes.items()]
        self._owners = dict(zip(self.shapes, deal(sizes, ranks=self.num_ranks), strict=True))
        self._sources = {name: self._covering(name) for name in self.shapes}

    def owns(self, name: str) -> bool:
        return self._owners[name] == self._rank

    def is_in_place(self, name: str) -> bool:
        """Whether this rank owns the parameter and holds all of it."""
        return self.owns(name) and self._regions[self._rank][name][1] == self.shapes[name]

    def gather(self, names: Sequence[str], pick: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
        """Returns what `pick` gives of each parameter, whole, for the names that this rank owns.

        Every rank of the group must call it with the same names. A tensor that is in place shares its memory.
        """
        local = {name: local_part(pick(self._parameters[name]), self._placements.get(name)).local for name in names}
        sent: list[list[Tensor]] = [[] for _ in range(self.num_ranks)]
        counts: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for name in names:
            if self.owns(name):
                for (_, sizes), source in self._sources[name].items():
                    if source != self._rank:
                        counts[source].append(math.prod(sizes))
            elif self._sources[name].get(self._regions[self._rank][name]) == self._rank:
                sent[self._owners[name]].append(local[name].reshape(-1))
        anything = any(source != self._owners[name] for name in names for source in self._sources[name].values())
        received = self._exchange(sent, counts) if anything else [[] for _ in range(self.num_ranks)]
        wholes: dict[str, Tensor] = {}
        flows = [iter(pieces) for pieces in received]
        for name in names:
            if self.is_in_place(name):
                wholes[name] = local[name]
            elif self.owns(name):
                whole = wholes[name] = local[name].new_empty(self.shapes[name])
                for region, source in self._sources[name].items():
                    piece = local[name] if source == self._rank else next(flows[source])
                    _at(whole, region).copy_(piece.view(region[1]))
        return wholes

    def scatter(self, names: Sequence[str], wholes: Mapping[str, Tensor]) -> None:
        """Writes what each owner has in `wholes` into the part of every rank that holds one; every rank calls it."""
        sent: list[list[Tensor]] = [[] for _ in range(self.num_ranks)]
        counts: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for name in names:
            if not self.owns(name):
                counts[self._owners[name]].append(math.prod(self._regions[self._rank][name][1]))
                continue
            for target in range(self.num_ranks):
                if target != self._rank:
                    sent[target].append(_at(wholes[name], self._regions[target][name]).reshape(-1))
        received = self._exchange(sent, counts) if self.num_ranks > 1 else [[]]
        flows = [iter(pieces) for pieces in received]
        for name in names:
            local = local_part(self._parameters[name], self._placements.get(name)).local
            if not self.owns(name):
                local.copy_(next(flows[self._owners[name]]).view(local.shape))
            elif not self.is_in_place(name):
                local.copy_(_at(wholes[name], self._regions[self._rank][name]))

    def _covering(self, name: str) -> dict[Region, int]:
        """Which rank sends each distinct part to the owner: the owner itself where it holds it, else the first."""
        sources: dict[Region, int] = {}
        for rank in (self._owners[name], *range(self.num_ranks)):
            sources.setdefault(self._regions[rank][name], rank)
        sources = {region: rank for region, rank in sources.items() if math.prod(region[1])}
        assert sum(math.prod(sizes) for _, sizes in sources) == math.prod(self.shapes[name]), name
        return dict(sorted(sources.items()))

    def _exchange(self, sent: list[list[Tensor]], counts: list[list[int]]) -> list[list[Tensor]]:
        """Sends each rank its tensors (all of one dtype) and returns those that each rank sent to this one."""
        like = local_part(next(iter(self._parameters.values())), None).local
        outgoing = torch.cat([piece for pieces in sent for piece in pieces] or [like.new_empty(0)])
        incoming = outgoing.new_empty(sum(map(sum, counts)))
        dist.all_to_all_single(
            incoming,
            outgoing,
            [sum(sizes) for sizes in counts],
            [sum(piece.numel() for piece in pieces) for pieces in sent],
            group=self._group,
        )
        flow: Iterator[Tensor] = iter(incoming.split([size for sizes in counts for size in sizes]))
        return [[next(flow) for _ in sizes] for sizes in counts]


def _at(whole: Tensor, region: Region) -> Tensor:
    for dim, (offset, size) in enumerate(zip(*region, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def _all_gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    answers: list[Any] = [None] * group.size()
    dist.all_gather_object(answers, value, group=group)
    return answers
