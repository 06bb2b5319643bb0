"""Attention of the batch-invariant mode: a query's sums run over fixed tiles of keys, in the order of their positions.

Tile j holds the keys at positions 64 j to 64 j + 63 of their sequence, however many queries are computed together and
wherever keys come from, so prefill, chunks, decode and packed rows add the same numbers in the same order. Tiles that a
query doesn't see add exact zeros.

Shapes: B sequences, T queries, S keys, N query heads, K key/value heads, G = N / K, H head size, X = B K.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.activation import soft_cap
from shardline.kernels.invariance import fixed_bmm, rowwise

__all__ = ["fixed_attention", "fixed_document_attention"]

KEY_TILE = 64
MAX_ROWS = 256  # query rows at a time: bounds the scores that exist at once


def fixed_attention(
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    *,
    first_B: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    slopes_N: Tensor | None = None,
) -> Tensor:
    """Returns o_BTNH, causal: query t of sequence b is at position first_B[b] + t and key s at position s.

    Keys after a sequence's last query may hold anything finite.
    """
    num_seqs, num_queries, num_heads, head_dim = q_BTNH.shape
    num_kv_heads = k_BSKH.shape[2]
    num_groups = num_heads // num_kv_heads
    padding = -k_BSKH.shape[1] % KEY_TILE
    k_XSH, v_XSH = (
        (F.pad(each, (0, 0, 0, 0, 0, padding)) if padding else each)
        .transpose(1, 2)
        .reshape(num_seqs * num_kv_heads, -1, head_dim)
        for each in (k_BSKH, v_BSKH)
    )
    q_XTGH = q_BTNH.unflatten(2, (num_kv_heads, num_groups)).transpose(1, 2).flatten(0, 1)
    slopes_XG = None
    if slopes_N is not None:
        slopes_XG = slopes_N.view(num_kv_heads, num_groups).repeat(num_seqs, 1)
    step = max(1, MAX_ROWS // num_groups)
    pieces = []
    for first in range(0, num_queries, step):
        part_XTGH = q_XTGH[:, first : first + step]
        positions_BT = first_B.unsqueeze(1) + torch.arange(first, first + part_XTGH.shape[1])
        end = (int(positions_BT.max()) // KEY_TILE + 1) * KEY_TILE
        begin = 0
        if window is not None:
            begin = max(0, int(positions_BT.min()) - window + 1) // KEY_TILE * KEY_TILE
        distance_BTS = positions_BT.unsqueeze(-1) - torch.arange(begin, end)
        seen_BTS = distance_BTS >= 0
        if window is not None:
            seen_BTS &= distance_BTS < window
        pieces.append(
            _attend(
                part_XTGH,
                k_XSH[:, begin:end],
                v_XSH[:, begin:end],
                distance_XTS=distance_BTS.repeat_interleave(num_kv_heads, 0),
                seen_XTS=seen_BTS.repeat_interleave(num_kv_heads, 0),
                scale=scale,
                softcap=softcap,
                slopes_XG=slopes_XG,
            )
        )
    o_XTGH = torch.cat(pieces, dim=1)
    return o_XTGH.unflatten(0, (num_seqs, num_kv_heads)).transpose(1, 2).flatten(2, 3)


def _attend(
    q_XTGH: Tensor,
    k_XSH: Tensor,
    v_XSH: Tensor,
    *,
    distance_XTS: Tensor,
    seen_XTS: Tensor,
    scale: float,
    softcap: float | None,
    slopes_XG: Tensor | None,
) -> Tensor:
    tiles = range(0, k_XSH.shape[1], KEY_TILE)
    q_XRH = q_XTGH.flatten(1, 2)
    scores = torch.cat([fixed_bmm(q_XRH, k_XSH[:, j : j + KEY_TILE].transpose(1, 2)) for j in tiles], dim=-1)
    scores = soft_cap(scores * scale, softcap).unflatten(1, q_XTGH.shape[1:3])
    if slopes_XG is not None:
        scores = scores - slopes_XG[:, None, :, None] * distance_XTS.unsqueeze(2)
    scores = scores.masked_fill(~seen_XTS.unsqueeze(2), float("-inf")).flatten(1, 2)
    weights_XRS = rowwise(torch.exp, scores - scores.amax(-1, keepdim=True))  # a query sees at least itself
    sums_XRJ = weights_XRS.unflatten(-1, (-1, KEY_TILE)).sum(-1)
    out_XRH, total_XR = torch.zeros_like(q_XRH), torch.zeros_like(sums_XRJ[..., 0])
    for tile, first in enumerate(tiles):
        keys = slice(first, first + KEY_TILE)
        out_XRH = out_XRH + fixed_bmm(weights_XRS[..., keys], v_XSH[:, keys])
        total_XR = total_XR + sums_XRJ[..., tile]
    return (out_XRH / total_XR.unsqueeze(-1)).view_as(q_XTGH)


def fixed_document_attention(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    *,
    documents_BT: Tensor | None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    slopes_N: Tensor | None = None,
) -> Tensor:
    """Returns o_BTNH for whole rows of documents (-1: padding, gives zeros); None: each row is one document.

    A document is computed as if alone, so where it lies in its row does not matter.
    """
    if documents_BT is None:
        first_B = torch.zeros(len(q_BTNH), dtype=torch.int64)
        return fixed_attention(
            q_BTNH, k_BTKH, v_BTKH, first_B=first_B, scale=scale, window=window, softcap=softcap, slopes_N=slopes_N
        )
    o_BTNH = torch.zeros_like(q_BTNH)
    first_B = torch.zeros(1, dtype=torch.int64)
    for row, documents_T in enumerate(documents_BT):
        for document in documents_T.unique().tolist():
            if document < 0:
                continue
            [tokens] = (documents_T == document).nonzero(as_tuple=True)
            q, k, v = (each[row, tokens].unsqueeze(0) for each in (q_BTNH, k_BTKH, v_BTKH))
            o_BTNH[row, tokens] = fixed_attention(
                q, k, v, first_B=first_B, scale=scale, window=window, softcap=softcap, slopes_N=slopes_N
            )[0]
    return o_BTNH
