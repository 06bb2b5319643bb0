"""The lines of the doctor's report: what each says when nothing is wrong. An empty line is left out.

for name, describe in LINES: print(name, describe(machine, facts))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardline.hardware.facts import GIB, framework_facts, gpu_facts, platform_of
from shardline.hardware.machine import Machine
from shardline.hardware.packages import OWN
from shardline.hardware.tables import capability, gfx, tables

__all__ = ["LINES"]

Facts = Mapping[str, Any]
_SUPPORT = {"yes": "", "partly": "partly ", "no": "not "}


def _cores(machine: Machine, facts: Facts) -> str:
    host = f"{machine.num_logical_cores} logical ({machine.num_physical_cores} physical)"
    text = f"{machine.num_cores} usable of {host}"
    if machine.cores_limit != "host":
        text += f", set by {machine.cores_limit}"
    return f"{text}, {machine.cpu_name}"


def _memory(machine: Machine, facts: Facts) -> str:
    limit = ", set by the cgroup" if machine.memory_limit == "cgroup" else ""
    shm = "" if machine.shm_free_bytes is None else f", /dev/shm {_gib(machine.shm_free_bytes)} free"
    return f"{_gib(machine.memory_available_bytes)} available of {_gib(machine.memory_bytes)}{limit}{shm}"


def _disk(machine: Machine, facts: Facts) -> str:
    return f"{_gib(machine.disk_free_bytes)} free at {machine.disk_path}"


def _limits(machine: Machine, facts: Facts) -> str:
    if machine.limits is None:
        return ""
    locked, files, processes = (
        machine.limits.locked_memory_bytes,
        machine.limits.open_files,
        machine.limits.processes,
    )
    locked_text = "unlimited" if locked is None else _gib(locked) if locked >= GIB else f"{locked / 2**20:.0f} MiB"
    return f"{_count(files)} open files, {_count(processes)} processes, {locked_text} locked memory"


def _instructions(machine: Machine, facts: Facts) -> str:
    return " ".join(machine.isa) or "none known"


def _matmul(machine: Machine, facts: Facts) -> str:
    parts = []
    for device in dict.fromkeys(each.device for each in machine.matmuls):
        rows = [each for each in machine.matmuls if each.device == device]
        speeds = [f"{_dtype(each.dtype)} {_gflops(each.gflops)}" for each in rows if each.gflops is not None]
        failed = [_dtype(each.dtype) for each in rows if each.gflops is None]
        ran = f"{', '.join(speeds)} GFLOP/s" if speeds else ""
        parts.append(f"{device}: " + ", ".join(filter(None, [ran, f"no {' or '.join(failed)}" if failed else ""])))
    return "; ".join(parts)


def _accelerator(machine: Machine, facts: Facts) -> str:
    found = machine.accelerators
    if found:
        first = found[0]
        detail = f", capability {first.capability}" if first.capability else ""
        return f"{len(found)} x {first.name} ({first.kind}, {_gib(first.memory_bytes)}{detail})"
    platform = platform_of(machine)
    if platform == "cpu":
        return "none; the CPU is used, so offload to the CPU gains nothing"
    return f"a {platform} device is here, but torch does not use it"


def _driver(machine: Machine, facts: Facts) -> str:
    if machine.nvidia is None:
        return ""
    cuda = f", CUDA up to {machine.nvidia.cuda_max}" if machine.nvidia.cuda_max else ""
    return f"NVIDIA {machine.nvidia.driver or 'unknown'}{cuda}"


def _torch(machine: Machine, facts: Facts) -> str:
    build = machine.torch
    if build is None:
        return ""
    if build.import_error:
        return build.version
    kind = f"CUDA {build.cuda}" if build.cuda else f"ROCm {build.hip}" if build.hip else "CPU"
    libraries = [f"{name} {version}" for name, version in (("cuDNN", build.cudnn), ("NCCL", build.nccl)) if version]
    archs = [f"code for {' '.join(build.arch_list)}"] if build.arch_list else []
    return ", ".join([f"{build.version}, built for {kind}", *libraries, *archs])


def _gpus(machine: Machine, facts: Facts) -> str:
    gpus = gpu_facts(machine, facts)
    if not gpus:
        return ""
    names = dict.fromkeys((gpu["gpu_name"], gpu["gpu_capability"], gpu["gpu_memory_gib"]) for gpu in gpus)
    parts = []
    for name, number, memory_gib in names:
        same = sum(gpu["gpu_name"] == name and gpu["gpu_memory_gib"] == memory_gib for gpu in gpus)
        parts.append(f"{same} x {name}" + (f", {memory_gib:.0f} GiB" if memory_gib else "") + _features(number))
    return "; ".join(parts)


def _features(number: str | None) -> str:
    row = capability(number) if number else None
    if row is None:
        return f", capability {number}" if number else ""
    has = [name for name in ("bf16", "fp8", "mxfp8", "nvfp4") if getattr(row, name)]
    flash = [f"FlashAttention {'/'.join(map(str, row.flash))}"] if row.flash else []
    return f", {row.name} {number}: {', '.join([*has, *flash]) or 'fp16 and fp32 only'}"


def _topology(machine: Machine, facts: Facts) -> str:
    if machine.nvidia is None or not machine.nvidia.links:
        return ""
    counts: dict[str, int] = {}
    for row, links in enumerate(machine.nvidia.links):
        for link in links[row + 1 :]:
            counts[link] = counts.get(link, 0) + 1
    return ", ".join(f"{count} pair{'s' if count > 1 else ''} by {link}" for link, count in counts.items())


def _rocm(machine: Machine, facts: Facts) -> str:
    if machine.amd is None:
        return ""
    parts = []
    for name in dict.fromkeys(machine.amd.gfx):
        row = gfx(name)
        features = f": {'bf16' if row.bf16 else 'no bf16'}, fp8 {row.fp8}" if row else ""
        parts.append(f"{machine.amd.gfx.count(name)} x {f'{row.name} ({name})' if row else name}{features}")
    driver = f"amdgpu {machine.amd.driver}" if machine.amd.driver else "amdgpu"
    return ", ".join([driver, *parts])


def _tpu(machine: Machine, facts: Facts) -> str:
    if machine.tpu is None:
        return ""
    return f"{machine.tpu.kind}, {machine.tpu.num_chips or 'an unknown number of'} chips"


def _apple(machine: Machine, facts: Facts) -> str:
    return f"{machine.apple.chip}, macOS {machine.apple.macos}" if machine.apple else ""


def _frameworks(machine: Machine, facts: Facts) -> str:
    """What is installed beside our own packages, and what the frameworks of note do on this platform."""
    own = [f"{name} {version}" for name, version in machine.packages.items() if version and name not in OWN]
    platform = platform_of(machine)
    here = {row["framework"] for row in framework_facts(machine)}
    rows = [row for row in tables().platforms.rows if row.platform == platform and row.framework not in here]
    named = {support: ", ".join(row.framework for row in rows if row.support == support) for support in _SUPPORT}
    could = ", ".join(f"{words}{named[support]}" for support, words in _SUPPORT.items() if named[support])
    return f"{', '.join(own) or 'no other installed'}; {platform} runs {could}"


def _packages(machine: Machine, facts: Facts) -> str:
    versions = [f"{name} {machine.packages.get(name) or 'missing'}" for name in OWN if name in machine.packages]
    return ", ".join([f"python {machine.python_version}", *versions])


LINES: tuple[tuple[str, Callable[[Machine, Facts], str]], ...] = (
    ("cores", _cores),
    ("memory", _memory),
    ("disk", _disk),
    ("limits", _limits),
    ("instructions", _instructions),
    ("matmul", _matmul),
    ("accelerator", _accelerator),
    ("driver", _driver),
    ("gpus", _gpus),
    ("topology", _topology),
    ("rocm", _rocm),
    ("tpu", _tpu),
    ("apple", _apple),
    ("torch", _torch),
    ("packages", _packages),
    ("frameworks", _frameworks),
)


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count < 1024 * GIB else f"{count / GIB / 1024:.1f} TiB"


def _count(number: int | None) -> str:
    return "unlimited" if number is None else f"{number:,}"


def _gflops(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _dtype(name: str) -> str:
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64", "float8_e4m3fn": "fp8"}.get(
        name, name
    )
