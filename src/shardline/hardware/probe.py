"""What this machine has, as far as this process may use it.

    machine = probe()                        # a few milliseconds; loads no torch
    machine = probe(with_torch=True)         # also asks torch for accelerators
    machine = probe(with_devices=True)       # also asks nvidia-smi, and the packages what they require

Affinity masks, control groups (a container's limits) and the host are all asked; the smallest one counts.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from pathlib import Path

import psutil

from shardline.hardware.cgroup import CgroupLimits, read_limits
from shardline.hardware.devices import accelerators, find_amd, find_apple, find_tpu, sysctl, torch_build
from shardline.hardware.machine import Accelerator, Limits, Machine
from shardline.hardware.nvidia import probe_nvidia
from shardline.hardware.packages import OWN, PACKAGES, cuda_wheels, installed, unmet_requirements

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
# Variables that change which device is used and how; others are nobody's business.
_ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HSA_OVERRIDE_GFX_VERSION",
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
    "PYTORCH_ENABLE_MPS_FALLBACK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
)


def probe(*, folder: str | Path = ".", with_torch: bool = False, with_devices: bool = False) -> Machine:
    """Returns this machine's facts; `folder` is where a run would be written (its disk is measured)."""
    limits = read_limits()
    num_cores, cores_limit = usable_cores(_affinity(), psutil.cpu_count() or 1, limits)
    memory = psutil.virtual_memory()
    memory_bytes, memory_available_bytes, memory_limit = usable_memory(memory.total, memory.available, limits)
    disk_path = _existing(Path(folder))
    cpu_name = _cpu_name()
    devices = accelerators(cpu_name) if with_torch else ()
    return Machine(
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_name=cpu_name,
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
        accelerators=devices,
        no_accelerator="" if devices else "torch finds none" if with_torch else "not asked",
        python_version=platform.python_version(),
        packages={name: found for name, found in installed(PACKAGES).items() if found or name in OWN},
        host_memory_bytes=memory.total,
        limits=_ulimits(),
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        nvidia=probe_nvidia() if with_devices else None,
        amd=find_amd(),
        tpu=find_tpu(),
        apple=find_apple(),
        torch=torch_build() if with_torch else None,
        cuda_wheels=cuda_wheels() if with_devices else {},
        unmet_requirements=unmet_requirements(PACKAGES) if with_devices else (),
        environment={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
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


def _ulimits() -> Limits:
    def soft(which: int) -> int | None:
        value, _ = resource.getrlimit(which)
        return None if value == resource.RLIM_INFINITY else value

    return Limits(
        locked_memory_bytes=soft(resource.RLIMIT_MEMLOCK),
        open_files=soft(resource.RLIMIT_NOFILE),
        processes=soft(resource.RLIMIT_NPROC),
    )


def _cpu_name() -> str:
    if sys.platform == "darwin":
        return sysctl("machdep.cpu.brand_string") or platform.machine()
    return _cpuinfo("model name", "Model", "Hardware") or platform.processor() or platform.machine()


def _isa() -> tuple[str, ...]:
    if sys.platform == "darwin":
        return tuple(name for name, key in _MACOS_ISA.items() if sysctl(key) == "1")
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
