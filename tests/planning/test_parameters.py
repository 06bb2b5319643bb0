"""The closed forms against the real thing: parameters on the meta device, saved tensors of a real forward."""

from __future__ import annotations

import pytest
import torch

from shardline.models.attention import DenseAttention
from shardline.models.config import DecoderConfig
from shardline.models.decoder import Decoder
from shardline.models.presets import PRESETS, preset
from shardline.planning.activations import Arithmetic, layer_bytes, outer_bytes
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


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_closed_form_counts_every_preset(name: str) -> None:
    config = preset(name)
    count = count_parameters(config)
    model = _on_meta(config)
    assert count.total == sum(p.numel() for p in model.parameters())
    assert count.layer == sum(p.numel() for p in model.model.layers[0].parameters())
    assert sorted(count.tensors) == sorted(p.numel() for p in model.parameters())


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_closed_form_counts_every_variant(variant: str) -> None:
    config = DecoderConfig(**SHAPE | VARIANTS[variant])
    count = count_parameters(config)
    model = _on_meta(config)
    layer = model.model.layers[0]
    assert count.total == sum(p.numel() for p in model.parameters())
    assert sorted(count.tensors) == sorted(p.numel() for p in model.parameters())
    assert count.layer_matrices == sum(m.weight.numel() for m in layer.modules() if isinstance(m, torch.nn.Linear))


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
