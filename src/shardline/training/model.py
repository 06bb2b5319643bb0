"""The model of a run as this rank holds it: its pipeline stages, each with its tensor-parallel part of every layer.

model = ParallelModel(config, architecture, layout=layout, mesh=mesh)     # on the meta device, no values yet
model.fill(weights)                                                        # (name, whole tensor) pairs
loss = model.module(stage, *batch, scale, x_BTD)
dict(model.named_parameters())                                             # names of the whole model
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardline.config import RunConfig
from shardline.models.config import DecoderConfig
from shardline.models.decoder import Decoder
from shardline.parallel.compiling import compile_layers
from shardline.parallel.data import local_tensor
from shardline.parallel.division import balance
from shardline.parallel.grid import Layout, make_groups
from shardline.parallel.pipeline import cut
from shardline.parallel.recompute import recompute
from shardline.parallel.shards import Shard
from shardline.parallel.tensor import Placement, TensorParallel, make_kv_group
from shardline.planning.flops import layer_costs
from shardline.planning.layouts import check_layout
from shardline.training.loss import LanguageModelLoss

__all__ = ["ParallelModel"]

_EMBEDDING = "model.embed_tokens.weight"


class _Stages(nn.Module):
    """This rank's stages under one root, so that what shards or replicates a model takes them together."""

    def __init__(self, stages: dict[int, LanguageModelLoss]) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(index): stage for index, stage in stages.items()})

    def forward(self, stage: int, *inputs: Tensor | float | None) -> Tensor:
        return self.stages[str(stage)](*inputs)


class ParallelModel:
    """Stages, cut over tensor ranks, recomputing and compiled as the config says; not yet laid out over data ranks."""

    def __init__(self, config: RunConfig, architecture: DecoderConfig, *, layout: Layout, mesh: DeviceMesh) -> None:
        check_layout(config, architecture, layout)
        self.config = architecture
        self._rank = mesh["pipeline"].get_local_rank()
        self._num_stages = layout.num_stages
        schedule = layout.make_schedule(layout.accumulation(config.train))
        self.stage_indices = schedule.stages_of(self._rank)
        self._ties = architecture.tie_word_embeddings and schedule.rank_of_stage[0] != schedule.rank_of_stage[-1]
        self._tie_group = make_groups(_ends(mesh)) if self._ties else None
        costs, head = layer_costs(architecture, sequence_length=config.data.sequence_length)
        ranges = balance(costs, first=0.0, last=head, num_stages=self._num_stages)
        kv_group = make_kv_group(mesh, architecture) if layout.tensor > 1 else None
        self._decoders: dict[int, Decoder] = {}
        self._tensors: list[TensorParallel] = []
        losses: dict[int, LanguageModelLoss] = {}
        for stage in self.stage_indices:
            is_first, is_last = stage == 0, stage == self._num_stages - 1
            with torch.device("meta"):
                decoder = Decoder(architecture)
            cut(decoder, ranges[stage], is_first=is_first, is_last=is_last)
            tensor = TensorParallel(
                decoder,
                group=mesh["tensor"].get_group(),
                kv_group=kv_group,
                sequence_parallel=layout.sequence_parallel,
            )
            recompute(decoder.model.layers, config.parallel.activation_checkpointing)
            if config.train.compile:
                compile_layers(decoder.model.layers, whole=not schedule.split_backward)
            self._decoders[stage] = decoder
            self._tensors.append(tensor)
            losses[stage] = LanguageModelLoss(decoder, tensor=tensor, is_first=is_first, is_last=is_last)
        first, last = self._decoders.get(0), self._decoders.get(self._num_stages - 1)
        if architecture.tie_word_embeddings and first and last and first is not last:
            last.model.embed_tokens = first.model.embed_tokens  # a V begins and ends on the same rank
        self.placements: dict[str, Placement] = {
            name: place for tensor in self._tensors for name, place in tensor.placements.items()
        }
        self.module = _Stages(losses)
        self.module.train()

    @property
    def layers(self) -> list[nn.Module]:
        return [layer for decoder in self._decoders.values() for layer in decoder.model.layers]

    @property
    def is_last(self) -> bool:
        """Whether the loss arises on this rank."""
        return self._num_stages - 1 in self.stage_indices

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters under their names in the whole model."""
        seen: set[str] = set()
        for decoder in self._decoders.values():
            for name, parameter in decoder.named_parameters():
                if name not in seen:
                    seen.add(name)
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        for _, parameter in self.named_parameters():
            yield parameter

    def shard(self, name: str, tensor: Tensor) -> Shard:
        """Returns the shard of a tensor that lies as the parameter `name` does."""
        place = self.placements[name]
        return Shard.of(tensor, shape=place.shape, offsets=place.offsets)

    @torch.no_grad()
    def fill(self, weights: Iterable[tuple[str, Tensor]] | None, *, seed: int) -> None:
        """Takes this rank's part of each whole tensor, one at a time; without `weights`, of what `seed` makes."""
        parameters = dict(self.named_parameters())
        if weights is None:
            any_stage = next(iter(self._decoders.values()))
            weights = (
                (name, any_stage.initial_value(name, self.placements[name].shape, seed=seed)) for name in parameters
            )
        missing = set(parameters)
        for name, whole in weights:
            if name in parameters:
                shard = self.shard(name, parameters[name])
                shard.local.copy_(shard.part_of(whole))
                missing.discard(name)
        assert not missing, f"no values for {sorted(missing)[:3]}"

    def norm_shares(self, *, num_copies: int) -> dict[nn.Parameter, float]:
        """Returns the share of each parameter's gradient that this rank contributes to the global norm.

        num_copies   data ranks that hold the same gradient
        """
        return {
            parameter: 0.0 if self._is_second_copy(name) else 1.0 / (self.placements[name].replicas * num_copies)
            for name, parameter in self.named_parameters()
        }

    def finish_gradients(self) -> None:
        """Completes, after the average over data ranks, gradients of parameters that several ranks hold."""
        for tensor in self._tensors:
            tensor.sum_gradients()
        if self._ties and (0 in self.stage_indices or self.is_last):
            gradient = dict(self.named_parameters())[_EMBEDDING].grad
            if gradient is not None:
                dist.all_reduce(local_tensor(gradient), group=self._tie_group)

    def _is_second_copy(self, name: str) -> bool:
        return self._ties and name == _EMBEDDING and 0 not in self.stage_indices


def _ends(mesh: DeviceMesh) -> list[list[int]]:
    """The first and the last rank of every pipeline."""
    return [[line[0], line[-1]] for line in mesh.mesh.flatten(1).T.tolist()]
