"""Self-attention, and the backend for whole rows that training and checking use.

The decoder projects, normalises and rotates; *what a query may look at* belongs to the backend passed in:
`DenseAttention` here (whole rows, several documents a row), the paged one in serving.

Shapes: B batch, T tokens, D hidden, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from shardline.kernels import attention, causal_mask
from shardline.models.config import DecoderConfig
from shardline.models.norm import RMSNorm
from shardline.models.positions import rotate

__all__ = ["Attention", "DenseAttention", "SelfAttention"]


class Attention(Protocol):
    """What the decoder calls once a layer, after rotation and query/key norms."""

    def __call__(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Returns o_BTNH."""
        ...


class DenseAttention:
    """Causal attention over whole rows.

    documents_BT   integer, which document of its row each token belongs to; tokens see their own document only, and
                   -1 marks padding, which nothing sees. None: each row is one document.

    The row's index decides what is earlier, so that positions may restart at each document. Masks are built once and
    shared by all layers with the same window.
    """

    def __init__(self, documents_BT: Tensor | None = None) -> None:
        self._documents_BT = documents_BT
        self._masks: dict[int | None, Tensor] = {}

    def __call__(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        length = q_BTNH.shape[1]
        if window is not None and window >= length:
            window = None
        if self._documents_BT is None and window is None:
            return attention(q_BTNH, k_BTKH, v_BTKH, causal=True, scale=scale)
        if window not in self._masks:
            self._masks[window] = self._mask(length, window, q_BTNH.device)
        return attention(q_BTNH, k_BTKH, v_BTKH, mask_BTS=self._masks[window], scale=scale)

    def _mask(self, length: int, window: int | None, device: torch.device) -> Tensor:
        index_BT = torch.arange(length, device=device).unsqueeze(0)
        mask_BTS = causal_mask(query_positions_BT=index_BT, key_positions_BS=index_BT, window=window)
        if self._documents_BT is None:
            return mask_BTS
        same_BTS = self._documents_BT.unsqueeze(2) == self._documents_BT.unsqueeze(1)
        real_B1S = (self._documents_BT >= 0).unsqueeze(1)
        return mask_BTS & same_BTS & real_B1S


class SelfAttention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245) with rotary positions."""

    def __init__(self, config: DecoderConfig, *, layer: int) -> None:
        super().__init__()
        self._layer = layer
        self._window = config.sliding_windows[layer]
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, num_q, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, num_kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, num_kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(num_q, config.hidden_size, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps)
        self._qk_norm = config.qk_norm

    def forward(self, x_BTD: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self._head_dim)
        q_BTNH = self.q_proj(x_BTD).view(heads)
        k_BTKH = self.k_proj(x_BTD).view(heads)
        v_BTKH = self.v_proj(x_BTD).view(heads)
        if self._qk_norm:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        q_BTNH, k_BTKH = rotate(q_BTNH, *cos_sin), rotate(k_BTKH, *cos_sin)
        o_BTNH = attention(q_BTNH, k_BTKH, v_BTKH, layer=self._layer, scale=self._scale, window=self._window)
        return self.o_proj(o_BTNH.flatten(2))
