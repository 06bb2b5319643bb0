"""Products with reordered weights are right; everything else keeps PyTorch's own."""

from __future__ import annotations

import psutil
import pytest
import torch
import torch.nn.functional as F

from shardline.kernels import ReorderedWeight, can_reorder, embedding, linear
from shardline.kernels.reordered import padded_rows

needs_the_library = pytest.mark.skipif(
    not can_reorder(torch.zeros(1, 1)), reason="oneDNN's order of weights is for x86 processors"
)


@needs_the_library
@pytest.mark.parametrize("rows", [(0,), (1,), (2,), (4,), (5,), (70,), (1, 1), (2, 3), ()])
@pytest.mark.parametrize(("features", "outputs"), [(1, 1), (576, 192), (1000, 33), (2048, 64), (9000, 16)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_multiplied_right(rows: tuple[int, ...], features: int, outputs: int, with_bias: bool, threads: int):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(features)
        x = torch.randn(*rows, features)
        weight, bias = torch.randn(outputs, features) / features**0.5, torch.randn(outputs) if with_bias else None
        with torch.inference_mode():
            found = linear(x, ReorderedWeight(weight), bias)
        assert found.shape == (*rows, outputs)
        assert found.is_contiguous()
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        rounding = 1e-6 + 1e-7 * features**0.5  # fp32 sums of so many terms of size 1 / features ** 0.5
        torch.testing.assert_close(found.double(), exact, atol=rounding, rtol=1e-6)
    finally:
        torch.set_num_threads(before)


@needs_the_library
def test_an_embedding_that_is_the_head_too_is_read_by_row_and_multiplied():
    plain = torch.randn(100, 24)
    weight = ReorderedWeight(plain, keep_rows=True)
    ids, x = torch.tensor([[3, 99], [0, 3]]), torch.randn(5, 48)[:, ::2]
    assert torch.equal(embedding(ids, weight), plain[ids])
    torch.testing.assert_close(linear(x, weight), F.linear(x, plain))
    assert weight.num_bytes == 2 * plain.nbytes
    assert ReorderedWeight(plain).num_bytes == plain.nbytes


def test_few_numbers_of_rows_are_computed_and_little_is_wasted():
    """The library keeps half a megabyte of code for each number and shape, for ever."""
    padded = [padded_rows(num_rows) for num_rows in range(1, 1025)]
    assert len(set(padded)) <= 40
    assert all(num_rows <= each <= 1.25 * num_rows + 3 for num_rows, each in enumerate(padded, start=1))
    assert padded[:4] == [1, 2, 4, 4]
    assert padded_rows(100_001) == 100_096


@needs_the_library
def test_memory_does_not_grow_with_the_numbers_of_rows_met():
    process = psutil.Process()
    weight, x = ReorderedWeight(torch.randn(512, 256)), torch.randn(300, 256)
    with torch.inference_mode():
        for num_rows in sorted({padded_rows(n) for n in range(1, 301)}):
            weight.product(x[:num_rows])
        before = process.memory_info().rss
        for num_rows in range(1, 301):
            weight.product(x[:num_rows])
        grown = process.memory_info().rss - before
    assert grown < 20 * 2**20  # 150 MB without padding


def test_other_types_are_not_reordered():
    assert not can_reorder(torch.zeros(4, 4, dtype=torch.bfloat16))
    assert not can_reorder(torch.zeros(4, 4, device="meta"))


def test_a_plain_weight_keeps_pytorch_s_own_product():
    x, weight = torch.randn(2, 64), torch.randn(32, 64, requires_grad=True)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert linear(x, weight).requires_grad
