"""Products of quantised weights are those of the weights they stand for, also where other kernels are known to fail."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardline.kernels import Int4Weight, Int8Weight, batch_invariant, linear, quantized

SHAPES = [(64, 64), (48, 128), (259, 100), (31, 7), (16, 33), (1, 32), (130, 576)]  # tails of outputs, sums and groups
ROWS = [0, 1, 2, 5, 16, 17, 100]


def random_weight(num_out: int, num_summed: int, *, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_out + num_summed)
    return torch.randn(num_out, num_summed, generator=generator) * num_summed**-0.5 + shift


def random_rows(num_rows: int, num_summed: int) -> torch.Tensor:
    """With one column far above the others, as trained models have."""
    x = torch.randn(num_rows, num_summed, generator=torch.Generator().manual_seed(num_rows))
    x[:, 0] *= 50
    return x


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return 0.0 if not expected.numel() else float((found - expected).norm() / expected.norm())


@pytest.fixture(params=["integers", "bf16"])
def int8_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "bf16":
        monkeypatch.setattr(quantized, "_sums_of_integers_are_exact", lambda: False)
    elif not quantized._sums_of_integers_are_exact():
        pytest.skip("this machine saturates sums of integers")
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_int8_products(shape: tuple[int, int], num_rows: int, int8_kernel: str):
    weight = Int8Weight.quantize(random_weight(*shape))
    x, bias = random_rows(num_rows, shape[1]), torch.ones(shape[0])
    expected = F.linear(x, weight.dequantize(), bias)
    error = relative_error(linear(x, weight, bias), expected)
    assert error < (1e-3 if int8_kernel == "integers" else 6e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("shift", [0.0, 0.3], ids=["centred", "asymmetric"])
def test_int4_products(shape: tuple[int, int], num_rows: int, shift: float):
    """Zero points far from zero, at one row too."""
    weight = Int4Weight.quantize(random_weight(*shape, shift=shift))
    x = random_rows(num_rows, shape[1])
    assert relative_error(linear(x, weight), F.linear(x, weight.dequantize())) < 6e-3


@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_the_largest_values_at_both_sides_do_not_saturate(num_rows: int):
    weight = torch.ones(48, 256)
    weight[1::2] = -1
    x = torch.full((num_rows, 256), 1000.0)
    x[::2] *= -1
    found = linear(x, Int8Weight.quantize(weight))
    torch.testing.assert_close(found, x @ weight.T, rtol=5e-3, atol=0)


def test_int8_error_is_half_a_step_and_int4_half_of_its_own():
    weight = random_weight(40, 96, shift=0.02)
    eight = Int8Weight.quantize(weight)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((eight.dequantize() - weight).abs() <= step * 0.501).all()
    assert eight.tensors["values"].min() >= -127
    four = Int4Weight.quantize(weight)
    groups = weight.unflatten(1, (-1, 32))
    step = (groups.amax(-1) - groups.amin(-1)).repeat_interleave(32, 1) / 15
    # scales and zeros are bf16: eight steps away, their rounding may cost some more
    assert ((four.dequantize() - weight).abs() <= step * 0.5 + weight.abs() * 2**-7).all()


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_constant_weights_and_rows_of_zeros(value: float):
    weight = torch.full((8, 64), value)
    for packed in (Int8Weight.quantize(weight), Int4Weight.quantize(weight)):
        torch.testing.assert_close(packed.dequantize(), weight, rtol=2**-8, atol=0)
        assert torch.equal(linear(torch.zeros(3, 64), packed), torch.zeros(3, 8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_and_in_its_row(bad: float):
    x = random_rows(4, 64)
    x[1, 5] = bad
    for packed in (Int8Weight.quantize(random_weight(8, 64)), Int4Weight.quantize(random_weight(8, 64))):
        out = linear(x, packed)
        assert not out[1].isfinite().any()
        assert out[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_holds_the_same_bits(shape: tuple[int, int]):
    four = Int4Weight.quantize(random_weight(*shape))
    again = Int4Weight.from_tensors(**four.tensors, num_summed=shape[1])
    assert torch.equal(again.dequantize(), four.dequantize())
    x = random_rows(3, shape[1])
    assert torch.equal(linear(x, again), linear(x, four))
    eight = Int8Weight.quantize(random_weight(*shape))
    assert torch.equal(linear(x, Int8Weight(**eight.tensors)), linear(x, eight))


def test_bytes():
    assert Int8Weight.quantize(random_weight(128, 256)).num_bytes == 128 * 256 + 128 * 4
    assert Int4Weight.quantize(random_weight(128, 256)).num_bytes == 128 * 256 // 2 + 128 * 256 // 32 * 4


def test_rows_are_those_of_the_weight():
    weight = Int8Weight.quantize(random_weight(20, 16))
    ids = torch.tensor([[3, 3], [0, 19]])
    assert torch.equal(weight.rows(ids), weight.dequantize()[ids])


def test_batch_invariant(int8_kernel: str):
    x = random_rows(70, 90)
    for packed in (Int8Weight.quantize(random_weight(50, 90)), Int4Weight.quantize(random_weight(50, 90))):
        with batch_invariant():
            alone = torch.cat([linear(x[row : row + 1].clone(), packed) for row in range(70)])
            for first, last in ((0, 70), (3, 20), (60, 62), (5, 70)):
                assert torch.equal(linear(x[first:last].clone(), packed), alone[first:last])
