"""The feed-forward block: plain or gated (Shazeer, 2020, arXiv:2002.05202), or a mixture of experts.

Shapes: D hidden, F inner, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardline.models.config import Activation, DecoderConfig

__all__ = ["FeedForward", "MixtureOfExperts", "make_feedforward"]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
}


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where the family has no gate."""

    def __init__(self, config: DecoderConfig, *, size: int) -> None:
        super().__init__()
        self._activation = _ACTIVATIONS[config.activation]
        self._gated = config.gated
        if config.gated:
            self.gate_proj = nn.Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self._gated:
            return self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(self._activation(self.up_proj(x)))


class MixtureOfExperts(nn.Module):
    """Top-k routing (Shazeer et al., 2017, arXiv:1701.06538) in fp32; every token reaches all its k experts."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self._top_k = config.experts_per_token
        self._normalize = config.normalize_expert_weights
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config, size=config.expert_size) for _ in range(config.num_experts))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_TD = x_BTD.flatten(0, -2)
        probabilities_TE = F.linear(x_TD.float(), self.router.weight.float()).softmax(-1)
        weights_TK, experts_TK = probabilities_TE.topk(self._top_k, dim=-1)
        if self._normalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        out_TD = torch.zeros_like(x_TD)
        for index, expert in enumerate(self.experts):
            # An expert without tokens still runs on none of them, so that every parameter has a gradient on every rank.
            tokens, slots = (experts_TK == index).nonzero(as_tuple=True)
            out = expert(x_TD[tokens]) * weights_TK[tokens, slots].unsqueeze(-1).to(x_TD.dtype)
            out_TD = out_TD.index_add(0, tokens, out)
        return out_TD.view_as(x_BTD)


def make_feedforward(config: DecoderConfig, *, layer: int) -> nn.Module:
    """Returns the layer's block: experts where it routes, one feed-forward where it does not."""
    if config.routes(layer):
        return MixtureOfExperts(config)
    return FeedForward(config, size=config.intermediate_size)
