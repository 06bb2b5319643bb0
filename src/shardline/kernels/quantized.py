"""Weights in 8 or 4 bits, and their products.

    weight = Int8Weight.quantize(weight_NK)         # a scale for each row
    weight = Int4Weight.quantize(weight_NK)         # a scale and a zero for each group of 32 along K
    y = linear(x, weight)

int8: each row of activations becomes two 8-bit numbers a value (15 bits together), and integers are summed exactly
(`torch._int_mm`), where this machine does that without saturation; elsewhere activations are rounded to bf16 for a few
rows, and for many the weight is expanded. int4: activations are rounded to bf16 (the kernel that PyTorch has for it).
What a product should be is `dequantize()` times the activations; docs/serving/quantization.md has speed and quality.

Shapes: R rows, K summed over, N outputs, G groups along K.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.invariance import fixed_product, is_batch_invariant
from shardline.kernels.linear import PackedWeight, linear

__all__ = ["GROUP_SIZE", "Int4Weight", "Int8Weight"]

GROUP_SIZE = 32
_FEW_ROWS = 16  # up to here the bf16 kernel is faster than expanding the weight (AVX2; see the manual)
_BLOCK_N = 64  # PyTorch's int4 kernels pack this many outputs together


class Int8Weight(PackedWeight):
    """w = value * scale of its row; values are in -127..127, so that negating a weight negates its values.

    values   [N, K] int8
    scales   [N] fp32
    """

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        super().__init__()
        self.shape = values.shape
        self._values = values.contiguous()
        self._scales = scales

    @classmethod
    def quantize(cls, weight_NK: Tensor) -> Int8Weight:
        """Rounds to the nearest of 255 levels."""
        weight_NK = weight_NK.detach().float()
        scales_N = weight_NK.abs().amax(1) / 127
        values_NK = (weight_NK / _nonzero(scales_N).unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
        return cls(values_NK, scales_N)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"values": self._values, "scales": self._scales}

    @property
    def num_bytes(self) -> int:
        return self._values.nbytes + self._scales.nbytes

    def release(self) -> None:
        del self._values, self._scales

    def dequantize(self) -> Tensor:
        return self._values.float() * self._scales.unsqueeze(1)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._values).float() * self._scales[ids].unsqueeze(-1)

    def product(self, x: Tensor) -> Tensor:
        x_RK = x.reshape(-1, x.shape[-1])
        if not len(x_RK):
            out_RN = x_RK.new_empty(0, self.shape[0])
        elif _sums_of_integers_are_exact():
            out_RN = self._multiply_integers(x_RK.float())
        elif self.shape[0] % 16 or self.shape[1] % 64:  # the bf16 kernel reads past the end of other shapes
            out_RN = linear(x_RK.float(), self._values.float()) * self._scales
        elif is_batch_invariant():
            out_RN = fixed_product(x_RK, self._multiply_bf16, key=("int8", *self.shape))
        elif len(x_RK) <= _FEW_ROWS:
            out_RN = self._multiply_bf16(x_RK)
        else:
            out_RN = F.linear(x_RK.float(), self._values.float()) * self._scales
        return out_RN.view(*x.shape[:-1], self.shape[0]).to(x.dtype)

    def _multiply_integers(self, x_RK: Tensor) -> Tensor:
        """x = (high + low / 254) * its row's largest / 127: nothing in it depends on other rows."""
        step_R1 = _nonzero(x_RK.abs().amax(1, keepdim=True)) / 127
        steps_RK = x_RK / step_R1
        high_RK = steps_RK.round()
        low_RK = ((steps_RK - high_RK) * 254).round()
        sums_RN = torch._int_mm(torch.cat([high_RK, low_RK]).to(torch.int8), self._values.T)
        high_RN, low_RN = sums_RN.float().chunk(2)
        return (high_RN + low_RN / 254) * step_R1 * self._scales

    def _multiply_bf16(self, x_RK: Tensor) -> Tensor:
        ones_N = torch.ones(self.shape[0], dtype=torch.bfloat16)
        return torch._weight_int8pack_mm(x_RK.bfloat16(), self._values, ones_N).float() * self._scales


class Int4Weight(PackedWeight):
    """w = (value - 8) * scale + zero of its group; values are in 0..15, scales and zeros in bf16.

    values_NK     uint8, 0..15; K is as the groups make it, the last one padded
    scales_NG, zeros_NG   bf16
    num_summed    the weight's own K
    """

    def __init__(self, values_NK: Tensor, scales_NG: Tensor, zeros_NG: Tensor, *, num_summed: int) -> None:
        super().__init__()
        self.shape = torch.Size((len(values_NK), num_summed))
        self._group_size = values_NK.shape[1] // scales_NG.shape[1]
        padded_NK = F.pad(values_NK, (0, 0, 0, -len(values_NK) % _BLOCK_N))
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(padded_NK.int(), 2)
        self._padded_columns = padded_NK.shape[1]
        both_NG2 = torch.stack([scales_NG, zeros_NG], dim=-1)
        self._scales_and_zeros = (
            F.pad(both_NG2, (0, 0, 0, 0, 0, -len(values_NK) % _BLOCK_N)).transpose(0, 1).contiguous()
        )

    @classmethod
    def quantize(cls, weight_NK: Tensor, *, group_size: int = GROUP_SIZE) -> Int4Weight:
        """Spreads 16 levels from each group's smallest to its largest weight."""
        weight_NK = weight_NK.detach().float()
        num_summed = weight_NK.shape[1]
        padding = -num_summed % group_size
        if padding:  # by the row's last weight, which widens no range
            weight_NK = torch.cat([weight_NK, weight_NK[:, -1:].expand(-1, padding)], dim=1)
        groups_NGS = weight_NK.unflatten(1, (-1, group_size))
        low_NG, high_NG = groups_NGS.amin(-1), groups_NGS.amax(-1)
        scales_NG = ((high_NG - low_NG) / 15).bfloat16()
        zeros_NG = ((high_NG + low_NG) / 2 + scales_NG.float() / 2).bfloat16()  # levels run from -8 to 7
        steps_NGS = (groups_NGS - zeros_NG.float().unsqueeze(-1)) / _nonzero(scales_NG.float()).unsqueeze(-1)
        values_NK = (steps_NGS.round() + 8).clamp(0, 15).to(torch.uint8).flatten(1)
        return cls(values_NK, scales_NG, zeros_NG, num_summed=num_summed)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """In a file two values share a byte, the first in the low half."""
        values_NK = self._unpacked()
        return {
            "values": values_NK[:, ::2] | values_NK[:, 1::2] << 4,
            "scales": self._groups(0),
            "zeros": self._groups(1),
        }

    @classmethod
    def from_tensors(cls, values: Tensor, scales: Tensor, zeros: Tensor, *, num_summed: int) -> Int4Weight:
        """The inverse of `tensors`."""
        values_NK = torch.stack([values & 15, values >> 4], dim=-1).flatten(1)
        return cls(values_NK, scales, zeros, num_summed=num_summed)

    @property
    def num_bytes(self) -> int:
        return self._packed.nbytes + self._scales_and_zeros.nbytes

    def release(self) -> None:
        del self._packed, self._scales_and_zeros

    def dequantize(self) -> Tensor:
        """Returns the weight that it stands for, fp32 [N, K]."""
        steps_NGS = self._unpacked().unflatten(1, (-1, self._group_size)).float() - 8
        weight_NGS = steps_NGS * self._groups(0).float().unsqueeze(-1) + self._groups(1).float().unsqueeze(-1)
        return weight_NGS.flatten(1)[:, : self.shape[1]]

    def rows(self, ids: Tensor) -> Tensor:
        raise TypeError("embeddings are not kept in 4 bits")

    def product(self, x: Tensor) -> Tensor:
        if is_batch_invariant():
            return fixed_product(x, self._multiply, key=("int4", *self.shape))
        return self._multiply(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.shape[0])

    def _multiply(self, x_RK: Tensor) -> Tensor:
        if not len(x_RK):
            return x_RK.new_empty(0, self.shape[0])
        out_RN = self._kernel(F.pad(x_RK, (0, self._padded_columns - x_RK.shape[1])), self._scales_and_zeros)
        return out_RN[:, : self.shape[0]].to(x_RK.dtype)

    def _kernel(self, x_RK: Tensor, scales_and_zeros: Tensor) -> Tensor:
        x_RK = x_RK.bfloat16().contiguous()
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x_RK, self._packed, self._group_size, scales_and_zeros)

    def _groups(self, which: int) -> Tensor:
        """Returns the groups' scales (0) or zeros (1), [N, G]."""
        return self._scales_and_zeros[:, : self.shape[0], which].T

    def _unpacked(self) -> Tensor:
        """Returns values_NK. The packed order is the kernel's own; the product with the identity undoes it, exactly."""
        plain = torch.zeros_like(self._scales_and_zeros)
        plain[..., 0] = 1.0
        steps_KN = self._kernel(torch.eye(self._padded_columns), plain)
        return (steps_KN.T[: self.shape[0]] + 8).to(torch.uint8)


def _nonzero(x: Tensor) -> Tensor:
    """What is all zeros is divided by 1."""
    return torch.where(x == 0, 1.0, x)


@cache
def _sums_of_integers_are_exact() -> bool:
    """Whether int8 products are summed in 32 bits. Without VNNI, pairs of them may be cut to 16, which large values at
    both sides show.
    """
    ends = torch.tensor([-127, -126, 126, 127], dtype=torch.int8)
    x, weight = ends.repeat(4, 64)[:, :251].contiguous(), ends.repeat_interleave(4).repeat(16, 16)[:, :251].contiguous()
    x[1:3, 100:] = 127
    weight[::3, 50:] = 127
    return torch.equal(torch._int_mm(x, weight.T), (x.double() @ weight.double().T).int())
