"""A small matrix product in each dtype, really run: its speed, or why it fails.

    for each in measure_matmuls("cpu"): print(each.dtype, each.gflops, each.error)

Tables say what a device should have; this says what it does, with the torch that is installed.
"""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

from shardline.hardware.machine import Matmul

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "measure_matmuls"]

DTYPES = ("float32", "tf32", "bfloat16", "float16", "float64", "int8", "float8_e4m3fn")


def measure_matmuls(device: str = "cpu", *, seconds: float = 0.06, size: int | None = None) -> tuple[Matmul, ...]:
    """Runs a [size, size] product in each of `DTYPES` that `device` may have, and returns how fast or why not.

    The products are small (512 on a CPU, 4096 elsewhere): this is a question of whether it works and of the order of
    magnitude. tf32 is asked of CUDA only. int8 adds up in int32, fp8 gives bf16 with scales of one.
    """
    dtypes = [dtype for dtype in DTYPES if dtype != "tf32" or device.startswith("cuda")]
    size = size or (512 if device == "cpu" else 4096)
    return tuple(_measure(device, dtype, size=size, seconds=seconds) for dtype in dtypes)


def _measure(device: str, dtype: str, *, size: int, seconds: float) -> Matmul:
    import torch

    before = torch.backends.cuda.matmul.fp32_precision if device.startswith("cuda") else None
    try:
        if before is not None:
            torch.backends.cuda.matmul.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of experimental functions: the number is what is asked for
            product = _product(torch, device, dtype, size)
            product()
            _synchronize(device)
            best_s, deadline = float("inf"), time.perf_counter() + seconds
            while True:
                start = time.perf_counter()
                product()
                _synchronize(device)
                now = time.perf_counter()
                best_s = min(best_s, now - start)
                if now > deadline:
                    break
    except (RuntimeError, AssertionError, TypeError, AttributeError, ValueError) as error:
        # torch has a different one of these for each way in which a device lacks a dtype.
        return Matmul(device=device, dtype=dtype, error=f"{str(error).partition(chr(10))[0][:160]}")
    finally:
        if before is not None:
            torch.backends.cuda.matmul.fp32_precision = before
    return Matmul(device=device, dtype=dtype, gflops=round(2.0 * size**3 / best_s / 1e9, 3))


def _product(torch: Any, device: str, dtype: str, size: int) -> Any:
    """Returns a function that multiplies two matrices once."""
    a_MK: torch.Tensor = torch.randn(size, size, device=device)
    b_KN = a_MK.t().contiguous()
    if dtype == "int8":
        a_int8, b_int8 = ((each * 40).to(torch.int8) for each in (a_MK, b_KN))
        return lambda: torch._int_mm(a_int8, b_int8)
    if dtype.startswith("float8"):
        kind, one = getattr(torch, dtype), torch.ones((), device=device)
        a_fp8, b_fp8 = a_MK.to(kind), a_MK.to(kind).t()  # the second by columns, as cuBLASLt takes it
        return lambda: torch._scaled_mm(a_fp8, b_fp8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    a_MK, b_KN = a_MK.to(kind), b_KN.to(kind)
    return lambda: torch.mm(a_MK, b_KN)


def _synchronize(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device.startswith("mps"):
        torch.mps.synchronize()
