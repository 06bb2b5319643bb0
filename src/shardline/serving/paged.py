"""The paged KV cache, and the attention backend that reads and writes it.

Serving runs the trainer's decoder; only this backend differs. Rows of a step come flattened as one batch row of T
tokens: first the sequences that compute a single token (decode), then the chunks of prompts, one after the other.
Decode rows are gathered by block table and attended together; the query heads that share a key head become query
rows, so no key is copied per head. Blocks that rows share are read once for all of them. Each chunk of a prompt attends
alone, to what is cached of its own sequence.

Shapes: T tokens of the step, B decode rows, M blocks in the widest table, S key tokens, N query heads, K key/value
heads, G = N / K, H head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shardline.kernels import (
    attention,
    attention_and_sums,
    causal_mask,
    fixed_attention,
    is_batch_invariant,
    join_attention,
)
from shardline.models.attention import AttentionSpec
from shardline.models.config import DecoderConfig

SCALE_DTYPE = torch.float32  # of an int8 cache: 4 bytes a head beside its 64 or 128 values

__all__ = ["DecodeGroup", "KVCache", "PagedAttention", "PrefillChunk", "StepInputs", "kv_bytes_per_token"]


def kv_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of one token's keys and values over all layers; int8 has a scale for each head beside."""
    scale_bytes = SCALE_DTYPE.itemsize if dtype == torch.int8 else 0
    return 2 * config.num_layers * config.num_kv_heads * (config.head_dim * dtype.itemsize + scale_bytes)


class KVCache:
    """Keys and values of all layers, allocated once; block 0 pads tables and stays zero.

    dtype           what is stored: a floating-point type, or int8 with one scale for each token and head
    compute_dtype   what `read` returns; None: what is stored
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        shape = (config.num_layers, num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
        self.block_size = block_size
        self._compute_dtype = compute_dtype or dtype
        self._keys, self._values = (_Layers(shape, dtype) for _ in range(2))

    @property
    def keys(self) -> list[Tensor]:
        """What is stored, a tensor a layer: [block, offset, K, H]."""
        return self._keys.blocks

    @property
    def values(self) -> list[Tensor]:
        """As `keys`."""
        return self._values.blocks

    def tensors(self) -> list[Tensor]:
        """Returns everything that is stored: whoever gives the memory back needs no other knowledge of it."""
        return [tensor for each in (self._keys, self._values) for tensor in each.tensors()]

    @property
    def is_lossy(self) -> bool:
        """Whether what is read differs from what was written."""
        return self._keys.dtype != self._compute_dtype

    def write(self, layer: int, slots_T: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """Stores each token's key and value in its slot (block * block_size + offset)."""
        self._keys.write(layer, slots_T, k_TKH)
        self._values.write(layer, slots_T, v_TKH)

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Returns k_SKH and v_SKH of the blocks, one after the other; they are good until the next call.

        They always lie in the same memory: fresh megabytes for every layer are pages that the kernel has to find and
        clear, which took two thirds of a step (32 requests of 560 tokens: 200,000 page faults, 0.38 s; now 0.12 s).
        """
        return (
            self._keys.read(layer, blocks, self._compute_dtype),
            self._values.read(layer, blocks, self._compute_dtype),
        )

    def clear(self, blocks: list[int]) -> None:
        """Zeroes blocks that may hold values that are not finite: masked out, they would still poison a sum."""
        for each in (self._keys, self._values):
            each.clear(blocks)


class _Layers:
    """The keys or the values of all layers, [layer][block, offset, K, H]."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.blocks = list(_lazy_zeros(shape, dtype).unbind(0))
        self._slots = [layer.flatten(0, 1) for layer in self.blocks]
        self._scratch = torch.empty((0, *shape[2:]), dtype=dtype)
        self._scale_blocks: list[Tensor] = []
        if dtype == torch.int8:
            self._scale_blocks = list(_lazy_zeros((*shape[:-1], 1), SCALE_DTYPE).unbind(0))
            self._scale_slots = [layer.flatten(0, 1) for layer in self._scale_blocks]

    def tensors(self) -> list[Tensor]:
        return [*self.blocks, *self._scale_blocks]

    def write(self, layer: int, slots_T: Tensor, x_TKH: Tensor) -> None:
        if self._scale_blocks:
            scale_TK1 = x_TKH.float().abs().amax(-1, keepdim=True) / 127
            self._scale_slots[layer].index_copy_(0, slots_T, scale_TK1)
            x_TKH = (x_TKH / scale_TK1.clamp(min=torch.finfo(SCALE_DTYPE).tiny)).round().clamp(-127, 127)
        self._slots[layer].index_copy_(0, slots_T, x_TKH.to(self.dtype))

    def read(self, layer: int, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        if len(self._scratch) < len(blocks):
            self._scratch = torch.empty((len(blocks) * 5 // 4, *self.blocks[layer].shape[1:]), dtype=self.dtype)
        gathered = self._scratch[: len(blocks)]
        torch.index_select(self.blocks[layer], 0, blocks, out=gathered)
        x_SKH = gathered.flatten(0, 1).to(dtype)
        if self._scale_blocks:
            x_SKH = x_SKH * self._scale_blocks[layer].index_select(0, blocks).flatten(0, 1)
        return x_SKH.to(dtype)

    def clear(self, blocks: list[int]) -> None:
        for layer in (*self.blocks, *self._scale_blocks):
            layer[blocks] = 0


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns zeros whose memory is taken as blocks are first written: numpy's come as untouched pages, where
    `torch.zeros` writes gigabytes at start (4 s for 7 GB here).
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeGroup:
    """Decode rows `first` to `first + size - 1`, of similar lengths.

    shared   [M] int64, blocks that every row's sequence begins with; None: they share none
    tables   [B * M] int64, the blocks after those, padded with block 0 to the widest
    lengths  tokens that each row sees, shared ones and itself included
    """

    first: int
    size: int
    shared: Tensor | None
    tables: Tensor
    lengths: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillChunk:
    """Rows `first` to `first + size - 1`: the tokens from `start` on of one sequence."""

    first: int
    size: int
    start: int
    table: Tensor  # [M] int64


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """One step's rows, as tensors made once from whole arrays."""

    tokens_T: Tensor
    positions_T: Tensor
    lengths_T: Tensor | None  # tokens that each row's sequence has by now, where the rope asks for it
    slots_T: Tensor
    decodes: list[DecodeGroup] = field(default_factory=list)
    prefills: list[PrefillChunk] = field(default_factory=list)


class PagedAttention:
    """The attention backend of one step; masks are made once and shared by the layers with the same window."""

    def __init__(self, cache: KVCache, inputs: StepInputs) -> None:
        self._cache = cache
        self.inputs = inputs
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def __call__(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, *, spec: AttentionSpec) -> Tensor:
        """Writes the step's keys and values, then returns o_BTNH; B is 1, T all rows of the step."""
        self._cache.write(spec.layer, self.inputs.slots_T, k_BTKH[0], v_BTKH[0])
        outputs = [self._decode(group, q_BTNH[0], spec) for group in self.inputs.decodes]
        outputs += [self._prefill(chunk, q_BTNH, k_BTKH, v_BTKH, spec) for chunk in self.inputs.prefills]
        o_TNH = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return o_TNH.unsqueeze(0)

    def _decode(self, group: DecodeGroup, q_TNH: Tensor, spec: AttentionSpec) -> Tensor:
        k_SKH, v_SKH = self._cache.read(spec.layer, group.tables)
        num_rows, num_kv_heads, head_dim = group.size, k_SKH.shape[1], k_SKH.shape[2]
        k_BSKH, v_BSKH = k_SKH.unflatten(0, (num_rows, -1)), v_SKH.unflatten(0, (num_rows, -1))
        rows = q_TNH[group.first : group.first + num_rows]
        if is_batch_invariant():
            first_B = torch.tensor(group.lengths) - 1
            return fixed_attention(rows.unsqueeze(1), k_BSKH, v_BSKH, first_B=first_B, **spec.kernel_arguments)[:, 0]
        if spec.alibi_slopes is not None:  # a bias for each query head: they stay heads
            mask_B1S = self._decode_mask(group, k_BSKH.shape[1], spec.window)
            distance_B1S = torch.tensor(group.lengths).view(-1, 1, 1) - 1 - torch.arange(k_BSKH.shape[1])
            return attention(
                rows.unsqueeze(1),
                k_BSKH,
                v_BSKH,
                mask_BTS=mask_B1S,
                scale=spec.scale,
                softcap=spec.softcap,
                alibi=(spec.alibi_slopes, distance_B1S),
            ).squeeze(1)
        q_BGKH = rows.view(num_rows, num_kv_heads, -1, head_dim).transpose(1, 2)
        if group.shared is not None:
            return self._decode_shared(group, group.shared, q_BGKH, k_BSKH, v_BSKH, spec)
        if num_rows == 1:  # exact slices instead of a mask
            end = group.lengths[0]
            begin = 0 if spec.window is None else max(0, end - spec.window)
            k_BSKH, v_BSKH, mask_BGS = k_BSKH[:, begin:end], v_BSKH[:, begin:end], None
        else:
            mask_BGS = self._decode_mask(group, k_BSKH.shape[1], spec.window)
            mask_BGS = mask_BGS.expand(-1, q_BGKH.shape[1], -1)
        o_BGKH = attention(q_BGKH, k_BSKH, v_BSKH, mask_BTS=mask_BGS, scale=spec.scale, softcap=spec.softcap)
        return o_BGKH.transpose(1, 2).reshape(num_rows, -1, head_dim)

    def _decode_shared(
        self, group: DecodeGroup, shared: Tensor, q_BGKH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, spec: AttentionSpec
    ) -> Tensor:
        """Attends each row to its own blocks and all rows together to the blocks they share, and joins the two."""
        mask_B1S = self._decode_mask(group, k_BSKH.shape[1], None, skipped=len(shared) * self._cache.block_size)
        mask_BGS = mask_B1S.expand(-1, q_BGKH.shape[1], -1)
        own = attention_and_sums(q_BGKH, k_BSKH, v_BSKH, mask_BTS=mask_BGS, scale=spec.scale)
        k_SKH, v_SKH = self._cache.read(spec.layer, shared)
        q_1TKH = q_BGKH.flatten(0, 1).unsqueeze(0)
        o_1TKH, sums_1TK = attention_and_sums(q_1TKH, k_SKH.unsqueeze(0), v_SKH.unsqueeze(0), scale=spec.scale)
        together = o_1TKH.view_as(q_BGKH), sums_1TK.view(q_BGKH.shape[:3])
        o_BGKH = join_attention(own, together)
        return o_BGKH.transpose(1, 2).reshape(len(q_BGKH), -1, q_BGKH.shape[-1])

    def _prefill(
        self, chunk: PrefillChunk, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, spec: AttentionSpec
    ) -> Tensor:
        rows = slice(chunk.first, chunk.first + chunk.size)
        q_BTNH = q_BTNH[:, rows]
        end = chunk.start + chunk.size
        if chunk.start == 0 and not self._cache.is_lossy:  # everything it sees is in this step
            k_BSKH, v_BSKH = k_BTKH[:, rows], v_BTKH[:, rows]
        else:
            k_SKH, v_SKH = self._cache.read(spec.layer, chunk.table)
            k_BSKH, v_BSKH = k_SKH[:end].unsqueeze(0), v_SKH[:end].unsqueeze(0)
        if is_batch_invariant():
            return fixed_attention(
                q_BTNH, k_BSKH, v_BSKH, first_B=torch.tensor([chunk.start]), **spec.kernel_arguments
            )[0]
        whole = chunk.start == 0 and (spec.window is None or spec.window >= end)
        if whole and spec.alibi_slopes is None:
            return attention(q_BTNH, k_BSKH, v_BSKH, causal=True, scale=spec.scale, softcap=spec.softcap)[0]
        alibi = None
        if spec.alibi_slopes is not None:
            distance_TS = torch.arange(chunk.start, end)[:, None] - torch.arange(end)[None, :]
            alibi = spec.alibi_slopes, distance_TS.unsqueeze(0)
        mask_BTS = self._prefill_mask(chunk, spec.window)
        return attention(
            q_BTNH, k_BSKH, v_BSKH, mask_BTS=mask_BTS, scale=spec.scale, softcap=spec.softcap, alibi=alibi
        )[0]

    def _decode_mask(self, group: DecodeGroup, num_keys: int, window: int | None, *, skipped: int = 0) -> Tensor:
        key = (group.first, window)
        if key not in self._masks:
            lengths_B11 = torch.tensor(group.lengths).view(-1, 1, 1) - skipped
            index_S = torch.arange(num_keys)
            mask_B1S = index_S < lengths_B11
            if window is not None:
                mask_B1S &= index_S >= lengths_B11 - window
            self._masks[key] = mask_B1S
        return self._masks[key]

    def _prefill_mask(self, chunk: PrefillChunk, window: int | None) -> Tensor:
        key = (chunk.first, window)
        if key not in self._masks:
            end = chunk.start + chunk.size
            self._masks[key] = causal_mask(
                query_positions_BT=torch.arange(chunk.start, end).unsqueeze(0),
                key_positions_BS=torch.arange(end).unsqueeze(0),
                window=window,
            )
        return self._masks[key]
