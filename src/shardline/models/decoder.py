"""The decoder: one plain `nn.Module` for training and serving, with no parallelism inside.

    decoder = Decoder(preset("tiny"))
    logits_BTV = decoder(tokens_BT, positions_BT=positions_BT, attention=DenseAttention())

Parameter names are Hugging Face's names for Llama, and in their manner where Llama has no such thing. Every family is
this module under another config. Shapes: B batch, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardline.kernels import Embedding, Linear, linear, soft_cap
from shardline.models.attention import Attention, SelfAttention
from shardline.models.config import DecoderConfig
from shardline.models.feedforward import BalanceLoss, MixtureOfExperts, make_feedforward
from shardline.models.norm import make_norm
from shardline.models.positions import Rope

__all__ = ["Decoder", "DecoderLayer"]

CosSin = tuple[Tensor, Tensor]


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each added to the residual stream; `config.block` says where the norms stand."""

    def __init__(self, config: DecoderConfig, *, layer: int) -> None:
        super().__init__()
        self.index = layer
        self._block = config.block
        self._output_norms = config.output_norms
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.self_attn = SelfAttention(config, layer=layer)
        if config.block != "parallel":
            self.post_attention_layernorm = make_norm(config, config.hidden_size)
        self.mlp = make_feedforward(config, layer=layer)
        if config.output_norms:
            self.attention_output_norm = make_norm(config, config.hidden_size)
            self.mlp_output_norm = make_norm(config, config.hidden_size)

    def forward(
        self, x_BTD: Tensor, cos_sin: CosSin | None, attention: Attention, balance: BalanceLoss | None = None
    ) -> Tensor:
        if self._block == "parallel":
            normed_BTD = self.input_layernorm(x_BTD)
            return self.self_attn(normed_BTD, cos_sin, attention) + self._feed(normed_BTD, balance) + x_BTD
        if self._block == "post":
            x_BTD = self.input_layernorm(x_BTD + self.self_attn(x_BTD, cos_sin, attention))
            return self.post_attention_layernorm(x_BTD + self._feed(x_BTD, balance))
        attended_BTD = self.self_attn(self.input_layernorm(x_BTD), cos_sin, attention)
        x_BTD = x_BTD + (self.attention_output_norm(attended_BTD) if self._output_norms else attended_BTD)
        fed_BTD = self._feed(self.post_attention_layernorm(x_BTD), balance)
        return x_BTD + (self.mlp_output_norm(fed_BTD) if self._output_norms else fed_BTD)

    def _feed(self, x_BTD: Tensor, balance: BalanceLoss | None) -> Tensor:
        return self.mlp(x_BTD, balance) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(x_BTD)


class _Trunk(nn.Module):
    """Embeddings, layers and final norm; it exists so that names begin with `model.` as in Hugging Face files."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, hidden = config.embedding_width, config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, width)
        if config.position == "learned":
            self.embed_positions = Embedding(config.max_position_embeddings + config.position_offset, hidden)
        if config.embedding_norm:
            self.embed_norm = make_norm(config, width)
        if width != hidden:
            self.project_in = Linear(width, hidden, bias=False)
            self.project_out = Linear(hidden, width, bias=False)
        self.layers = nn.ModuleList(DecoderLayer(config, layer=layer) for layer in range(config.num_layers))
        if config.final_norm:
            self.norm = make_norm(config, hidden)


class Decoder(nn.Module):
    """A decoder-only transformer described by `DecoderConfig`.

    With tied embeddings there is no `lm_head` weight: the head is the embedding's weight.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Trunk(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.embedding_width, config.vocab_size, bias=config.head_bias)
        self._ropes = {
            rope: Rope(rope, head_dim=config.head_dim, max_position_embeddings=config.max_position_embeddings)
            for rope in {config.rope_of(layer) for layer in range(config.num_layers)}
            if config.position == "rope"
        }

    def forward(
        self, tokens_BT: Tensor, *, positions_BT: Tensor, attention: Attention, lengths_BT: Tensor | None = None
    ) -> Tensor:
        """Returns logits_BTV in the parameters' dtype; the arguments are those of `hidden_states`."""
        hidden = self.hidden_states(tokens_BT, positions_BT=positions_BT, attention=attention, lengths_BT=lengths_BT)
        return self.head(hidden)

    def hidden_states(
        self,
        tokens_BT: Tensor,
        *,
        positions_BT: Tensor,
        attention: Attention,
        lengths_BT: Tensor | None = None,
        balance: BalanceLoss | None = None,
    ) -> Tensor:
        """Returns what the head reads, [B, T, embedding width]: `embed`, `run_layers` and `finish` in a row.

        positions_BT   integers from each document's start
        lengths_BT     tokens of each token's document so far known; only longrope and dynamic rope look at it, and
                       without it take the furthest position of the batch
        balance        the load-balancing loss of routed layers, when training
        """
        x_BTD = self.embed(tokens_BT, positions_BT=positions_BT)
        x_BTD = self.run_layers(
            x_BTD, positions_BT=positions_BT, attention=attention, lengths_BT=lengths_BT, balance=balance
        )
        return self.finish(x_BTD)

    def embed(self, tokens_BT: Tensor, *, positions_BT: Tensor) -> Tensor:
        """Returns x_BTD, the residual stream that the first layer reads."""
        config, trunk = self.config, self.model
        x_BTD = trunk.embed_tokens(tokens_BT)
        if config.embedding_scale != 1.0:  # rounded to the dtype first, as the families with a scale do
            x_BTD = x_BTD * torch.tensor(config.embedding_scale, dtype=x_BTD.dtype, device=x_BTD.device)
        if config.embedding_norm:
            x_BTD = trunk.embed_norm(x_BTD)
        if config.embedding_width != config.hidden_size:
            x_BTD = trunk.project_in(x_BTD)
        if config.position == "learned":
            x_BTD = x_BTD + trunk.embed_positions(positions_BT + config.position_offset)
        return x_BTD

    def run_layers(
        self,
        x_BTD: Tensor,
        *,
        positions_BT: Tensor,
        attention: Attention,
        lengths_BT: Tensor | None = None,
        balance: BalanceLoss | None = None,
    ) -> Tensor:
        """Returns the residual stream after every layer that is here; the arguments are those of `hidden_states`."""
        turns = {rope: turner.cos_sin(positions_BT, lengths_BT) for rope, turner in self._ropes.items()}
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            x_BTD = layer(x_BTD, turns.get(self.config.rope_of(layer.index)), attention, balance)
        return x_BTD

    def finish(self, x_BTD: Tensor) -> Tensor:
        """Returns what the head reads, of the last layer's residual stream."""
        config, trunk = self.config, self.model
        if config.final_norm:
            x_BTD = trunk.norm(x_BTD)
        return x_BTD if config.embedding_width == config.hidden_size else trunk.project_out(x_BTD)

    def head(self, x: Tensor) -> Tensor:
        """Returns logits [..., V] of what `hidden_states` gave."""
        return soft_cap(linear(x, self.head_weight, self.head_bias), self.config.final_softcap)

    @property
    def head_weight(self) -> Tensor:
        """The head's weight, [V, embedding width]."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    @property
    def head_bias(self) -> Tensor | None:
        """The head's bias, [V], where the family has one."""
        return None if self.config.tie_word_embeddings else self.lm_head.bias

    @torch.no_grad()
    def initialize(self, *, seed: int) -> None:
        """Fills every parameter with its `initial_value`."""
        for name, parameter in self.named_parameters():
            parameter.copy_(self.initial_value(name, parameter.shape, seed=seed))

    def initial_value(self, name: str, shape: Sequence[int], *, seed: int) -> Tensor:
        """Returns the fp32 value that training starts from (normal, residual-scaled), of `seed` and the name alone."""
        if name.endswith("norm.weight"):
            return torch.full(shape, 1.0 - self.config.norm_offset)
        if name.endswith(".bias"):
            return torch.zeros(shape)
        std = self.config.initializer_range
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # GPT-2's scaling of what is added to the stream
            std /= (2 * self.config.num_layers) ** 0.5
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big", signed=True))
        return torch.empty(shape).normal_(0.0, std, generator=generator)
