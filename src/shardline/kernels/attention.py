"""Softmax attention, through PyTorch's fused `scaled_dot_product_attention`.

Shapes: B batch, T query tokens, S key tokens, N query heads, K key/value heads (N a multiple of K), H head size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["attention", "causal_mask"]


def attention(
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    *,
    mask_BTS: Tensor | None = None,
    causal: bool = False,
    scale: float,
) -> Tensor:
    """Returns o_BTNH = softmax(scale * q k^T) v, grouped-query heads included, in the dtype of the inputs.

    `mask_BTS` is boolean, True where a query may look; `causal` needs T == S and no mask. A row of the mask that
    is all False gives zeros, never NaN.
    """
    assert mask_BTS is None or not causal, "a mask already says what is causal"
    if mask_BTS is not None:
        mask_BTS = mask_BTS.unsqueeze(1)
    o_BNTH = F.scaled_dot_product_attention(
        q_BTNH.transpose(1, 2),
        k_BSKH.transpose(1, 2),
        v_BSKH.transpose(1, 2),
        attn_mask=mask_BTS,
        is_causal=causal,
        scale=scale,
        enable_gqa=q_BTNH.shape[2] != k_BSKH.shape[2],
    )
    return o_BNTH.transpose(1, 2)


def causal_mask(
    *,
    query_positions_BT: Tensor,
    key_positions_BS: Tensor,
    window: int | None,
) -> Tensor:
    """Returns mask_BTS: a query looks at keys at or before it, and at most `window - 1` tokens back."""
    distance_BTS = query_positions_BT.unsqueeze(2) - key_positions_BS.unsqueeze(1)
    mask_BTS = distance_BTS >= 0
    if window is not None:
        mask_BTS &= distance_BTS < window
    return mask_BTS
