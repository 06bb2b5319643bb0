"""The decoder's architecture as data. A family's config.json becomes one of these; nothing else differs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shardline.config import UsageError

__all__ = ["DecoderConfig", "RopeConfig", "RopeKind"]

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021, arXiv:2104.09864) and how it is stretched.

    kind     linear (Chen et al., 2023, arXiv:2306.15595), llama3 (Llama 3.1's config), yarn (Peng et al., 2023,
             arXiv:2309.00071)
    factor   how many times longer than `original_max_position_embeddings` the context becomes
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that the decoder needs to know, and what a folder needs to be written again.

    `sliding_windows` has one entry a layer: how many tokens a query sees (itself included), or None for all.
    `raw` is the config.json that it was read from (empty when made here): keys that we don't use are carried through.
    """

    family: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    sliding_windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"The model's {name} = {value!r} must be a whole number of at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"The model's num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}."
            )
        if self.head_dim % 2:
            raise UsageError(f"The model's head_dim = {self.head_dim} is odd; rotary embedding turns pairs.")
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        if len(self.sliding_windows) != self.num_layers:
            raise UsageError(
                f"The model names a window or none for {len(self.sliding_windows)} layers, but has {self.num_layers}."
            )
