"""Every tensor op is undone exactly: same bits both ways, NaN payloads and signed zeros included."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardline.models.config import DecoderConfig, RopeConfig
from shardline.models.families.ops import OPS
from shardline.models.positions import rotate

SIZES = {"vocab_size": 8, "num_layers": 1}


@st.composite
def configs(draw: st.DrawFn) -> DecoderConfig:
    kv_heads, head_dim = draw(st.integers(1, 4)), 2 * draw(st.integers(1, 8))
    turning = 2 * draw(st.integers(0, head_dim // 2))
    return DecoderConfig(
        **SIZES,
        hidden_size=draw(st.integers(1, 9)),
        intermediate_size=draw(st.integers(1, 9)),
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=RopeConfig(partial=turning / head_dim),
    )


def random_bits(*shape: int, seed: int) -> Tensor:
    bits = torch.randint(-(2**15), 2**15, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int16)
    return bits.view(torch.bfloat16)


def their_shape(name: str, config: DecoderConfig) -> list[int]:
    """[rows, columns] of a matrix that the op takes from a file."""
    query, group = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"gate_up": 2 * config.intermediate_size, "pairs": query, "identity": query, "transpose": query}
    shape = [rows.get(name, query + 2 * group), config.hidden_size]
    return shape[::-1] if name.startswith("transpose") else shape


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize("name", OPS)
@given(config=configs(), vector=st.booleans(), seed=st.integers(0, 2**20))
@settings(max_examples=40, deadline=None)
def test_save_undoes_load_and_load_undoes_save(name, config, vector, seed):
    op = OPS[name]
    if name == "qkv_by_head":
        config = dataclasses.replace(config, num_kv_heads=config.num_heads)
    rows, columns = their_shape(name, config)
    theirs = random_bits(max(rows, columns) if vector and columns == 1 else rows, columns, seed=seed)
    if vector:  # a bias has the matrix's rows; GPT-2's transposed matrices have it along their last dim
        theirs = (theirs[0] if name.startswith("transpose") else theirs[:, 0]).contiguous()
    ours = op.load(theirs, config)
    assert all(part.is_contiguous() for part in ours)
    assert same_bits(op.save(ours, config), theirs)
    # Any tensors of our shapes, not only those that came from a file.
    fresh = tuple(random_bits(*part.shape, seed=seed + 1 + i) for i, part in enumerate(ours))
    again = op.load(op.save(fresh, config), config)
    assert all(same_bits(a, b) for a, b in zip(again, fresh, strict=True))


@given(config=configs(), seed=st.integers(0, 2**20))
@settings(max_examples=40, deadline=None)
def test_a_fused_matrix_of_pairs_is_its_parts_fused(config, seed):
    """ChatGLM's: queries and keys are sorted as they are alone, values stay as they are."""
    theirs = random_bits(*their_shape("qkv_pairs", config), seed=seed)
    query, key, value = OPS["qkv"].load(theirs, config)
    expected = (*OPS["pairs"].load(query, config), *OPS["pairs"].load(key, config), value)
    assert all(same_bits(a, b) for a, b in zip(OPS["qkv_pairs"].load(theirs, config), expected, strict=True))


@pytest.mark.parametrize("of", ["num_heads", "num_kv_heads"])
@given(config=configs(), seed=st.integers(0, 2**20))
@settings(max_examples=40, deadline=None)
def test_sorted_rows_turned_as_halves_are_pairs_turned(of, config, seed):
    """What the permutation is for: a projection with sorted rows, turned as halves, is the pairs' turn, sorted."""
    heads, size, turning = getattr(config, of), config.head_dim, config.rope.num_dims(config.head_dim)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(heads * size, generator=generator, dtype=torch.float64)
    angles = torch.randn(turning // 2, generator=generator, dtype=torch.float64)
    pairs = torch.view_as_complex(x.view(heads, size)[:, :turning].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    whole = torch.cat((turned, x.view(heads, size)[:, turning:]), dim=-1).flatten()
    (expected,) = OPS["pairs"].load(whole, config)
    (rows,) = OPS["pairs"].load(x, config)
    doubled = torch.cat((angles, angles)).view(1, 1, -1)
    actual = rotate(rows.view(1, 1, heads, size), doubled.cos(), doubled.sin())
    torch.testing.assert_close(actual.flatten(), expected, atol=1e-12, rtol=0)
