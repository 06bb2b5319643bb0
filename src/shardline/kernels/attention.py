"""Softmax attention, through PyTorch's fused `scaled_dot_product_attention`.

Shapes: B batch, T query tokens, S key tokens, N query heads, K key/value heads (N a multiple of K), H head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Attended = tuple[Tensor, Tensor]  # o_BTNH and the fp32 logarithm of the sums of its exponentials, [B, T, N]

__all__ = ["attention", "attention_and_sums", "causal_mask", "join_attention"]


def attention(
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    *,
    mask_BTS: Tensor | None = None,
    causal: bool = False,
    scale: float,
    softcap: float | None = None,
    alibi: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Returns o_BTNH = softmax(scale * q k^T) v, grouped-query heads included, in the dtype of the inputs.

    mask_BTS   boolean, True where a query may look; a row that is all False gives zeros, never NaN
    causal     needs T == S and no mask
    softcap    scores become softcap * tanh(scores / softcap) before the mask (Gemma 2); this path is not fused
    alibi      (slopes_N, distance_BTS): slopes * distance is taken off the scores (Press et al., arXiv:2108.12409)
    """
    assert mask_BTS is None or not causal, "a mask already says what is causal"
    if softcap is not None:
        assert alibi is None, "no family has both"
        return _softcapped(q_BTNH, k_BSKH, v_BSKH, mask_BTS=mask_BTS, causal=causal, scale=scale, softcap=softcap)
    mask: Tensor | None = None
    if alibi is not None:
        assert mask_BTS is not None, "the bias is added to a mask"
        slopes_N, distance_BTS = alibi
        bias_BNTS = -slopes_N.view(1, -1, 1, 1) * distance_BTS.unsqueeze(1)
        mask = bias_BNTS.masked_fill(~mask_BTS.unsqueeze(1), float("-inf")).to(q_BTNH.dtype)
    elif mask_BTS is not None:
        mask = mask_BTS.unsqueeze(1)
    o_BNTH = F.scaled_dot_product_attention(
        q_BTNH.transpose(1, 2),
        k_BSKH.transpose(1, 2),
        v_BSKH.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=q_BTNH.shape[2] != k_BSKH.shape[2],
    )
    o_BTNH = o_BNTH.transpose(1, 2)
    return o_BTNH if alibi is None or mask_BTS is None else _without_blind_rows(o_BTNH, mask_BTS)


def attention_and_sums(
    q_BTNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, *, mask_BTS: Tensor | None = None, scale: float
) -> Attended:
    """Returns what `attention` does, and what it takes to join it with attention to other keys.

    Each query head has a key head. Every row has to see something.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BSNH, v_BSNH))
    bias = None
    if mask_BTS is not None:
        bias = torch.zeros(mask_BTS.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask_BTS, float("-inf"))
        bias = bias.unsqueeze(1)
    if q.device.type == "cpu":
        o_BNTH, sums_BNT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=scale
        )
    else:
        scores = (q @ k.transpose(-1, -2)).float() * scale
        scores = scores if bias is None else scores + bias
        o_BNTH, sums_BNT = scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)
    return o_BNTH.transpose(1, 2), sums_BNT.transpose(1, 2)


def join_attention(one: Attended, other: Attended) -> Tensor:
    """Returns o_BTNH of attention to the keys of both (Rabe and Staats, 2021, arXiv:2112.05682)."""
    share_BTN1 = torch.sigmoid(one[1] - other[1]).unsqueeze(-1).to(one[0].dtype)
    return torch.lerp(other[0], one[0], share_BTN1)


def _softcapped(
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    *,
    mask_BTS: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
) -> Tensor:
    num_groups = k_BSKH.shape[2]
    q_BKGTH = q_BTNH.unflatten(2, (num_groups, -1)).permute(0, 2, 3, 1, 4)
    k_BK1SH, v_BK1SH = (x.transpose(1, 2).unsqueeze(2) for x in (k_BSKH, v_BSKH))
    scores = softcap * torch.tanh(q_BKGTH @ k_BK1SH.transpose(-1, -2) * (scale / softcap))
    if causal:
        mask_BTS = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril().unsqueeze(0)
    if mask_BTS is not None:
        scores = scores.masked_fill(~mask_BTS[:, None, None], float("-inf"))
    weights = scores.float().softmax(-1).to(v_BSKH.dtype)
    o_BTNH = (weights @ v_BK1SH).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return o_BTNH if mask_BTS is None else _without_blind_rows(o_BTNH, mask_BTS)


def _without_blind_rows(o_BTNH: Tensor, mask_BTS: Tensor) -> Tensor:
    """A row that sees nothing is a softmax over -inf alone; zeros are what the fused path gives for it."""
    return o_BTNH.masked_fill(~mask_BTS.any(-1)[:, :, None, None], 0.0)


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
