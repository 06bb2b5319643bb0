"""The closed forms against the real thing: parameters on the meta device, saved tensors of a real forward."""

from __future__ import annotations

import pytest
import torch

from models.oracle import CONFIGS, DROPOUT, SIZES
from shardline.models.attention import DenseAttention
from shardline.models.config import DecoderConfig
from shardline.models.decoder import Decoder
from shardline.models.families import FAMILIES, read_model_config
from shardline.models.presets import preset
from shardline.planning.activations import Arithmetic, layer_bytes, outer_bytes
from shardline.planning.flops import matmul_parameters
from shardline.planning.parameters import count_parameters

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


def _on_meta(config: DecoderConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config)


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


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_activations_are_what_autograd_saves(variant: str, packed: bool, arithmetic: Arithmetic) -> None:
    config = DecoderConfig(**SHAPE | VARIANTS[variant])
    rows, length = 2, 24
    model = Decoder(config).to(torch.bfloat16 if arithmetic == "bf16" else torch.float32)
    tokens_BT = torch.randint(config.vocab_size, (rows, length))
    positions_BT = torch.arange(length).expand(rows, length)
    documents_BT = torch.zeros(rows, length, dtype=torch.int32) if packed else None
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}  # holding the tensors keeps their addresses apart

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            saved[address] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=arithmetic == "autocast"),
    ):
        x_BTD = model.hidden_states(tokens_BT, positions_BT=positions_BT, attention=DenseAttention(documents_BT))
    keep(x_BTD)
    shape = {"rows": rows, "sequence_length": length, "arithmetic": arithmetic}
    expected = outer_bytes(config, **shape)
    expected += sum(layer_bytes(config, layer=layer, packed=packed, **shape) for layer in range(config.num_layers))
    assert sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) == expected
