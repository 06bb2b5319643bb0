"""How the engine's memory is divided: weights, KV cache, and what the cache holds.

    budget = make_budget(decoder, EngineConfig())
    print("\\n".join(budget.lines()))

The two automatic choices, `max_model_len` and the size of the cache, come with their reasons.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from shardline.config.errors import InfeasibleError, UsageError
from shardline.hardware.probe import probe
from shardline.kernels import PackedWeight
from shardline.models.decoder import Decoder
from shardline.serving.engine_config import EngineConfig
from shardline.serving.paged import kv_bytes_per_token
from shardline.serving.tensor_parallel import TensorParallelDecoder, local_config

__all__ = ["MemoryBudget", "make_budget"]

GIB = 2**30
SHARE_OF_FREE_MEMORY = 0.5  # the rest is for activations, logits and everyone else on the machine


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """What was decided, and why."""

    weights_bytes: int
    bytes_per_token: int
    block_size: int
    num_blocks: int
    num_blocks_reason: str
    max_model_len: int
    max_model_len_reason: str

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def kv_cache_bytes(self) -> int:
        return self.num_tokens * self.bytes_per_token

    @property
    def num_full_requests(self) -> int:
        """How many requests of full length fit at once."""
        return self.num_blocks // -(-self.max_model_len // self.block_size)

    def lines(self) -> list[str]:
        """Returns the budget for people, one fact a line."""
        return [
            f"weights    {_size(self.weights_bytes)}",
            f"kv cache   {_size(self.kv_cache_bytes)}: {self.num_tokens:,} tokens of "
            f"{self.bytes_per_token:,} bytes in {self.num_blocks:,} blocks of {self.block_size} "
            f"({self.num_blocks_reason})",
            f"context    {self.max_model_len:,} tokens ({self.max_model_len_reason})",
            f"fits       {self.num_full_requests:,} requests of full length at once, more of shorter ones",
        ]


def make_budget(decoder: Decoder | TensorParallelDecoder, config: EngineConfig) -> MemoryBudget:
    """Returns the budget; raises `UsageError` or `InfeasibleError` where the flags can't be met."""
    _check(config)
    longest = decoder.config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise UsageError(
            f"--max-model-len {config.max_model_len} is more than the model's {longest} positions; "
            f"use at most --max-model-len {longest}."
        )
    wanted_len = config.max_model_len or longest
    kv_dtype = config.kv_dtype(next(decoder.parameters()).dtype)
    bytes_per_token = kv_bytes_per_token(local_config(decoder.config, config.tensor_parallel_size), kv_dtype)
    num_blocks, num_blocks_reason = _choose_blocks(config, wanted_len, bytes_per_token)
    max_model_len, max_model_len_reason = wanted_len, "the model's own limit"
    if config.max_model_len is not None:
        max_model_len_reason = "as asked"
    elif num_blocks * config.block_size < longest:
        max_model_len = num_blocks * config.block_size
        max_model_len_reason = f"all that the KV cache holds; the model could do {longest:,}"
    if num_blocks * config.block_size < max_model_len or num_blocks < 1:
        needed, room = max_model_len * bytes_per_token, num_blocks * config.block_size
        raise InfeasibleError(
            f"One request of --max-model-len {max_model_len} needs {max_model_len} tokens x {bytes_per_token:,} "
            f"bytes = {_size(needed)} of KV cache, but there is room for {room} tokens "
            f"({num_blocks_reason}). Lower --max-model-len, raise --kv-cache-memory, or use --kv-cache-dtype int8."
        )
    return MemoryBudget(
        weights_bytes=weights_bytes(decoder),
        bytes_per_token=bytes_per_token,
        block_size=config.block_size,
        num_blocks=num_blocks,
        num_blocks_reason=num_blocks_reason,
        max_model_len=max_model_len,
        max_model_len_reason=max_model_len_reason,
    )


def weights_bytes(decoder: Decoder | TensorParallelDecoder) -> int:
    """Returns the bytes of all weights, quantised ones as they are stored."""
    packed = sum(module.num_bytes for module in decoder.modules() if isinstance(module, PackedWeight))
    return packed + sum(parameter.nbytes for parameter in decoder.parameters())


def _choose_blocks(config: EngineConfig, max_model_len: int, bytes_per_token: int) -> tuple[int, str]:
    bytes_per_block = bytes_per_token * config.block_size
    useful = -(-max_model_len // config.block_size) * config.max_num_seqs
    if config.num_blocks is not None:
        return config.num_blocks, "as asked"
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes // bytes_per_block, "as asked"
    free_bytes = int(probe().memory_available_bytes * config.memory_share) // config.tensor_parallel_size
    affordable = int(free_bytes * SHARE_OF_FREE_MEMORY) // bytes_per_block
    if useful <= affordable:
        return useful, f"enough for {config.max_num_seqs} requests of full length"
    return affordable, f"{SHARE_OF_FREE_MEMORY:.0%} of the {free_bytes / GIB:.1f} GiB that were free"


def _check(config: EngineConfig) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if type(value) is int and value < 1:
            flag = "kv-cache-memory" if field.name == "kv_cache_bytes" else field.name.replace("_", "-")
            raise UsageError(f"--{flag} {value} must be at least 1.")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise UsageError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is less than --max-num-seqs "
            f"{config.max_num_seqs}, so some running replies would stand still; raise the first or lower the second."
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
