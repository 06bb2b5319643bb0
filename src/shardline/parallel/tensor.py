"""Tensor and sequence parallelism, applied to a decoder from outside: a table says how each module is cut.

    tensor = TensorParallel(decoder, group=mesh["tensor"].get_group(), kv_group=None, sequence_parallel=True)
    tensor.placements["model.layers.0.mlp.up_proj.weight"]      # which part of the whole this rank holds
    x_BTD = tensor.enter(decoder.embed(...)); ...; x_BTD = tensor.leave(x_BTD)
    tensor.sum_gradients()                                      # after backward

Column-parallel linears hold rows of the weight (heads, inner features, words), row-parallel ones its columns
(Shoeybi et al., 2019, arXiv:1909.08053). Parameters become plain local tensors, so that anything can stand on top.
With fewer kv heads than ranks, neighbours hold the same kv head. With `sequence_parallel` the residual stream between
the parallel parts is cut along the sequence (Korthikanti et al., 2022, arXiv:2205.05198).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardline.models.config import DecoderConfig
from shardline.models.decoder import Decoder, DecoderLayer
from shardline.models.feedforward import Experts, FeedForward, MixtureOfExperts
from shardline.parallel import collectives
from shardline.parallel.grid import make_groups
from shardline.parallel.vocabulary import chunked_cross_entropy

__all__ = ["Placement", "RowParallelLinear", "TensorParallel", "make_kv_group"]

Style = Literal["column", "kv", "row", "row_partial", "vocabulary"]

# (module, how its weight is cut); the first pattern that matches counts. What no pattern names is held by every rank.
STYLES: tuple[tuple[str, Style], ...] = (
    ("model.embed_tokens", "vocabulary"),
    ("lm_head", "column"),
    ("*.self_attn.q_proj", "column"),
    ("*.self_attn.k_proj", "kv"),
    ("*.self_attn.v_proj", "kv"),
    ("*.self_attn.o_proj", "row"),
    ("*.mlp.experts.*.down_proj", "row_partial"),  # summed once, for all experts together
    ("*.mlp.down_proj", "row"),
    ("*.gate_proj", "column"),
    ("*.up_proj", "column"),
)
# Held by every rank, but computed there on a part: on the rank's own heads always; on its own piece of the sequence
# with sequence parallelism. Their gradients are summed over the tensor ranks.
PARTIAL = ("*.self_attn.q_norm.*", "*.self_attn.k_norm.*")
PARTIAL_WITH_SEQUENCE = (
    "*.input_layernorm.*",
    "*.post_attention_layernorm.*",
    "*_output_norm.*",
    "*.o_proj.bias",
    "*.down_proj.bias",
    "model.norm.*",
    "model.project_out.*",
)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a rank's tensor-parallel part of a parameter lies.

    shape     of the whole parameter
    offsets   where this rank's part begins
    replicas  how many tensor ranks hold this same part
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    replicas: int


class TensorParallel:
    """A decoder (or a pipeline stage of one) of which this rank computes its part. Works on the meta device too."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        group: dist.ProcessGroup,
        kv_group: dist.ProcessGroup | None,
        sequence_parallel: bool,
    ) -> None:
        """`kv_group` is what `make_kv_group` returned."""
        self.group = group
        self.size, self.rank = self.group.size(), self.group.rank()
        self.sequence_parallel = sequence_parallel and self.size > 1
        self.placements: dict[str, Placement] = {}
        self._decoder = decoder
        self._config = decoder.config
        self._kv_group = kv_group
        self._shared: set[str] = set()
        for name, module in list(decoder.named_modules()):
            for key, parameter in list(module.named_parameters(recurse=False)):
                path = f"{name}.{key}"
                style = next((style for pattern, style in STYLES if fnmatch.fnmatchcase(name, pattern)), None)
                self._cut(module, key, path, parameter, style if self.size > 1 else None)
        if self.size > 1:
            self._rewire()

    def enter(self, x_BTD: Tensor) -> Tensor:
        """Returns the residual stream as the layers take it, of what the embedding gave."""
        return collectives.split(x_BTD, self.group) if self.sequence_parallel else x_BTD

    def leave(self, x_BTD: Tensor) -> Tensor:
        """Returns what the cut head takes, of the residual stream."""
        return self._into(x_BTD) if self.size > 1 else x_BTD

    def cross_entropy(self, x_RD: Tensor, targets_R: Tensor, *, ignored: int, chunk_rows: int) -> Tensor:
        """Returns the fp32 sum of -log p(target), with the head's words dealt out to the ranks."""
        decoder = self._decoder
        name = "model.embed_tokens.weight" if decoder.config.tie_word_embeddings else "lm_head.weight"
        return chunked_cross_entropy(
            x_RD,
            decoder.head_weight,
            targets_R,
            bias_V=decoder.head_bias,
            softcap=decoder.config.final_softcap,
            first=self.placements[name].offsets[0],
            group=self.group,
            ignored=ignored,
            chunk_rows=chunk_rows,
        )

    def sum_gradients(self) -> None:
        """Completes the gradients of parameters that several ranks hold and compute a part of; call once a step."""
        if self.size == 1:
            return
        partial_names = PARTIAL + (PARTIAL_WITH_SEQUENCE if self.sequence_parallel else ())
        whole: list[Tensor] = []
        shared: list[Tensor] = []
        for name, parameter in self._decoder.named_parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in partial_names):
                whole.append(gradient)
            elif name in self._shared:
                shared.append(gradient)
        _sum_in_place(whole, self.group)
        if self._kv_group is not None:
            _sum_in_place(shared, self._kv_group)

    def _cut(self, module: nn.Module, key: str, path: str, parameter: Tensor, style: Style | None) -> None:
        shape = tuple(parameter.shape)
        dim = 1 if style in ("row", "row_partial") else 0
        if style is None or (dim == 1 and key == "bias"):
            self.placements[path] = Placement(shape=shape, offsets=(0,) * len(shape), replicas=self.size)
            return
        start, length, replicas = self._range(shape[dim], style)
        offsets = tuple(start if axis == dim else 0 for axis in range(len(shape)))
        if replicas > 1:
            self._shared.add(path)
        self.placements[path] = Placement(shape=shape, offsets=offsets, replicas=replicas)
        local = parameter.detach().narrow(dim, start, length).clone(memory_format=torch.contiguous_format)
        setattr(module, key, nn.Parameter(local))

    def _range(self, extent: int, style: Style) -> tuple[int, int, int]:
        """(first, how many, replicas) of a dim of `extent` that this rank holds."""
        if style == "kv" and self._config.num_kv_heads < self.size:
            replicas = self.size // self._config.num_kv_heads
            return self.rank // replicas * self._config.head_dim, self._config.head_dim, replicas
        chunk = math.ceil(extent / self.size)
        start = chunk * self.rank
        return start, min(chunk, extent - start), 1

    def _rewire(self) -> None:
        """Puts the communication around the parts that are cut."""
        decoder = self._decoder
        for layer in decoder.model.layers:
            assert isinstance(layer, DecoderLayer)
            attention = layer.self_attn
            attention.register_forward_pre_hook(self._on_first_input(self._into))
            attention.register_module("o_proj", RowParallelLinear(attention.o_proj, self._out_of))
            if attention.spec.alibi_slopes is not None:
                heads = self._config.num_heads // self.size
                slopes = attention.spec.alibi_slopes[self.rank * heads : (self.rank + 1) * heads]
                attention.spec = dataclasses.replace(attention.spec, alibi_slopes=slopes)
            if isinstance(layer.mlp, MixtureOfExperts):
                self._rewire_experts(layer.mlp)
            else:
                feedforward = cast(FeedForward, layer.mlp)
                feedforward.register_forward_pre_hook(self._on_first_input(self._into))
                feedforward.register_module("down_proj", RowParallelLinear(feedforward.down_proj, self._out_of))
        if hasattr(decoder.model, "embed_tokens"):
            placement = self.placements["model.embed_tokens.weight"]
            cut = VocabularyParallelEmbedding(decoder.model.embed_tokens, first=placement.offsets[0], group=self.group)
            decoder.model.register_module("embed_tokens", cut)

    def _rewire_experts(self, mlp: MixtureOfExperts) -> None:
        """Routing is done by every rank, on whole rows; each expert is cut, and their sum is reduced once."""
        if self.sequence_parallel:
            mlp.register_forward_pre_hook(
                self._on_first_input(partial(collectives.gather_replicated, group=self.group))
            )
            mlp.register_forward_hook(lambda _module, _inputs, out: collectives.split(out, self.group))

        def enter(_: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            x_TD, weights_TK, experts_TK = inputs
            return collectives.copy(x_TD, self.group), collectives.copy(weights_TK, self.group), experts_TK

        experts: Experts = mlp.experts
        experts.register_forward_pre_hook(enter)
        experts.register_forward_hook(lambda _module, _inputs, out: collectives.reduce(out, self.group))

    def _into(self, x_BTD: Tensor) -> Tensor:
        """Into a column-parallel part."""
        operation = collectives.gather if self.sequence_parallel else collectives.copy
        return operation(x_BTD, self.group)

    def _out_of(self, x_BTD: Tensor) -> Tensor:
        """Out of a row-parallel part."""
        operation = collectives.scatter if self.sequence_parallel else collectives.reduce
        return operation(x_BTD, self.group)

    @staticmethod
    def _on_first_input(act: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
        return lambda _module, inputs: (act(inputs[0]), *inputs[1:])


class RowParallelLinear(nn.Module):
    """A linear whose input features are dealt out: the products are summed over the ranks, then the bias is added."""

    def __init__(self, linear: nn.Linear, out_of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._out_of = out_of
        self.multiply: Callable[[Tensor, Tensor], Tensor] = F.linear

    def forward(self, x: Tensor) -> Tensor:
        out = self._out_of(self.multiply(x, self.weight))
        return out if self.bias is None else out + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """An embedding of which this rank holds the words from `first` on."""

    def __init__(self, embedding: nn.Embedding, *, first: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = embedding.weight
        self._first = first
        self._group = group

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self._first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return collectives.reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._group)


def make_kv_group(mesh: DeviceMesh, config: DecoderConfig) -> dist.ProcessGroup | None:
    """Returns the group of tensor ranks that hold this rank's kv head, or None; every rank must call it once."""
    size = mesh["tensor"].size()
    replicas = size // config.num_kv_heads
    if replicas < 2:
        return None
    return make_groups(_neighbours(mesh, replicas))


def _neighbours(mesh: DeviceMesh, count: int) -> Iterator[list[int]]:
    rows = mesh.mesh.reshape(-1, mesh.mesh.shape[-1])
    for row in rows.tolist():
        yield from (row[start : start + count] for start in range(0, len(row), count))


def _sum_in_place(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """One all-reduce for all of them."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
