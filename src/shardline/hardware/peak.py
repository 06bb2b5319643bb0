"""How many floating-point operations a second this device really does in a matrix product.

    measure_matmul_flops()                             # fp32 on the CPU with torch's threads, about 0.3 s
    measure_matmul_flops("bfloat16", device="cuda")
    measure_copy_rate()                                # bytes/s read and written, about 0.2 s

This measured peak is what model FLOPs utilisation is divided by; there is no table of nominal peaks to fall
back on, so a device or dtype that can't run the product has no peak (None) and no utilisation.
"""

from __future__ import annotations

import time

__all__ = ["measure_copy_rate", "measure_matmul_flops"]


def measure_matmul_flops(
    dtype: str = "float32", *, seconds: float = 0.3, device: str = "cpu", size: int | None = None
) -> float | None:
    """Returns FLOP/s of the best [size, size] @ [size, size] product in `seconds`; None if it can't run.

    `dtype` is torch's name. The default size is 1024 on a CPU (out of cache, short) and 8192 elsewhere.
    A multiply and an add count as two operations.
    """
    import torch

    size = size or (1024 if device == "cpu" else 8192)
    try:
        a_MK = torch.randn(size, size, dtype=torch.float32).to(device=device, dtype=getattr(torch, dtype))
        b_KN = a_MK.clone()
        out_MN = torch.empty_like(a_MK)
        torch.mm(a_MK, b_KN, out=out_MN)  # warm-up: thread pool, library's choice of kernel
        _synchronize(device)
    except (RuntimeError, AssertionError):
        return None  # torch says so when the device is absent or its matmul lacks the dtype
    best_s = float("inf")
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        torch.mm(a_MK, b_KN, out=out_MN)
        _synchronize(device)
        best_s = min(best_s, time.perf_counter() - start)
    return 2.0 * size**3 / best_s


def measure_copy_rate(device: str = "cpu", *, seconds: float = 0.2, size_bytes: int = 1 << 28) -> float | None:
    """Returns the bytes/s that a large copy within the device's memory reads and writes; None if it can't run."""
    import torch

    try:
        source = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        target.copy_(source)
        _synchronize(device)
    except (RuntimeError, AssertionError):
        return None
    best_s = float("inf")
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        best_s = min(best_s, time.perf_counter() - start)
    return 2.0 * size_bytes / best_s


def _synchronize(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device.startswith("mps"):
        torch.mps.synchronize()
