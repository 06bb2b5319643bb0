"""A small model of every family, and of every variation of Llama's shape: what closed forms are checked on."""

from __future__ import annotations

from models.oracle import CONFIGS, DROPOUT, SIZES
from shardline.models.config import DecoderConfig
from shardline.models.families import read_model_config

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 136,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 16,
}
VARIANTS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "qwen2": {"qkv_bias": True},
    "every bias": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qwen3": {"qk_norm": True, "family": "qwen3"},
    "no groups": {"num_kv_heads": 6},
    "windows": {"sliding_windows": (8, None)},
}


def _of_family(name: str) -> DecoderConfig:
    config_class, extra = CONFIGS[name]
    return read_model_config(config_class(**{**SIZES, **DROPOUT, **extra}).to_dict())


FAMILY_MODELS = {name: _of_family(name) for name in CONFIGS}
FAMILY_MODELS["chatglm"] = read_model_config(
    {
        "model_type": "chatglm",
        "hidden_size": 48,
        "num_layers": 2,
        "num_attention_heads": 3,
        "kv_channels": 16,
        "multi_query_attention": True,
        "multi_query_group_num": 1,
        "ffn_hidden_size": 80,
        "padded_vocab_size": 97,
        "add_qkv_bias": True,
    }
)
MODELS = {**{name: DecoderConfig(**SHAPE | changes) for name, changes in VARIANTS.items()}, **FAMILY_MODELS}
