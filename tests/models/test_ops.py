"""Every tensor op is undone exactly: same bits both ways, NaN payloads and signed zeros included."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardline.models.config import DecoderConfig, RopeConfig
from shardline.models.families import ops
from shardline.models.families.ops import RotaryPairs
from shardline.models.positions import rotate

OPS = {
    "IDENTITY": ops.IDENTITY,
    "TRANSPOSE": ops.TRANSPOSE,
    "GATE_UP": ops.GATE_UP,
    "QKV": ops.QKV,
    "QKV_BY_HEAD": ops.QKV_BY_HEAD,
    "QKV_PAIRS": ops.QKV_PAIRS,
    "TRANSPOSED_QKV": ops.TRANSPOSED_QKV,
    "query pairs": RotaryPairs("num_heads"),
    "key pairs": RotaryPairs("num_kv_heads"),
}
SIZES = {"vocab_size": 8, "num_layers": 1}


def test_every_op_is_tested():
    assert {name for name in ops.__all__ if name.isupper()} == {name for name in OPS if name.isupper()}


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
    """[rows, columns] of the matrix that the op takes from a file."""
    query, group = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {
        "GATE_UP": 2 * config.intermediate_size,
        "query pairs": query,
        "key pairs": group,
        "IDENTITY": query,
        "TRANSPOSE": query,
    }.get(name, query + 2 * group)
    shape = [rows, config.hidden_size]
    return shape[::-1] if name.startswith("TRANSPOSE") else shape


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize("name", OPS)
@given(config=configs(), vector=st.booleans(), seed=st.integers(0, 2**20))
@settings(max_examples=40, deadline=None)
def test_save_undoes_load_and_load_undoes_save(name, config, vector, seed):
    op = OPS[name]
    if name == "QKV_BY_HEAD":
        config = dataclasses.replace(config, num_kv_heads=config.num_heads)
    rows, columns = their_shape(name, config)
    theirs = random_bits(max(rows, columns) if vector and columns == 1 else rows, columns, seed=seed)
    if vector:  # a bias has the matrix's rows; GPT-2's transposed matrices have it along their last dim
        theirs = (theirs[0] if name.startswith("TRANSPOSE") else theirs[:, 0]).contiguous()
    ours = op.load(theirs, config)
    assert all(part.is_contiguous() for part in ours)
    assert same_bits(op.save(ours, config), theirs)
    # Any tensors of our shapes, not only those that came from a file.
    fresh = tuple(random_bits(*part.shape, seed=seed + 1 + i) for i, part in enumerate(ours))
    again = op.load(op.save(fresh, config), config)
    assert all(same_bits(a, b) for a, b in zip(again, fresh, strict=True))


@given(config=configs(), seed=st.integers(0, 2**20))
@settings(max_examples=40, deadline=None)
def test_sorted_rows_turned_as_halves_are_pairs_turned(config, seed):
    """What the permutation is for: a projection with sorted rows, turned as halves, is the pairs' turn, sorted."""
    heads, size, turning = config.num_heads, config.head_dim, config.rope.num_dims(config.head_dim)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(heads * size, generator=generator, dtype=torch.float64)
    angles = torch.randn(turning // 2, generator=generator, dtype=torch.float64)
    pairs = torch.view_as_complex(x.view(heads, size)[:, :turning].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    whole = torch.cat((turned, x.view(heads, size)[:, turning:]), dim=-1).flatten()
    op = RotaryPairs("num_heads")
    (expected,) = op.load(whole, config)
    (rows,) = op.load(x, config)
    doubled = torch.cat((angles, angles)).view(1, 1, -1)
    actual = rotate(rows.view(1, 1, heads, size), doubled.cos(), doubled.sin())
    torch.testing.assert_close(actual.flatten(), expected, atol=1e-12, rtol=0)
