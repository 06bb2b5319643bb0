"""Attention in two parts, joined, is attention to all keys."""

from __future__ import annotations

import torch

from shardline.kernels import attention, attention_and_sums, join_attention


def test_two_parts_are_joined_to_the_whole():
    torch.manual_seed(0)
    q_BTNH, k_BSNH, v_BSNH = torch.randn(3, 4, 2, 16) * 4, torch.randn(3, 29, 2, 16), torch.randn(3, 29, 2, 16)
    mask_BTS = torch.rand(3, 4, 29) < 0.6
    mask_BTS[..., [0, 28]] = True
    whole = attention(q_BTNH, k_BSNH, v_BSNH, mask_BTS=mask_BTS, scale=0.3)
    parts = [
        attention_and_sums(q_BTNH, k_BSNH[:, each], v_BSNH[:, each], mask_BTS=mask_BTS[..., each], scale=0.3)
        for each in (slice(0, 11), slice(11, None))
    ]
    torch.testing.assert_close(join_attention(*parts), whole, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(join_attention(*reversed(parts)), whole, atol=2e-6, rtol=1e-5)


def test_a_part_that_hardly_counts_takes_nothing_away():
    """Scores of hundreds: exponentials alone would overflow."""
    q_BTNH, v_BSNH = torch.full((1, 1, 1, 4), 20.0), torch.randn(1, 6, 1, 4)
    k_BSNH = torch.cat([torch.full((1, 3, 1, 4), 10.0), torch.full((1, 3, 1, 4), -10.0)], dim=1)
    parts = [attention_and_sums(q_BTNH, k_BSNH[:, each], v_BSNH[:, each], scale=1.0) for each in ([0, 1, 2], [3, 4, 5])]
    torch.testing.assert_close(join_attention(*parts), v_BSNH[:, :3].mean(1, keepdim=True))
