"""A machine's description as the flat facts that rules speak of.

    facts = machine_facts(machine)
    facts["memory_available_gib"], facts["driver_needed"], facts["package.torch"]
    for gpu in gpu_facts(machine, facts): gpu["gpu_in_wheel"]

A fact that is not known is None. Everything that needs a look into a table is looked up here, so that a rule only
compares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardline.hardware.conditions import version_key
from shardline.hardware.machine import Machine, NvidiaGpu
from shardline.hardware.packages import PACKAGES, required_versions
from shardline.hardware.tables import (
    capability,
    driver_for,
    gfx,
    newest_cuda_of_driver,
    runs_on,
    tables,
    wheel_archs,
    wheel_for_capability,
    wheel_for_driver,
)

__all__ = ["framework_facts", "gpu_facts", "install_line", "machine_facts", "platform_of"]

GIB, MIB = 1 << 30, 1 << 20
_OLD_WHEELS = "https://pytorch.org/get-started/previous-versions"
_SLOW_LINKS = {"SYS": "the link between processors", "NODE": "several PCIe host bridges", "PHB": "a PCIe host bridge"}


def machine_facts(machine: Machine) -> dict[str, Any]:
    """Returns the facts of the whole machine."""
    return {
        **_host(machine),
        **_matmuls(machine),
        **_torch(machine),
        **_nvidia(machine),
        **_others(machine),
        **_packages(machine),
    }


def gpu_facts(machine: Machine, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the facts of each NVIDIA GPU; they come on top of the machine's."""
    gpus = machine.nvidia.gpus if machine.nvidia else ()
    return [_gpu(gpu, facts) for gpu in gpus]


def framework_facts(machine: Machine) -> list[dict[str, Any]]:
    """Returns what each installed framework does on this machine's platform, as far as that is tabled."""
    platform = platform_of(machine)
    rows = [row for row in tables().platforms.rows if row.platform == platform]
    found = []
    for row in rows:
        version = machine.packages.get(row.framework)
        if version is not None:
            found.append(
                {
                    "framework": row.framework,
                    "framework_version": version,
                    "framework_support": row.support,
                    "framework_note": row.note or "it has no support for it",
                    "framework_source": row.source,
                }
            )
    return found


def platform_of(machine: Machine) -> str:
    """Returns what computes here: cuda, rocm, tpu, mps or cpu."""
    if machine.nvidia is not None and (machine.nvidia.gpus or machine.amd is None):
        return "cuda"
    if machine.amd is not None:
        return "rocm"
    if machine.tpu is not None:
        return "tpu"
    if machine.apple is not None and "x86" not in machine.os.rpartition(" ")[2]:
        return "mps"
    return machine.accelerators[0].kind if machine.accelerators else "cpu"


def install_line(wheel: tuple[str, str] | None) -> str:
    """Returns the command that installs a wheel of PyTorch; uv knows where each CUDA's wheels are."""
    if wheel is None:
        return f"no listed wheel fits; older ones are at {_OLD_WHEELS}"
    torch, cuda = wheel
    return f"uv pip install 'torch=={torch}.*' --torch-backend=cu{cuda.replace('.', '')}"


def _host(machine: Machine) -> dict[str, Any]:
    limits = machine.limits
    locked = None if limits is None else limits.locked_memory_bytes
    files = None if limits is None else limits.open_files
    return {
        "system": machine.os.partition(" ")[0],
        "arch": machine.os.rpartition(" ")[2],
        "cpu_name": machine.cpu_name,
        "num_cores": machine.num_cores,
        "num_physical_cores": machine.num_physical_cores,
        "core_share": machine.num_cores / machine.num_physical_cores,
        "cores_limit": machine.cores_limit,
        "isa": machine.isa,
        "memory_gib": machine.memory_bytes / GIB,
        "memory_available_gib": machine.memory_available_bytes / GIB,
        "memory_limit": machine.memory_limit,
        "host_memory_gib": None if machine.host_memory_bytes is None else machine.host_memory_bytes / GIB,
        "memory_share": machine.memory_bytes / machine.host_memory_bytes if machine.host_memory_bytes else None,
        "disk_free_gib": machine.disk_free_bytes / GIB,
        "disk_path": machine.disk_path,
        "shm_free_mib": None if machine.shm_free_bytes is None else machine.shm_free_bytes / MIB,
        "locked_memory_gib": None if limits is None else math.inf if locked is None else locked / GIB,
        "open_files": None if limits is None else math.inf if files is None else files,
        "infiniband": machine.infiniband,
    }


def _matmuls(machine: Machine) -> dict[str, Any]:
    gflops = {(each.device, each.dtype): each.gflops for each in machine.matmuls}
    errors = {(each.device, each.dtype): each.error for each in machine.matmuls}
    plain, brain = gflops.get(("cpu", "float32")), gflops.get(("cpu", "bfloat16"))
    devices = {each.device for each in machine.matmuls} - {"cpu"}
    failed = [device for device in sorted(devices) if errors.get((device, "float32"))]
    return {
        "cpu_fp32_gflops": plain,
        "cpu_fp32_error": errors.get(("cpu", "float32")) or None,
        "cpu_bf16_share": brain / plain if brain and plain else None,
        "device_matmul_error": f"{failed[0]}: {errors[failed[0], 'float32']}" if failed else None,
    }


def _torch(machine: Machine) -> dict[str, Any]:
    torch = machine.torch
    return {
        "torch": torch.version if torch else machine.packages.get("torch"),
        "torch_cuda": torch.cuda if torch else None,
        "torch_hip": torch.hip if torch else None,
        "torch_import_error": (torch.import_error or None) if torch else None,
        "torch_kind": None
        if torch is None or torch.import_error
        else "cuda"
        if torch.cuda
        else "rocm"
        if torch.hip
        else "cpu",
        "torch_available": torch.available if torch else None,
        "torch_error": (torch.error or None) if torch else None,
        "cudnn": torch.cudnn if torch else None,
    }


def _nvidia(machine: Machine) -> dict[str, Any]:
    nvidia, torch = machine.nvidia, machine.torch
    gpus = nvidia.gpus if nvidia else ()
    driver = nvidia.driver if nvidia else None
    numbers = [gpu.capability for gpu in gpus if gpu.capability]
    fewest = min(numbers, key=lambda number: tuple(map(int, number.split("."))), default=None)
    cuda = torch.cuda if torch else None
    links = _links(nvidia.links if nvidia else ())
    return {
        "nvidia": nvidia is not None,
        "nvidia_nodes": nvidia.nodes if nvidia else None,
        "num_gpus": len(gpus),
        "driver": driver,
        "driver_needed": driver_for(cuda) if cuda else None,
        "driver_cuda": (newest_cuda_of_driver(driver) or "none listed") if driver else None,
        "nvidia_error": (nvidia.error or None) if nvidia else None,
        "wheel_for_driver": install_line(wheel_for_driver(driver, fewest)) if driver else None,
        "visible_devices": machine.environment.get("CUDA_VISIBLE_DEVICES"),
        "mixed_gpus": ", ".join(sorted({gpu.name for gpu in gpus})) if len({gpu.name for gpu in gpus}) > 1 else None,
        "worst_link": links,
        "worst_link_words": _SLOW_LINKS.get(links or ""),
        "p2p_disabled": machine.environment.get("NCCL_P2P_DISABLE"),
        "launch_blocking": machine.environment.get("CUDA_LAUNCH_BLOCKING"),
    }


def _links(matrix: Sequence[Sequence[str]]) -> str | None:
    """Returns the slowest link between two GPUs; "NV" for NVLink of any number of lanes."""
    order = ["SYS", "NODE", "PHB", "PXB", "PIX", "NV"]
    found = {re.sub(r"\d+$", "", link) for row in matrix for link in row if link != "X"}
    return next((link for link in order if link in found), None)


def _gpu(gpu: NvidiaGpu, facts: Mapping[str, Any]) -> dict[str, Any]:
    row = capability(gpu.capability) if gpu.capability else None
    arch_list = facts["arch_list"]
    share = gpu.power_limit_w / gpu.power_default_w if gpu.power_limit_w and gpu.power_default_w else None
    return {
        "gpu": gpu.index,
        "gpu_name": gpu.name,
        "gpu_capability": gpu.capability,
        "gpu_generation": row.name if row else None,
        "gpu_in_wheel": runs_on(gpu.capability, arch_list) if gpu.capability and arch_list else None,
        "gpu_wheel": _wheel_for(gpu.capability, facts["driver"]) if gpu.capability else None,
        "gpu_bf16": row.bf16 if row else None,
        "gpu_fp8": row.fp8 if row else None,
        "gpu_flash": list(row.flash) if row else None,
        "gpu_ecc": gpu.ecc,
        "gpu_errors": gpu.uncorrected_errors,
        "gpu_mig": gpu.mig,
        "gpu_power_share": share,
        "gpu_power_w": gpu.power_limit_w,
        "gpu_power_default_w": gpu.power_default_w,
        "gpu_lanes": gpu.pcie_width,
        "gpu_lanes_max": gpu.pcie_width_max,
        "gpu_compute_mode": gpu.compute_mode,
        "gpu_memory_gib": None if gpu.memory_bytes is None else gpu.memory_bytes / GIB,
    }


def _wheel_for(number: str, driver: str | None) -> str:
    """The newest wheel with code for a GPU that its driver runs as well; where there is none, any driver's."""
    fitting = wheel_for_driver(driver, number) if driver else None
    return install_line(fitting or wheel_for_capability(number))


def _others(machine: Machine) -> dict[str, Any]:
    amd, apple, tpu, torch = machine.amd, machine.apple, machine.tpu, machine.torch
    arch_list = torch.arch_list if torch else ()
    if torch and torch.cuda and not arch_list:
        arch_list = wheel_archs(torch.version, torch.cuda)
    rows = [gfx(name) for name in (amd.gfx if amd else ())]
    built = {arch.partition(":")[0] for arch in arch_list}
    return {
        "arch_list": arch_list,
        "arch_words": " ".join(arch_list) or "nothing known",
        "amd": amd is not None,
        "amd_readable": amd.readable if amd else None,
        "gfx": ", ".join(sorted(set(amd.gfx))) if amd and amd.gfx else None,
        "gfx_in_wheel": all(name in built for name in amd.gfx) if amd and amd.gfx and built else None,
        "gfx_fp8": all(row is not None and row.fp8.startswith("e4m3") for row in rows) if rows else None,
        "hsa_override": machine.environment.get("HSA_OVERRIDE_GFX_VERSION"),
        "tpu": tpu is not None,
        "apple": apple is not None,
        "apple_chip": apple.chip if apple else None,
        "macos": apple.macos if apple else None,
        "rosetta": apple.translated if apple else None,
        "mps_watermark": machine.environment.get("PYTORCH_MPS_HIGH_WATERMARK_RATIO"),
    }


def _packages(machine: Machine) -> dict[str, Any]:
    generations: dict[str, list[str]] = {}
    for name, version in machine.cuda_wheels.items():
        if match := re.search(r"-cu(\d+)$", name):
            generations.setdefault(name.removesuffix(match[0]), []).append(f"{name} {version}")
    double = [" and ".join(names) for names in generations.values() if len(names) > 1]
    own = f"nvidia-cudnn-cu{machine.torch.cuda.partition('.')[0]}" if machine.torch and machine.torch.cuda else ""
    cudnn, loaded = machine.cuda_wheels.get(own), machine.torch.cudnn if machine.torch else None
    return {
        "double_cuda_wheels": "; ".join(double) or None,
        "cudnn_wheel": cudnn,
        "cudnn_differs": version_key(cudnn)[:3] != version_key(loaded)[:3] if cudnn and loaded else None,
        "unmet_requirements": "; ".join(machine.unmet_requirements) or None,
        "python": machine.python_version,
        "wrong_packages": "; ".join(_too_old(machine)) or None,
        **{f"package.{name}": machine.packages.get(name) for name in PACKAGES},
        **{f"package_{name.replace('-', '_')}": machine.packages.get(name) for name in PACKAGES},  # for sentences
    }


def _too_old(machine: Machine) -> list[str]:
    wrong = []
    for name, smallest in required_versions().items():
        if name not in machine.packages:
            continue
        version = machine.packages[name]
        if version is None:
            wrong.append(f"{name} is not installed")
        elif version_key(version) < version_key(smallest):
            wrong.append(f"{name} {version} is older than {smallest}")
    return wrong
