"""A model as the planner sees it: its dimensions, what they add up to, and nothing of how it computes.

    ModelShape.of(preset("llama-3.1-8b"))
    ModelShape.parse("layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256,gated=yes")
    ModelShape.from_parameters(13e9)          # the dimensions that GPTs of that size usually have

Counts are elements. FLOPs are of one token: 2 a multiply-add.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING

from shardline.config.errors import UsageError, nearest

if TYPE_CHECKING:
    from shardline.models.config import DecoderConfig

__all__ = ["ModelShape"]

# (parameters, layers, hidden) of GPT-3 (Brown et al., 2020, table 2.1), MT-NLG and the 1T model of arXiv:2205.05198.
_USUAL = (
    (125e6, 12, 768), (356e6, 24, 1024), (1.3e9, 24, 2048), (2.7e9, 32, 2560), (6.7e9, 32, 4096), (13e9, 40, 5120),
    (30e9, 48, 7168), (66e9, 64, 9216), (175e9, 96, 12288), (530e9, 105, 20480), (1008e9, 128, 25600),
)  # fmt: skip
_SHORT = {
    "layers": "num_layers", "hidden": "hidden_size", "heads": "num_heads", "kv_heads": "num_kv_heads",
    "ffn": "ffn_size", "vocab": "vocab_size", "positions": "learned_positions", "experts": "num_experts",
    "top_k": "experts_per_token", "expert_ffn": "expert_size", "window": "window",
}  # fmt: skip
_ABSURD = 10**7


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Dimensions of a decoder.

    gated              the feed-forward has three matrices (SwiGLU, GEGLU), otherwise two
    learned_positions  rows of a learned position embedding; 0 for none
    windows            (window or None, how many layers) pairs; empty: every layer sees the whole row
    shared_size        width of the feed-forward that every token meets beside its experts
    dense_layers       layers of a mixture whose feed-forward is a plain one
    kv_lora, rope_dim  latent attention (DeepSeek): what a token leaves in the cache is kv_lora + rope_dim numbers
    """

    name: str = "model"
    family: str = "gpt"
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    gated: bool = False
    tied: bool = False
    biases: bool = False
    rms_norm: bool = False
    learned_positions: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_size: int = 0
    dense_layers: int = 0
    windows: tuple[tuple[int | None, int], ...] = ()
    kv_lora: int = 0
    q_lora: int = 0
    rope_dim: int = 0
    decoder: DecoderConfig | None = field(default=None, compare=False, repr=False)  # all of it, where it is known

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= _ABSURD:
                raise UsageError(f"The model's {name} = {value!r} must be a whole number from 1 to {_ABSURD}.")
        if self.num_heads % self.num_kv_heads:
            raise UsageError(f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}.")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise UsageError(
                f"experts_per_token = {self.experts_per_token} must be from 1 to num_experts = {self.num_experts}."
            )

    @classmethod
    def of(cls, config: DecoderConfig, *, name: str = "model") -> ModelShape:
        """Returns the shape of a decoder's config: read, never guessed."""
        counts: dict[int | None, int] = {}
        for window in config.sliding_windows:
            counts[window] = counts.get(window, 0) + 1
        return cls(
            name=name,
            family=config.family,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            ffn_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            gated=config.gated,
            tied=config.tie_word_embeddings,
            biases=config.mlp_bias,
            rms_norm=config.norm == "rms",
            learned_positions=config.max_position_embeddings if config.position == "learned" else 0,
            num_experts=config.num_experts,
            experts_per_token=config.experts_per_token,
            expert_size=config.expert_size,
            dense_layers=len(config.dense_layers),
            windows=() if set(counts) == {None} else tuple(counts.items()),
            decoder=config,
        )

    @classmethod
    def parse(cls, text: str, *, name: str = "model") -> ModelShape:
        """Returns the shape of "layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256,gated=yes"."""
        given: dict[str, object] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = part.partition("=")
            choices = [*_SHORT, "head_dim", "gated", "tied", "family"]
            if key not in choices:
                raise UsageError(f"--model-shape: {key!r} is not a dimension{nearest(key, choices)}")
            if key in ("gated", "tied"):
                given[key] = value.lower() in ("yes", "true", "1", "")
            elif key == "family":
                given[key] = value
            else:
                try:
                    given[_SHORT.get(key, key)] = int(value)
                except ValueError:
                    raise UsageError(f"--model-shape: {key}={value!r} must be a whole number.") from None
        missing = [short for short in ("layers", "hidden", "heads") if _SHORT[short] not in given]
        if missing:
            raise UsageError(f"--model-shape needs {', '.join(missing)} too, as in layers=32,hidden=4096,heads=32.")
        window = given.pop("window", None)
        return cls.filled(**{"name": name, **given}, windows=((window, given["num_layers"]),) if window else ())

    @classmethod
    def filled(cls, **given: object) -> ModelShape:
        """Returns a shape whose missing dimensions are the usual ones: kv heads = heads, ffn = 4 x hidden (8/3 gated),
        head size = hidden / heads, a vocabulary of 51,200."""
        hidden, heads = given["hidden_size"], given.get("num_heads")
        assert isinstance(hidden, int)
        if heads is None:
            given["num_heads"] = heads = max(1, hidden // 128)
        assert isinstance(heads, int)
        for name, value in {"hidden_size": hidden, "num_heads": heads}.items():
            if value < 1:
                raise UsageError(f"The model's {name} = {value!r} must be a whole number from 1 to {_ABSURD}.")
        gated = bool(given.get("gated", False))
        usual = {
            "num_kv_heads": heads,
            "head_dim": max(1, hidden // heads),
            "ffn_size": math.ceil(hidden * 8 / 3 / 256) * 256 if gated else 4 * hidden,
            "vocab_size": 51200,
            "biases": not gated,
            "rms_norm": gated,
        }
        known = {field.name for field in fields(cls)}
        assert set(given) <= known, sorted(set(given) - known)
        return cls(**{**usual, **{name: value for name, value in given.items() if value is not None}})  # pyrefly: ignore

    @classmethod
    def from_parameters(cls, count: float, *, name: str | None = None) -> ModelShape:
        """Returns a GPT of about `count` parameters, of the width that published ones of that size have."""
        if not 1e6 <= count <= 1e14:
            raise UsageError(f"--params {count:g} must be from 1e6 to 1e14 parameters.")
        logs = [math.log(size) for size, _, _ in _USUAL]
        position = math.log(count)
        i = max(0, min(len(_USUAL) - 2, sum(log < position for log in logs) - 1))
        share = (position - logs[i]) / (logs[i + 1] - logs[i])
        widths = [math.log(width) for _, _, width in _USUAL]
        exact = math.exp(widths[i] + share * (widths[i + 1] - widths[i]))
        hidden = max(128, 128 * round(exact / 128))
        layers = max(1, round((count - 51200 * hidden) / (12 * hidden * hidden)))
        if layers < 2:
            hidden = max(64, 64 * int(count / 51200 / 2 / 64))
            layers = max(1, round((count - 51200 * hidden) / (12 * hidden * hidden)))
        label = name or f"{count / 1e9:.3g}B"
        return cls.filled(name=label, num_layers=layers, hidden_size=hidden, tied=True, learned_positions=2048)

    @cached_property
    def attention_parameters(self) -> int:
        """Of one layer."""
        hidden, inner = self.hidden_size, self.num_heads * self.head_dim
        if self.kv_lora:
            query = hidden * self.q_lora + self.q_lora * (inner + self.num_heads * self.rope_dim)
            if not self.q_lora:
                query = hidden * (inner + self.num_heads * self.rope_dim)
            return query + hidden * (self.kv_lora + self.rope_dim) + self.kv_lora * 2 * inner + inner * hidden
        kv = self.num_kv_heads * self.head_dim
        return hidden * (2 * inner + 2 * kv) + (inner + 2 * kv + hidden if self.biases else 0)

    @cached_property
    def dense_ffn_parameters(self) -> int:
        """Of one layer without experts."""
        matrices = 3 if self.gated else 2
        return matrices * self.hidden_size * self.ffn_size + (self.ffn_size + self.hidden_size if self.biases else 0)

    @cached_property
    def expert_parameters(self) -> int:
        """Of one expert."""
        return (3 if self.gated else 2) * self.hidden_size * (self.expert_size or self.ffn_size)

    @cached_property
    def norm_parameters(self) -> int:
        """Of one layer."""
        return self.hidden_size * (4 if self.biases else 2)

    def layer_parameters(self, *, active: bool = False, experts_share: float = 1.0) -> float:
        """Returns a layer's mean count; of those that a token meets, or with a share of the experts."""
        common = self.attention_parameters + self.norm_parameters
        if not self.num_experts:
            return common + self.dense_ffn_parameters
        dense = self.dense_layers / self.num_layers
        experts = self.experts_per_token if active else self.num_experts * experts_share
        shared = (3 if self.gated else 2) * self.hidden_size * self.shared_size
        routed = experts * self.expert_parameters + shared + self.hidden_size * self.num_experts
        return common + dense * self.dense_ffn_parameters + (1 - dense) * routed

    @cached_property
    def embedding_parameters(self) -> int:
        """The input embedding and learned positions."""
        return (self.vocab_size + self.learned_positions) * self.hidden_size

    @cached_property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @cached_property
    def parameters(self) -> float:
        head = 0 if self.tied else self.head_parameters
        final_norm = self.hidden_size * (2 if self.biases else 1)
        return self.num_layers * self.layer_parameters() + self.embedding_parameters + head + final_norm

    @cached_property
    def active_parameters(self) -> float:
        """Parameters that one token meets."""
        return self.parameters - self.num_layers * (self.layer_parameters() - self.layer_parameters(active=True))

    @cached_property
    def matmul_parameters(self) -> float:
        """Weights of matrix products that a token meets: the head once, tied or not; the embedding never."""
        return self.num_layers * self.layer_parameters(active=True) + self.head_parameters

    def mean_context(self, sequence_length: int) -> float:
        """Returns the longest context of a row, as a mean over the layers (windows)."""
        if not self.windows:
            return float(sequence_length)
        seen = sum(min(sequence_length, window or sequence_length) * count for window, count in self.windows)
        return seen / sum(count for _, count in self.windows)

    def attention_flops(self, sequence_length: int, *, causal: bool) -> float:
        """Returns the training FLOPs of one token in all layers' attention products; `causal` halves them."""
        width = self.num_heads * (self.head_dim + self.rope_dim / 2)
        return (6 if causal else 12) * self.num_layers * width * self.mean_context(sequence_length)

    def training_flops(self, sequence_length: int, *, causal: bool = False) -> float:
        """Returns FLOPs of forward and backward for one token, recomputation not counted (6 N + 12 L h s)."""
        return 6 * self.matmul_parameters + self.attention_flops(sequence_length, causal=causal)

    def kv_elements(self) -> int:
        """Returns how many numbers one token leaves in the cache, windows aside."""
        if self.kv_lora:
            return self.num_layers * (self.kv_lora + self.rope_dim)
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim
