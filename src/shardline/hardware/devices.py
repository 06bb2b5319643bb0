"""Accelerators: what the kernel shows of them without any framework, and what torch makes of them.

find_amd(), find_tpu(), find_apple()     # a few files; loads nothing
torch_build(), accelerators()            # imports torch and starts CUDA
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

from shardline.hardware.machine import Accelerator, Amd, Apple, TorchBuild, Tpu

__all__ = ["accelerators", "find_amd", "find_apple", "find_tpu", "sysctl", "torch_build"]

_GOOGLE_PCI = "0x1ae0"


def find_amd(root: Path = Path("/")) -> Amd | None:
    """Returns AMD's GPUs as its kernel driver names them; None without that driver."""
    node = root / "dev/kfd"
    if not node.exists():
        return None
    gfx = []
    for path in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        match = re.search(r"^gfx_target_version (\d+)$", _read(path), flags=re.MULTILINE)
        if match and int(match[1]):  # 0: the node is a CPU
            gfx.append(_gfx_name(int(match[1])))
    driver = _read(root / "sys/module/amdgpu/version").strip() or None
    return Amd(gfx=tuple(gfx), driver=driver, readable=os.access(node, os.R_OK | os.W_OK))


def find_tpu(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Tpu | None:
    """Returns the TPU of this machine: Google's accelerators on its PCI bus, or the name that its image sets."""
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    chips = [path for path in vendors if _read(path).strip() == _GOOGLE_PCI and _is_accelerator(path.parent)]
    nodes = sorted((root / "dev").glob("accel[0-9]*")) if (root / "dev").is_dir() else []
    kind = environment.get("TPU_ACCELERATOR_TYPE") or environment.get("ACCELERATOR_TYPE", "")
    if not chips and not nodes and not kind.startswith(("v2", "v3", "v4", "v5", "v6", "v7")):
        return None
    return Tpu(kind=kind or "unknown", num_chips=len(chips) or len(nodes) or None)


def find_apple() -> Apple | None:
    """Returns the chip and the system of a Mac."""
    if sys.platform != "darwin":
        return None
    chip = sysctl("machdep.cpu.brand_string") or platform.machine()
    return Apple(chip=chip, macos=platform.mac_ver()[0], translated=sysctl("sysctl.proc_translated") == "1")


def torch_build() -> TorchBuild | None:
    """Returns what torch was built for, and why it can't use its device; None without torch."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    try:
        import torch
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # a library that is missing or does not fit
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return TorchBuild(version=version, available=False, import_error=reason)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available() or torch.backends.mps.is_available()
    said = [str(warning.message) for warning in caught if "CUDA" in str(warning.message)]
    error = said[0] if said else ""
    is_gpu_build = torch.version.cuda is not None or torch.version.hip is not None
    if is_gpu_build and not available and not error:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as failure:
            error = str(failure)
    cudnn = torch.backends.cudnn.version() if torch.version.cuda is not None else None
    import torch.cuda.nccl

    nccl = torch.cuda.nccl.version() if is_gpu_build and hasattr(torch._C, "_nccl_version") else None
    return TorchBuild(
        version=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        arch_list=tuple(torch.cuda.get_arch_list()) if available and is_gpu_build else _built_for(torch),
        cudnn=None if cudnn is None else _cudnn_version(cudnn),
        nccl=None if nccl is None else ".".join(map(str, nccl if isinstance(nccl, tuple) else (nccl,))),
        available=available,
        error=" ".join(error.partition("(Triggered internally")[0].split())[:300],
    )


def accelerators(cpu_name: str) -> tuple[Accelerator, ...]:
    """Returns the devices that torch can use; none where it can't be imported, which `torch_build` tells."""
    try:
        import torch
    except (ImportError, OSError, RuntimeError, AttributeError):
        return ()
    found: list[Accelerator] = []
    if torch.cuda.is_available():
        rocm = torch.version.hip is not None
        for index in range(torch.cuda.device_count()):
            props = torch.cuda.get_device_properties(index)
            capability = props.gcnArchName if rocm else f"{props.major}.{props.minor}"
            kind = "rocm" if rocm else "cuda"
            found.append(
                Accelerator(kind=kind, name=props.name, memory_bytes=props.total_memory, capability=capability)
            )
    elif torch.backends.mps.is_available():
        memory_bytes = torch.mps.recommended_max_memory()
        found.append(Accelerator(kind="mps", name=cpu_name, memory_bytes=memory_bytes))
    return tuple(found)


def sysctl(key: str) -> str | None:
    """Returns one of macOS' and the BSDs' kernel values."""
    try:
        done = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _built_for(torch) -> tuple[str, ...]:
    """The architectures of the build, asked of its flags: `get_arch_list` answers only where a device is usable."""
    flags = torch._C._cuda_getArchFlags() if hasattr(torch._C, "_cuda_getArchFlags") else None
    return tuple(flags.split()) if flags else ()


def _cudnn_version(number: int) -> str:
    """91501 -> 9.15.1; before cuDNN 9 the parts were narrower: 8902 -> 8.9.2."""
    major, minor = (10000, 100) if number >= 10000 else (1000, 100)
    return f"{number // major}.{number % major // minor}.{number % minor}"


def _gfx_name(version: int) -> str:
    """90402 -> gfx942: major and minor in decimal, the stepping in hexadecimal."""
    return f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}"


def _is_accelerator(folder: Path) -> bool:
    """Google's network adapters (class 0x02) and disks have its vendor number too; TPUs are class 0x12 or 0xff."""
    return _read(folder / "class").strip()[:4] in ("0x12", "0xff")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
