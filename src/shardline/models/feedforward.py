"""The feed-forward block: plain or gated (Shazeer, 2020, arXiv:2002.05202), or a mixture of experts.

Shapes: D hidden, F inner, E experts, K experts a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardline.kernels import ACTIVATIONS, Linear, joint, linear
from shardline.models.config import DecoderConfig

__all__ = ["BalanceLoss", "Experts", "FeedForward", "MixtureOfExperts", "make_feedforward"]


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where the family has no gate."""

    def __init__(self, config: DecoderConfig, *, size: int) -> None:
        super().__init__()
        self._activation = ACTIVATIONS[config.activation]
        self.is_gated = config.gated
        if config.gated:
            self.gate_proj = Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.down_proj = Linear(size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_gated:
            gate, up = joint(x, self.gate_proj, self.up_proj)
            return self.down_proj(self._activation(gate) * up)
        return self.down_proj(self._activation(self.up_proj(x)))


class BalanceLoss:
    """The load-balancing loss of routed layers (Fedus et al., 2022, arXiv:2101.03961, section 2.2), a row at a time.

    For each row: E * sum over experts of (share of its tokens sent there) * (mean router probability). The paper takes
    the whole batch instead of a row; a product of two means would then depend on how a batch is cut into micro-batches
    and ranks, and a row is never cut.

    real_BT    boolean, the tokens that count
    weight_B   what a row's loss is worth in the total whose gradient is wanted

    The loss joins the backward pass where it arises: `attach` gives its input back, and only gradients know of it.
    """

    def __init__(self, *, real_BT: Tensor, weight_B: Tensor) -> None:
        self._real_BT1 = real_BT.unsqueeze(-1)
        self._weight_B = weight_B

    def attach(self, out_BTD: Tensor, *, probabilities_BTE: Tensor, experts_BTK: Tensor) -> Tensor:
        """Returns `out_BTD`, through which the loss of these routes reaches the router's gradient."""
        num_experts = probabilities_BTE.shape[-1]
        count_B1 = self._real_BT1.sum(1).clamp(min=1)
        chosen_BTE = torch.zeros_like(probabilities_BTE).scatter(-1, experts_BTK, 1.0) * self._real_BT1
        mean_BE = (probabilities_BTE * self._real_BT1).sum(1) / count_B1
        loss_B = num_experts * (chosen_BTE.sum(1) / count_B1 * mean_BE).sum(-1)
        return _Attach.apply(out_BTD, (loss_B * self._weight_B).sum())


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.like


class Experts(nn.ModuleList):
    """The experts of a layer: each works on the tokens that were sent to it, and their weighted sum is returned."""

    def forward(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        out_TD = torch.zeros_like(x_TD)
        for index, expert in enumerate(self):
            # An expert without tokens still runs on none of them, so that every parameter has a gradient on every rank.
            tokens, slots = (experts_TK == index).nonzero(as_tuple=True)
            out = expert(x_TD[tokens]) * weights_TK[tokens, slots].unsqueeze(-1).to(x_TD.dtype)
            out_TD = out_TD.index_add(0, tokens, out)
        return out_TD


class MixtureOfExperts(nn.Module):
    """Top-k routing (Shazeer et al., 2017, arXiv:1701.06538) in fp32; every token reaches all its k experts."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self._top_k = config.experts_per_token
        self._normalize = config.normalize_expert_weights
        self.router = Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(FeedForward(config, size=config.expert_size) for _ in range(config.num_experts))

    def forward(self, x_BTD: Tensor, balance: BalanceLoss | None = None) -> Tensor:
        x_TD = x_BTD.flatten(0, -2)
        with torch.autocast(x_TD.device.type, enabled=False):  # it would take the product down to bf16
            probabilities_TE = linear(x_TD.float(), self.router.weight.float()).softmax(-1)
        weights_TK, experts_TK = probabilities_TE.topk(self._top_k, dim=-1)
        if self._normalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        out_BTD = self.experts(x_TD, weights_TK, experts_TK).view_as(x_BTD)
        if balance is None:
            return out_BTD
        shape = (*x_BTD.shape[:2], -1)
        return balance.attach(
            out_BTD, probabilities_BTE=probabilities_TE.view(shape), experts_BTK=experts_TK.view(shape)
        )


def make_feedforward(config: DecoderConfig, *, layer: int) -> nn.Module:
    """Returns the layer's block: experts where it routes, one feed-forward where it does not."""
    if config.routes(layer):
        return MixtureOfExperts(config)
    return FeedForward(config, size=config.intermediate_size)
