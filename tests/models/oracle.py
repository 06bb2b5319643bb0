"""Tiny random models made by transformers, the oracle of the decoder's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
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
    "qwen3-tied-biased": (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
}


def make_oracle(name: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Returns a random fp32 model whose norm weights and biases are not at their neutral values."""
    config_class, extra = CONFIGS[name]
    torch.manual_seed(seed)
    config = config_class(**{**SIZES, **extra, **changes})
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
