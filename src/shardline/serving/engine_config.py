"""How much an engine takes on at once. `engine` exports these names; `budget` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["DTYPES", "EngineConfig"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of one engine.

    max_model_len           tokens of prompt and reply together; None: what the model and the memory allow
    max_num_seqs            requests that run together
    max_num_batched_tokens  tokens of one step, and so how long a running reply waits for someone else's prompt
    num_blocks              blocks of the KV cache; None: from kv_cache_bytes
    kv_cache_bytes          None: enough for max_num_seqs requests of full length, within half of the free memory
    memory_share            of the free memory: what this engine may count as its own
    tensor_parallel_size    processes that share the model
    enable_prefix_caching   keep the blocks of finished requests for later ones that begin alike
    speculative             ngram: guess what followed the last tokens before; draft: let a smaller model guess
    speculative_model       folder of the smaller model
    num_speculative_tokens  guessed tokens that one step checks
    prompt_lookup_max       tokens that ngram looks for, at most; fewer where nothing is found
    logprobs_mode           raw: log-probabilities of the model; processed: of what tokens are drawn from
    batch_invariant         a request's log-probabilities have the same bits whatever shares its batch
    quantization            weights of the linear maps in 8 bits (a scale each row) or 4 (one each group of 32)
    adapters                (name, folder) of each LoRA adapter that requests may ask for
    kv_cache_dtype          of stored keys and values; auto: that of the weights; int8 has a scale each token and head
    """

    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    dtype: Literal["fp32", "bf16"] = "fp32"
    memory_share: float = 1.0
    tensor_parallel_size: int = 1
    enable_prefix_caching: bool = True
    speculative: Literal["none", "ngram", "draft"] = "none"
    speculative_model: str | None = None
    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 4
    logprobs_mode: Literal["raw", "processed"] = "raw"
    batch_invariant: bool = False
    quantization: Literal["none", "int8", "int4"] = "none"
    adapters: tuple[tuple[str, str], ...] = ()
    kv_cache_dtype: Literal["auto", "fp32", "bf16", "int8"] = "auto"

    def kv_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype that keys and values are stored in, for a model that computes in `compute_dtype`."""
        return {**DTYPES, "int8": torch.int8, "auto": compute_dtype}[self.kv_cache_dtype]
