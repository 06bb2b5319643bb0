"""Named architectures, from their published config.json facts. `tiny` is ours: it trains in seconds on a laptop.

preset("smollm2-135m")      # DecoderConfig
"""

from __future__ import annotations

from collections.abc import Callable

from shardline.config import UsageError, nearest
from shardline.models.config import DecoderConfig, RopeConfig

__all__ = ["PRESETS", "preset"]


def _llama(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **rest: object) -> DecoderConfig:
    """A decoder with the proportions given; `head_dim` is hidden / heads unless told otherwise."""
    values: dict[str, object] = {"head_dim": hidden // heads, "vocab_size": 32000, **rest}
    return DecoderConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        **values,  # type: ignore[arg-type]
    )


def _smollm2(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, theta: float) -> DecoderConfig:
    return _llama(
        hidden,
        ffn,
        layers,
        heads,
        kv_heads,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope=RopeConfig(theta=theta),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def _llama3(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, *, factor: float, tied: bool = False
) -> DecoderConfig:
    rope = RopeConfig(
        theta=500000.0,
        kind="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    return _llama(
        hidden,
        ffn,
        layers,
        heads,
        kv_heads,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope=rope,
        tie_word_embeddings=tied,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    )


def _qwen(
    family: str,
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    tied: bool,
    vocab_size: int = 151936,
    context: int = 32768,
) -> DecoderConfig:
    return _llama(
        hidden,
        ffn,
        layers,
        heads,
        kv_heads,
        family=family,
        head_dim=128 if family == "qwen3" else hidden // heads,
        vocab_size=vocab_size,
        max_position_embeddings=context,
        norm_eps=1e-6,
        rope=RopeConfig(theta=1000000.0),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tie_word_embeddings=tied,
        bos_token_id=151643,
        eos_token_ids=(151645, 151643),
    )


PRESETS: dict[str, Callable[[], DecoderConfig]] = {
    "tiny": lambda: _llama(128, 384, 4, 4, 2, vocab_size=320, tie_word_embeddings=True, max_position_embeddings=2048),
    "smollm2-135m": lambda: _smollm2(576, 1536, 30, 9, 3, 100000.0),
    "smollm2-360m": lambda: _smollm2(960, 2560, 32, 15, 5, 100000.0),
    "smollm2-1.7b": lambda: _smollm2(2048, 8192, 24, 32, 32, 130000.0),
    "llama-2-7b": lambda: _llama(4096, 11008, 32, 32, 32, max_position_embeddings=4096),
    "llama-2-13b": lambda: _llama(5120, 13824, 40, 40, 40, max_position_embeddings=4096),
    "llama-2-70b": lambda: _llama(8192, 28672, 80, 64, 8, max_position_embeddings=4096),
    "llama-3.2-1b": lambda: _llama3(2048, 8192, 16, 32, 8, factor=32.0, tied=True),
    "llama-3.2-3b": lambda: _llama3(3072, 8192, 28, 24, 8, factor=32.0, tied=True),
    "llama-3.1-8b": lambda: _llama3(4096, 14336, 32, 32, 8, factor=8.0),
    "llama-70b": lambda: _llama3(8192, 28672, 80, 64, 8, factor=8.0),
    "mistral-7b": lambda: _llama(
        4096, 14336, 32, 32, 8, family="mistral", max_position_embeddings=32768, sliding_windows=(4096,) * 32
    ),
    "qwen2.5-0.5b": lambda: _qwen("qwen2", 896, 4864, 24, 14, 2, tied=True),
    "qwen2.5-1.5b": lambda: _qwen("qwen2", 1536, 8960, 28, 12, 2, tied=True),
    "qwen2.5-7b": lambda: _qwen("qwen2", 3584, 18944, 28, 28, 4, tied=False, vocab_size=152064),
    "qwen3-0.6b": lambda: _qwen("qwen3", 1024, 3072, 28, 16, 8, tied=True, context=40960),
    "qwen3-8b": lambda: _qwen("qwen3", 4096, 12288, 36, 32, 8, tied=False, context=40960),
}


def preset(name: str) -> DecoderConfig:
    """Returns the architecture called `name`; raises `UsageError` with the nearest name."""
    if name not in PRESETS:
        raise UsageError(f"model.preset = {name!r} is not known{nearest(name, PRESETS)}")
    return PRESETS[name]()
