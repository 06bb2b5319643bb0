"""What this machine has, as far as this process may use it.

    machine = probe()                        # a few milliseconds; loads no torch
    machine = probe(with_torch=True)         # also asks torch for accelerators

Affinity masks, control groups (a container's limits) and the host are all asked; the smallest one counts.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shardline.hardware.cgroup import CgroupLimits, read_limits

__all__ = ["Accelerator", "Machine", "probe"]

# Ours -> the names under which Linux (x86 flags, Arm features) lists them.
_ISA = {
    "sse4_2": {"sse4_2"},
    "avx2": {"avx2"},
    "fma": {"fma"},
    "f16c": {"f16c"},
    "avx512f": {"avx512f"},
    "avx512_vnni": {"avx512_vnni"},
    "avx512_bf16": {"avx512_bf16"},
    "amx": {"amx_tile"},
    "neon": {"asimd", "neon"},
    "sve": {"sve"},
    "i8mm": {"i8mm"},
    "bf16": {"bf16"},
}
# The same on macOS: sysctl names, present with the value 1.
_MACOS_ISA = {
    "sse4_2": "hw.optional.sse4_2",
    "avx2": "hw.optional.avx2_0",
    "fma": "hw.optional.fma",
    "f16c": "hw.optional.f16c",
    "avx512f": "hw.optional.avx512f",
    "avx512_vnni": "hw.optional.avx512vnni",
    "neon": "hw.optional.neon",
    "i8mm": "hw.optional.arm.FEAT_I8MM",
    "bf16": "hw.optional.arm.FEAT_BF16",
}
_PACKAGES = ("torch", "transformers", "numpy", "safetensors")


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device that torch can use."""

    kind: str  # "cuda" (NVIDIA), "rocm" (AMD) or "mps" (Apple)
    name: str
    memory_bytes: int
    capability: str | None = None  # "9.0" for NVIDIA, "gfx942" for AMD


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts only; what they mean is `hardware.checks`' business."""

    os: str
    cpu_name: str
    num_physical_cores: int
    num_logical_cores: int
    num_cores: int  # that this process may use: affinity and quota counted, at least 1
    cores_limit: str  # what sets num_cores: "host", "affinity" or "cgroup quota"
    isa: tuple[str, ...]
    memory_bytes: int
    memory_limit: str  # what sets memory_bytes: "host" or "cgroup"
    memory_available_bytes: int
    disk_path: str
    disk_free_bytes: int
    shm_free_bytes: int | None  # None where there is no /dev/shm
    accelerators: tuple[Accelerator, ...]
    no_accelerator: str  # why there is none; empty when there is one
    python_version: str
    packages: dict[str, str | None]  # name -> version; None when not installed

    @property
    def torch_version(self) -> str | None:
        return self.packages.get("torch")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def probe(*, folder: str | Path = ".", with_torch: bool = False) -> Machine:
    """Returns this machine's facts; `folder` is where a run would be written (its disk is measured)."""
    limits = read_limits()
    num_cores, cores_limit = usable_cores(_affinity(), psutil.cpu_count() or 1, limits)
    memory = psutil.virtual_memory()
    memory_bytes, memory_available_bytes, memory_limit = usable_memory(memory.total, memory.available, limits)
    disk_path = _existing(Path(folder))
    accelerators, no_accelerator = _accelerators() if with_torch else ((), "not asked")
    return Machine(
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_name=_cpu_name(),
        num_physical_cores=psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        num_logical_cores=psutil.cpu_count() or 1,
        num_cores=num_cores,
        cores_limit=cores_limit,
        isa=_isa(),
        memory_bytes=memory_bytes,
        memory_limit=memory_limit,
        memory_available_bytes=memory_available_bytes,
        disk_path=str(disk_path),
        disk_free_bytes=shutil.disk_usage(disk_path).free,
        shm_free_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        accelerators=accelerators,
        no_accelerator=no_accelerator,
        python_version=platform.python_version(),
        packages={name: _version(name) for name in _PACKAGES},
    )


def usable_cores(affinity: int, num_logical_cores: int, limits: CgroupLimits) -> tuple[int, str]:
    """Returns (cores, what limits them). A quota of 1.5 cores keeps one thread busy without throttling."""
    cores, limit = num_logical_cores, "host"
    if affinity < cores:
        cores, limit = affinity, "affinity"
    if limits.cpus is not None and limits.cpus < cores:
        cores, limit = int(limits.cpus), "cgroup quota"
    return max(1, cores), limit


def usable_memory(total_bytes: int, available_bytes: int, limits: CgroupLimits) -> tuple[int, int, str]:
    """Returns (total, available, what limits them) of the host and the control group together."""
    if limits.memory_bytes is None or limits.memory_bytes >= total_bytes:
        return total_bytes, available_bytes, "host"
    free_in_group = max(0, limits.memory_bytes - (limits.memory_used_bytes or 0))
    return limits.memory_bytes, min(available_bytes, free_in_group), "cgroup"


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.machine()
    return _cpuinfo("model name", "Model", "Hardware") or platform.processor() or platform.machine()


def _isa() -> tuple[str, ...]:
    if sys.platform == "darwin":
        return tuple(name for name, key in _MACOS_ISA.items() if _sysctl(key) == "1")
    flags = set((_cpuinfo("flags", "Features") or "").split())
    return tuple(name for name, spellings in _ISA.items() if flags & spellings)


def _cpuinfo(*keys: str) -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    return next((values[key] for key in keys if key in values), None)


def _sysctl(key: str) -> str | None:
    try:
        done = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _accelerators() -> tuple[tuple[Accelerator, ...], str]:
    import torch

    found: list[Accelerator] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            props = torch.cuda.get_device_properties(index)
            rocm = torch.version.hip is not None
            capability = props.gcnArchName if rocm else f"{props.major}.{props.minor}"
            found.append(
                Accelerator(
                    kind="rocm" if rocm else "cuda",
                    name=props.name,
                    memory_bytes=props.total_memory,
                    capability=capability,
                )
            )
    elif torch.backends.mps.is_available():
        memory_bytes = torch.mps.recommended_max_memory()
        found.append(Accelerator(kind="mps", name=_cpu_name(), memory_bytes=memory_bytes))
    return tuple(found), "" if found else _why_no_accelerator(torch)


def _why_no_accelerator(torch: Any) -> str:
    driver = Path("/proc/driver/nvidia/version").exists()
    nodes = Path("/dev/nvidia0").exists()
    amd = Path("/dev/kfd").exists()
    if torch.version.cuda is None and torch.version.hip is None:
        if driver or nodes:
            return f"an NVIDIA device is here, but torch {torch.__version__} is a CPU build"
        if amd:
            return f"an AMD device is here, but torch {torch.__version__} is a CPU build"
        return "no NVIDIA, AMD or Apple device found"
    if torch.version.cuda is not None and not driver:
        return f"torch is built for CUDA {torch.version.cuda}, but no NVIDIA driver is loaded"
    if torch.version.cuda is not None and not nodes:
        return "an NVIDIA driver is loaded, but this container has no /dev/nvidia0"
    if torch.version.cuda is not None:
        return f"torch is built for CUDA {torch.version.cuda}, but the driver is too old for it or refuses"
    return f"torch is built for ROCm {torch.version.hip}, but it finds no AMD device (/dev/kfd exists: {amd})"
