"""Mixtures of experts: the load-balancing loss is transformers' where both mean the same, and routing drops nothing."""

from __future__ import annotations

import pytest
import torch

from models.oracle import make_oracle, save_oracle
from shardline.checkpoints.huggingface import load_decoder, load_tensors
from shardline.models.feedforward import BalanceLoss, MixtureOfExperts
from shardline.training.loss import IGNORED, LanguageModelLoss

COEFFICIENT = 0.5


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_gradients_with_the_balance_loss_equal_transformers_for_one_row_and_layer(name, tmp_path):
    """With one row and one routed layer, transformers' loss over the batch is the loss of the row."""
    changes = {"num_hidden_layers": 1, "router_aux_loss_coef": COEFFICIENT, "mlp_only_layers": []}
    theirs = save_oracle(name, tmp_path / "model", output_router_logits=True, **changes).train()
    ours = load_decoder(tmp_path / "model").train()
    assert ours.config.router_loss_coefficient == COEFFICIENT
    tokens = torch.randint(3, 97, (1, 23), generator=torch.Generator().manual_seed(0))
    theirs(tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    expected = load_tensors(tmp_path / "gradients")
    targets = torch.cat((tokens[:, 1:], torch.full((1, 1), IGNORED)), dim=1)
    documents, positions = torch.zeros(1, 23, dtype=torch.int32), torch.arange(23)[None]
    loss = LanguageModelLoss(ours)
    (loss(tokens, targets, documents, positions, 1 / 22) / 22).backward()
    for key, parameter in ours.named_parameters():
        reference = expected[key]
        assert (parameter.grad - reference).abs().max() <= 1e-4 * reference.abs().max().clamp(min=1e-4), key


def test_the_balance_loss_reaches_the_router_and_not_the_value(tmp_path):
    save_oracle("mixtral", tmp_path, router_aux_loss_coef=COEFFICIENT)
    decoder = load_decoder(tmp_path)
    loss = LanguageModelLoss(decoder)
    tokens = torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    batch = tokens, tokens, torch.zeros(2, 16, dtype=torch.int32), torch.arange(16).expand(2, 16)

    def router_gradient(scale: float | None) -> tuple[float, torch.Tensor]:
        decoder.zero_grad()
        value = loss(*batch, scale)
        value.backward()
        return value.item(), decoder.model.layers[0].mlp.router.weight.grad.clone()

    plain, without = router_gradient(None)
    same, with_balance = router_gradient(1.0)
    assert plain == same
    assert (without - with_balance).abs().max() > 1e-3


def test_padding_does_not_count(tmp_path):
    mixture = load_mixture(tmp_path)
    x_BTD = torch.randn(1, 10, 48, generator=torch.Generator().manual_seed(1))
    short, long = x_BTD[:, :6], x_BTD
    real = torch.arange(10)[None] < 6

    def gradient(x: torch.Tensor, real_BT: torch.Tensor) -> torch.Tensor:
        mixture.zero_grad()
        mixture(x, BalanceLoss(real_BT=real_BT, weight_B=torch.ones(1))).mul(0.0).sum().backward()
        return mixture.router.weight.grad.clone()

    torch.testing.assert_close(gradient(long, real), gradient(short, real[:, :6]))


def test_every_token_reaches_all_its_experts(tmp_path):
    """All tokens prefer one expert: with a capacity most of them would be dropped."""
    mixture = load_mixture(tmp_path)
    with torch.no_grad():
        mixture.router.weight.zero_()
        mixture.router.weight[2] = 1.0
        x_BTD = torch.rand(2, 20, 48, generator=torch.Generator().manual_seed(1)) + 0.1
        out = mixture(x_BTD)
        probabilities = (x_BTD @ mixture.router.weight.T).softmax(-1)
        weights, chosen = probabilities.topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        assert (chosen[..., 0] == 2).all()
        expected = torch.zeros_like(x_BTD)
        for b in range(2):
            for t in range(20):
                for k in range(2):
                    expert = mixture.experts[int(chosen[b, t, k])]
                    expected[b, t] += weights[b, t, k] * expert(x_BTD[b, t])
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)


def load_mixture(folder) -> MixtureOfExperts:
    make_oracle("mixtral").save_pretrained(folder)
    return load_decoder(folder).model.layers[0].mlp


def test_routing_is_fp32_under_autocast(tmp_path):
    mixture = load_mixture(tmp_path)
    x_BTD = torch.randn(1, 30, 48, generator=torch.Generator().manual_seed(1))
    seen: list[torch.Tensor] = []

    class Recorder(BalanceLoss):
        def attach(self, out_BTD, *, probabilities_BTE, experts_BTK):
            seen.append(probabilities_BTE)
            return out_BTD

    recorder = Recorder(real_BT=torch.ones(1, 30, dtype=torch.bool), weight_B=torch.ones(1))
    mixture(x_BTD, recorder)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixture(x_BTD, recorder)
    assert torch.equal(*seen)
