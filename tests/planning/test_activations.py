"""Predicted activations against what autograd saves in a real forward pass, to the byte, for every family."""

from __future__ import annotations

import pytest
import torch

from planning.small import MODELS
from shardline.models.attention import DenseAttention
from shardline.models.decoder import Decoder
from shardline.models.feedforward import BalanceLoss
from shardline.planning.activations import Arithmetic, layer_bytes, outer_bytes


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_activations_are_what_autograd_saves(name: str, packed: bool, arithmetic: Arithmetic) -> None:
    config, rows, length = MODELS[name], 2, 24
    torch.manual_seed(0)
    model = Decoder(config).to(torch.bfloat16 if arithmetic == "bf16" else torch.float32)
    tokens_BT = torch.randint(config.vocab_size, (rows, length))
    positions_BT = torch.arange(length).expand(rows, length)
    documents_BT = torch.zeros(rows, length, dtype=torch.int32)
    balance = BalanceLoss(real_BT=documents_BT >= 0, weight_B=torch.ones(rows)) if config.num_experts else None
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
        x_BTD = model.hidden_states(
            tokens_BT,
            positions_BT=positions_BT,
            attention=DenseAttention(documents_BT if packed else None),
            balance=balance,
        )
    keep(x_BTD)
    shape = {"rows": rows, "sequence_length": length, "arithmetic": arithmetic}
    expected = outer_bytes(config, **shape)
    expected += sum(layer_bytes(config, layer=layer, packed=packed, **shape) for layer in range(config.num_layers))
    assert sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) == expected
