"""FLOPs by the stated convention, against published numbers of other people's runs."""

from __future__ import annotations

import dataclasses

import pytest

from shardline.models.config import DecoderConfig
from shardline.models.presets import preset
from shardline.planning.flops import matmul_parameters, training_flops_per_token, utilisation
from shardline.planning.parameters import count_parameters


def test_llama_3_1_8b_agrees_with_a_published_run() -> None:
    """Megatron-Bridge, Llama 3.1 8B at 8,192 tokens: 744 TFLOP/s at 14,451 tokens/s, causal attention halved."""
    model = preset("llama-3.1-8b")
    flops = training_flops_per_token(model, sequence_length=8192)
    causal = flops - 6 * model.num_layers * model.num_heads * model.head_dim * 8192
    assert causal == pytest.approx(744e12 / 14451, rel=2e-3)


def test_the_head_counts_once_tied_or_not_and_the_embedding_never() -> None:
    tied = preset("smollm2-135m")
    untied = dataclasses.replace(tied, tie_word_embeddings=False)
    assert matmul_parameters(tied) == matmul_parameters(untied)
    norms = (2 * tied.num_layers + 1) * tied.hidden_size
    assert matmul_parameters(tied) == count_parameters(tied).total - norms


def test_a_window_caps_the_attention_of_its_layer() -> None:
    full = DecoderConfig(
        vocab_size=10, hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4
    )
    windowed = dataclasses.replace(full, sliding_windows=(16, None))
    spared = 12 * 8 * (64 - 16)
    full_flops = training_flops_per_token(full, sequence_length=64)
    assert full_flops - training_flops_per_token(windowed, sequence_length=64) == spared
    assert full_flops == 6 * matmul_parameters(full) + 2 * 12 * 8 * 64


def test_utilisation_is_unknown_without_a_peak() -> None:
    assert utilisation(1e9, tokens_per_s=100.0, peak_flops=2e11) == pytest.approx(0.5)
    assert utilisation(1e9, tokens_per_s=100.0, peak_flops=None) is None
    assert utilisation(1e9, tokens_per_s=100.0, peak_flops=0.0) is None
