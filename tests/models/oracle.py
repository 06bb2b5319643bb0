"""Tiny random models made by transformers, the oracle of the decoder's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,  # far from zero, so that a wrong term shows
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# The names that GPT-2, OPT and BLOOM have for the same things are aliases in transformers' classes.
DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "dropout": 0.0}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.5],
}

CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-mha": (LlamaConfig, {"num_key_value_heads": 6}),
    "llama-head-dim": (LlamaConfig, {"head_dim": 20}),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-theta": (LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-linear": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}},
    ),
    "llama-llama3": (
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "low_freq_factor": 1.5,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama-yarn": (
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral-window": (MistralConfig, {"sliding_window": 5, "head_dim": 16}),
    "mistral-full": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-window": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 20}),
    "gemma": (GemmaConfig, {"head_dim": 16}),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,  # low enough to bend small random scores
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "phi": (PhiConfig, {"num_key_value_heads": 6}),
    "phi-qk-norm": (PhiConfig, {"qk_layernorm": True, "num_key_value_heads": 3}),
    "phi3": (Phi3Config, {"sliding_window": 7}),
    "phi3-longrope-short": (Phi3Config, {"rope_parameters": LONGROPE, "original_max_position_embeddings": 48}),
    "phi3-longrope-long": (Phi3Config, {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8}),
    "phi3-partial": (
        Phi3Config,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "glm": (GlmConfig, {"head_dim": 16, "attention_bias": True}),
    "glm4": (Glm4Config, {"head_dim": 16, "attention_bias": True}),
    "glm4-no-bias": (Glm4Config, {"head_dim": 16, "attention_bias": False}),
    "gpt2": (GPT2Config, {}),
    "gpt2-inner": (GPT2Config, {"n_inner": 100, "activation_function": "gelu"}),
    "opt": (OPTConfig, {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "opt-350m": (OPTConfig, {"ffn_dim": 80, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "bloom": (BloomConfig, {}),
    "bloom-power-of-two": (BloomConfig, {"num_attention_heads": 4}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "llama-dynamic": (
        LlamaConfig,
        {
            "max_position_embeddings": 24,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        },
    ),
    "qwen3-tied-biased": (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
}


def make_oracle(name: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Returns a random fp32 model whose norm weights and biases are not at their neutral values."""
    config_class, extra = CONFIGS[name]
    torch.manual_seed(seed)
    config = config_class(**{**SIZES, **DROPOUT, **extra, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def save_oracle(name: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """Writes the oracle as a Hugging Face folder and returns it."""
    model = make_oracle(name, **changes)
    model.save_pretrained(folder)
    return model
