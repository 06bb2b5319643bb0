"""The decoder: one plain `nn.Module` for training and serving, with no parallelism inside.

    decoder = Decoder(preset("tiny"))
    logits_BTV = decoder(tokens_BT, positions_BT=positions_BT, attention=DenseAttention())

Parameter names are Hugging Face's names for Llama. Shapes: B batch, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardline.models.attention import Attention, SelfAttention
from shardline.models.config import DecoderConfig
from shardline.models.feedforward import FeedForward
from shardline.models.norm import RMSNorm
from shardline.models.positions import Rope

__all__ = ["Decoder", "DecoderLayer"]


class DecoderLayer(nn.Module):
    """One pre-norm block: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, config: DecoderConfig, *, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = SelfAttention(config, layer=layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x_BTD: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_sin, attention)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class _Trunk(nn.Module):
    """Embedding, layers and final norm; it exists so that names begin with `model.` as in Hugging Face files."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer=layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)


class Decoder(nn.Module):
    """A decoder-only transformer described by `DecoderConfig`.

    With tied embeddings there is no `lm_head` module: the head is the embedding's weight.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Trunk(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rope = Rope(config.rope, head_dim=config.head_dim, max_position_embeddings=config.max_position_embeddings)

    def forward(self, tokens_BT: Tensor, *, positions_BT: Tensor, attention: Attention) -> Tensor:
        """Returns logits_BTV in the parameters' dtype; `positions_BT` are integers from each document's start."""
        return self.head(self.hidden_states(tokens_BT, positions_BT=positions_BT, attention=attention))

    def hidden_states(self, tokens_BT: Tensor, *, positions_BT: Tensor, attention: Attention) -> Tensor:
        """Returns x_BTD after the final norm: what the head reads."""
        x_BTD = self.model.embed_tokens(tokens_BT)
        cos_sin = self._rope.cos_sin(positions_BT)
        for layer in self.model.layers:
            x_BTD = layer(x_BTD, cos_sin, attention)
        return self.model.norm(x_BTD)

    def head(self, x: Tensor) -> Tensor:
        """Returns logits [..., V] of hidden states [..., D]."""
        return F.linear(x, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """The head's weight, [V, D]."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    @torch.no_grad()
    def initialize(self, *, seed: int) -> None:
        """Fills every parameter from `seed`, the same on every rank and for every layout (normal, residual-scaled)."""
        generator = torch.Generator().manual_seed(seed)
        std = self.config.initializer_range
        residual_std = std / (2 * self.config.num_layers) ** 0.5  # GPT-2's scaling of what is added to the stream
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                scale = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else std
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, scale, generator=generator))
