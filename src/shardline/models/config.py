"""The decoder's architecture as data. A family's config.json becomes one of these; nothing else differs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shardline.config import UsageError

__all__ = ["Activation", "DecoderConfig", "RopeConfig", "RopeKind"]

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021, arXiv:2104.09864) and how it is stretched.

    kind     linear (Chen et al., 2023, arXiv:2306.15595), dynamic (NTK by the length at hand), llama3 (Llama 3.1's
             config), yarn (Peng et al., 2023, arXiv:2309.00071), longrope (Ding et al., 2024, arXiv:2402.13753)
    partial  share of a head's dims that turn, from the first on; the rest carry no position
    factor   how many times longer than `original_max_position_embeddings` the context becomes
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    partial: float = 1.0
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
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def num_dims(self, head_dim: int) -> int:
        """Returns how many dims of a head turn."""
        return int(head_dim * self.partial)

    @property
    def switch_length(self) -> int | None:
        """The length from which on all of a sequence turns by other angles (longrope), or None."""
        return None if self.kind != "longrope" else (self.original_max_position_embeddings or 0) + 1

    @property
    def depends_on_length(self) -> bool:
        """Whether a token's angles depend on how long its sequence is, and not on its position alone."""
        return self.kind in ("dynamic", "longrope")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that the decoder needs to know, and what a folder needs to be written again.

    block            pre: norm, attention, add; norm, feed-forward, add. parallel: one norm that both read, both are
                     added. post: the norm follows the addition (OPT-350m)
    output_norms     "pre" with a second pair of norms on what attention and feed-forward give (Gemma 2, GLM-4-0414)
    norm_offset      1 where the stored weight w means 1 + w (Gemma)
    rope_interleaved the files hold rotary dims as pairs (GLM); rows are permuted at load and back at save
    local_rope       rope of the layers with a window, where it differs (Gemma 3)
    position_offset  added to positions before learned embeddings are looked up (OPT)
    query_scale      what queries are scaled by; None is head_dim ** -0.5
    embedding_dim    width of the embedding where it is projected to hidden_size (OPT-350m)
    sliding_windows  one entry a layer: how many tokens a query sees (itself included), or None for all
    num_experts      0: one feed-forward a layer; otherwise layers route to experts, but for `dense_layers`
    raw              the config.json that it was read from (empty when made here): keys not used are carried through
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
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    block: Literal["pre", "parallel", "post"] = "pre"
    output_norms: bool = False
    final_norm: bool = True
    embedding_norm: bool = False
    position: Literal["rope", "learned", "alibi"] = "rope"
    position_offset: int = 0
    rope: RopeConfig = RopeConfig()
    local_rope: RopeConfig | None = None
    rope_interleaved: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    query_scale: float | None = None
    attention_softcap: float | None = None
    activation: Activation = "silu"
    gated: bool = True
    mlp_bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalize_expert_weights: bool = True
    dense_layers: tuple[int, ...] = ()
    router_loss_coefficient: float = 0.0
    embedding_scale: float = 1.0
    embedding_dim: int | None = None
    tie_word_embeddings: bool = False
    head_bias: bool = False
    final_softcap: float | None = None
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def embedding_width(self) -> int:
        return self.embedding_dim or self.hidden_size

    def routes(self, layer: int) -> bool:
        """Returns whether a layer's feed-forward is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    def rope_of(self, layer: int) -> RopeConfig:
        """Returns the rope that a layer turns by."""
        if self.local_rope is not None and self.sliding_windows[layer] is not None:
            return self.local_rope
        return self.rope

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
        if self.position == "rope" and self.rope.num_dims(self.head_dim) % 2:
            raise UsageError(
                f"{self.rope.num_dims(self.head_dim)} of the model's head_dim = {self.head_dim} dims would turn, and "
                "rotary embedding turns pairs."
            )
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise UsageError(
                f"The model routes each token to {self.experts_per_token} of {self.num_experts} experts; it must be at "
                "least 1 and at most all."
            )
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        if len(self.sliding_windows) != self.num_layers:
            raise UsageError(
                f"The model names a window or none for {len(self.sliding_windows)} layers, but has {self.num_layers}."
            )
