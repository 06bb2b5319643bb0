"""Machines written by hand, for tests of what is said about them."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardline.hardware.probe import Machine

GIB = 1 << 30

HEALTHY = Machine(
    os="Linux 6.8 x86_64",
    cpu_name="Example CPU",
    num_physical_cores=8,
    num_logical_cores=16,
    num_cores=16,
    cores_limit="host",
    isa=("sse4_2", "avx2", "fma", "f16c"),
    memory_bytes=64 * GIB,
    memory_limit="host",
    memory_available_bytes=48 * GIB,
    disk_path="/data",
    disk_free_bytes=200 * GIB,
    shm_free_bytes=32 * GIB,
    accelerators=(),
    no_accelerator="no NVIDIA, AMD or Apple device found",
    python_version="3.12.1",
    packages={"torch": "2.13.0+cpu", "transformers": "5.24.0", "numpy": "2.4.6", "safetensors": "0.8.0"},
)


def machine(**changes: Any) -> Machine:
    return dataclasses.replace(HEALTHY, **changes)
