"""The products of inference, by other routines than F.linear's, are right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardline.kernels import linear


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
            found = linear(x, weight, bias)
        assert found.shape == (*rows, outputs)
        assert found.is_contiguous()
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        rounding = 1e-6 + 1e-7 * features**0.5  # fp32 sums of so many terms of size 1 / features ** 0.5
        torch.testing.assert_close(found.double(), exact, atol=rounding, rtol=1e-6)
    finally:
        torch.set_num_threads(before)


def test_training_and_other_dtypes_keep_pytorch_s_own():
    x, weight = torch.randn(2, 64), torch.randn(32, 64, requires_grad=True)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert linear(x, weight).requires_grad
    with torch.no_grad():  # the trainer's evaluation
        assert torch.equal(linear(x, weight), F.linear(x, weight))
    with torch.inference_mode():
        assert torch.equal(
            linear(x.bfloat16(), weight.detach().bfloat16()), F.linear(x.bfloat16(), weight.detach().bfloat16())
        )
        slices = torch.randn(4, 128)[:, ::2]
        torch.testing.assert_close(linear(slices, weight.detach()), F.linear(slices, weight.detach()))
