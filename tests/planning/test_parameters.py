"""The closed form of parameters against the same models on the meta device."""

from __future__ import annotations

import pytest
import torch

from planning.small import FAMILY_MODELS, MODELS
from shardline.models.config import DecoderConfig
from shardline.models.decoder import Decoder
from shardline.models.families import FAMILIES
from shardline.models.presets import preset
from shardline.planning.flops import matmul_parameters
from shardline.planning.parameters import count_parameters


def _on_meta(config: DecoderConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config)


def test_every_family_is_here() -> None:
    assert {model.family for model in FAMILY_MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_closed_form_counts_every_part(name: str) -> None:
    config = MODELS[name]
    count = count_parameters(config)
    model = _on_meta(config)
    assert count.total == sum(p.numel() for p in model.parameters())
    assert sorted(count.tensors) == sorted(p.numel() for p in model.parameters())
    layers = list(model.model.layers)
    for part, layer in zip(count.layers, layers, strict=True):
        assert part.total == sum(p.numel() for p in layer.parameters())
        linears = [m for m in layer.modules() if isinstance(m, torch.nn.Linear)]
        assert part.all_matrices == sum(m.weight.numel() for m in linears)
    outside = [p for name, p in model.named_parameters() if ".layers." not in name]
    assert count.outer == sum(p.numel() for p in outside)
    assert count.embedding == model.model.embed_tokens.weight.numel()
    assert count.head == (0 if config.tie_word_embeddings else sum(p.numel() for p in model.lm_head.parameters()))


@pytest.mark.parametrize("name", sorted(name for name in MODELS if not MODELS[name].num_experts))
def test_matrix_products_are_the_linears_and_the_head(name: str) -> None:
    model = _on_meta(MODELS[name])
    linears = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    tied = model.model.embed_tokens.weight.numel() if model.config.tie_word_embeddings else 0
    assert matmul_parameters(model.config) == linears + tied


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_active_parameters_leave_out_the_experts_not_taken(name: str) -> None:
    config = MODELS[name]
    model = _on_meta(config)
    idle = 0
    for layer in range(config.num_layers):
        if config.routes(layer):
            expert = sum(p.numel() for p in model.model.layers[layer].mlp.experts[0].parameters())
            idle += (config.num_experts - config.experts_per_token) * expert
    count = count_parameters(config)
    assert 0 < idle == count.total - count.active
    assert matmul_parameters(config) == count.active - sum(
        p.numel() for name, p in model.named_parameters() if p.ndim == 1 or "embed_tokens" in name
    )


# The cards say 12.9B, 39B, 3.3B and 22B; of the exact numbers only the totals are published.
@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39.1), ("qwen3-30b-a3b", 3.35), ("qwen3-235b-a22b", 22.1)],
)
def test_published_mixtures_have_the_active_parameters_of_their_cards(name: str, billions: float) -> None:
    assert count_parameters(preset(name)).active / 1e9 == pytest.approx(billions, rel=0.01)


def test_without_experts_all_parameters_are_active() -> None:
    count = count_parameters(preset("gemma-2-2b"))
    assert count.active == count.total == 2_614_341_888
