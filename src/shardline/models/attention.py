"""Self-attention, and the backend for whole rows that training and checking use.

The decoder projects, normalises and rotates; *what a query may look at* belongs to the backend passed in:
`DenseAttention` here (whole rows, several documents a row), the paged one in serving.

Shapes: B batch, T tokens, D hidden, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardline.kernels import Linear, attention, causal_mask, fixed_document_attention, is_batch_invariant, joint
from shardline.models.config import DecoderConfig
from shardline.models.norm import make_norm
from shardline.models.positions import alibi_slopes, rotate

__all__ = ["Attention", "AttentionSpec", "DenseAttention", "SelfAttention"]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What a layer's attention computes, whatever the backend.

    window         tokens that a query sees, itself included; None: all before it
    softcap        bound of the scores, or None
    alibi_slopes   [N] fp32, or None
    """

    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None

    @property
    def kernel_arguments(self) -> dict[str, Any]:
        """What the batch-invariant kernels are told of it."""
        return {
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "slopes_N": self.alibi_slopes,
        }


class Attention(Protocol):
    """What the decoder calls once a layer, after rotation and query/key norms."""

    def __call__(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        *,
        spec: AttentionSpec,
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
        spec: AttentionSpec,
    ) -> Tensor:
        if is_batch_invariant():
            return fixed_document_attention(
                q_BTNH, k_BTKH, v_BTKH, documents_BT=self._documents_BT, **spec.kernel_arguments
            )
        length = q_BTNH.shape[1]
        mask_BTS = self.mask(spec, length=length, device=q_BTNH.device)
        if mask_BTS is None:
            return attention(q_BTNH, k_BTKH, v_BTKH, causal=True, scale=spec.scale, softcap=spec.softcap)
        alibi = self._alibi(spec, length, q_BTNH.device)
        return attention(q_BTNH, k_BTKH, v_BTKH, mask_BTS=mask_BTS, scale=spec.scale, softcap=spec.softcap, alibi=alibi)

    def mask(self, spec: AttentionSpec, *, length: int, device: torch.device) -> Tensor | None:
        """Returns a layer's mask, built at the first call (a compiled layer can't); None: it is plainly causal."""
        window = None if spec.window is not None and spec.window >= length else spec.window
        if self._documents_BT is None and window is None and spec.alibi_slopes is None:
            return None
        if window not in self._masks:
            self._masks[window] = self._mask(length, window, device)
        return self._masks[window]

    def _alibi(self, spec: AttentionSpec, length: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        if spec.alibi_slopes is None:
            return None
        index_T = torch.arange(length, device=device)
        return spec.alibi_slopes.to(device), (index_T[:, None] - index_T[None, :]).unsqueeze(0)

    def _mask(self, length: int, window: int | None, device: torch.device) -> Tensor:
        index_BT = torch.arange(length, device=device).unsqueeze(0)
        mask_BTS = causal_mask(query_positions_BT=index_BT, key_positions_BS=index_BT, window=window)
        if self._documents_BT is None:
            return mask_BTS
        same_BTS = self._documents_BT.unsqueeze(2) == self._documents_BT.unsqueeze(1)
        real_B1S = (self._documents_BT >= 0).unsqueeze(1)
        return mask_BTS & same_BTS & real_B1S


class SelfAttention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245)."""

    def __init__(self, config: DecoderConfig, *, layer: int) -> None:
        super().__init__()
        self._head_dim = config.head_dim
        self.spec = AttentionSpec(
            layer=layer,
            scale=config.head_dim**-0.5 if config.query_scale is None else config.query_scale,
            window=config.sliding_windows[layer],
            softcap=config.attention_softcap,
            alibi_slopes=alibi_slopes(config.num_heads) if config.position == "alibi" else None,
        )
        num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, num_q, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, num_kv, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, num_kv, bias=config.qkv_bias)
        self.o_proj = Linear(num_q, config.hidden_size, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = make_norm(config, config.head_dim)
            self.k_norm = make_norm(config, config.head_dim)
        self._qk_norm = config.qk_norm

    def forward(self, x_BTD: Tensor, cos_sin: tuple[Tensor, Tensor] | None, attention: Attention) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self._head_dim)
        projected = joint(x_BTD, self.q_proj, self.k_proj, self.v_proj)
        q_BTNH, k_BTKH, v_BTKH = (each.view(heads) for each in projected)
        if self._qk_norm:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        if cos_sin is not None:
            q_BTNH, k_BTKH = rotate(q_BTNH, *cos_sin), rotate(k_BTKH, *cos_sin)
        o_BTNH = attention(q_BTNH, k_BTKH, v_BTKH, spec=self.spec)
        return self.o_proj(o_BTNH.flatten(2))
