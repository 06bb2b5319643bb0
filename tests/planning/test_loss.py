"""The loss's predicted peak against the allocations that torch's profiler records of the real one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from planning.allocations import peak
from shardline.models.config import DecoderConfig
from shardline.models.decoder import Decoder
from shardline.planning.activations import Arithmetic
from shardline.planning.loss import loss_bytes
from shardline.training.loss import LanguageModelLoss

PLAIN = DecoderConfig(
    vocab_size=6144,
    hidden_size=256,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    tie_word_embeddings=True,
)
MODELS = {
    "plain": PLAIN,
    "narrow vocabulary": dataclasses.replace(PLAIN, vocab_size=2048, hidden_size=512),
    "bias": dataclasses.replace(PLAIN, tie_word_embeddings=False, head_bias=True),
    "capped": dataclasses.replace(PLAIN, final_softcap=30.0),
    "capped, a wide head": dataclasses.replace(PLAIN, final_softcap=30.0, vocab_size=2048, hidden_size=1024),
}


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("num_tokens", [512, 1024])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_peak_is_what_the_loss_allocates(name: str, num_tokens: int, arithmetic: Arithmetic, monkeypatch) -> None:
    model = MODELS[name]
    dtype = torch.bfloat16 if arithmetic == "bf16" else torch.float32
    loss = LanguageModelLoss(Decoder(model).to(dtype))
    x_BTD = torch.randn(1, num_tokens, model.hidden_size).to(dtype).requires_grad_()
    monkeypatch.setattr(loss.decoder, "embed", lambda *args, **kwargs: x_BTD)
    monkeypatch.setattr(loss.decoder, "run_layers", lambda x_BTD, **kwargs: x_BTD)
    monkeypatch.setattr(loss.decoder, "finish", lambda x_BTD: x_BTD)
    tokens_BT = torch.randint(model.vocab_size, (1, num_tokens))
    positions_BT = torch.arange(num_tokens).unsqueeze(0)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arithmetic == "autocast"):
            return loss(tokens_BT, tokens_BT, None, positions_BT)  # one document: no mask of the attention counts here

    most, _, _ = peak(forward)  # all gradients are made there
    head_gradient = model.vocab_size * model.hidden_size * dtype.itemsize
    expected = head_gradient + loss_bytes(model, rows=1, sequence_length=num_tokens, arithmetic=arithmetic)
    assert most == pytest.approx(expected, rel=0.06)
