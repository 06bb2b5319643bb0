"""The description of a machine: facts only, that can be written to a file and read again.

    machine = probe(with_torch=True)          # shardline.hardware.probe
    write_machine(machine, "node7.yaml")
    read_machine("node7.yaml") == machine

A recorded machine can be judged anywhere (`shardline doctor --machine node7.yaml`). What facts mean is the business of
`shardline.hardware.checks`. A fact that is not known is None; a device that is not there has no description.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.config.errors import UsageError
from shardline.hardware.strict import StrictError, convert_strictly

__all__ = [
    "Accelerator",
    "Amd",
    "Apple",
    "Limits",
    "Machine",
    "Matmul",
    "Nvidia",
    "NvidiaGpu",
    "TorchBuild",
    "Tpu",
    "machine_from",
    "read_machine",
    "write_machine",
]


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device that torch can use."""

    kind: str  # "cuda" (NVIDIA), "rocm" (AMD) or "mps" (Apple)
    name: str
    memory_bytes: int
    capability: str | None = None  # "9.0" for NVIDIA, "gfx942" for AMD


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What `ulimit` allows this process; None means unlimited."""

    locked_memory_bytes: int | None = None
    open_files: int | None = None
    processes: int | None = None


@dataclass(frozen=True, kw_only=True)
class NvidiaGpu:
    """What nvidia-smi tells of one GPU; a fact that the GPU does not have ([N/A]) is None."""

    index: int
    name: str
    capability: str | None = None  # "8.0"
    memory_bytes: int | None = None
    uuid: str | None = None
    serial: str | None = None
    bus_id: str | None = None
    ecc: bool | None = None
    uncorrected_errors: int | None = None  # since the driver was loaded
    mig: bool | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    persistence: bool | None = None
    compute_mode: str | None = None  # "Default", "Exclusive_Process" or "Prohibited"


@dataclass(frozen=True, kw_only=True)
class Nvidia:
    """The driver and its GPUs. `links` is the matrix of `nvidia-smi topo -m`: links[i][j] is "NV18", "PHB", "X", ..."""

    driver: str | None = None
    cuda_max: str | None = None  # the newest CUDA of this driver, not the one that is installed
    gpus: tuple[NvidiaGpu, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()
    nodes: bool | None = None  # whether there is a /dev/nvidiaN (or WSL's /dev/dxg)
    error: str = ""  # what nvidia-smi said instead of an answer


@dataclass(frozen=True, kw_only=True)
class Amd:
    gfx: tuple[str, ...] = ()  # "gfx942", of each GPU that the kernel names
    driver: str | None = None
    readable: bool = True  # whether this user may open /dev/kfd


@dataclass(frozen=True, kw_only=True)
class Tpu:
    kind: str  # "v5litepod-8", or "unknown"
    num_chips: int | None = None


@dataclass(frozen=True, kw_only=True)
class Apple:
    chip: str
    macos: str  # "14.5"
    translated: bool = False  # an x86 Python under Rosetta


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """What the installed torch was built for, and whether it can use its device."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    arch_list: tuple[str, ...] = ()  # "sm_90", "compute_120", "gfx942"
    cudnn: str | None = None
    nccl: str | None = None
    available: bool | None = None  # torch.cuda.is_available(), or the same of MPS
    error: str = ""  # what the start of CUDA said
    import_error: str = ""  # why `import torch` itself fails; then nothing else is known


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """A small matrix product that really ran: `gflops`, or why it did not."""

    device: str
    dtype: str
    gflops: float | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine, as far as one process may use it."""

    os: str  # system, release and architecture: "Linux 6.8.0 x86_64"
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
    host_memory_bytes: int | None = None
    limits: Limits | None = None
    infiniband: bool = False
    nvidia: Nvidia | None = None
    amd: Amd | None = None
    tpu: Tpu | None = None
    apple: Apple | None = None
    torch: TorchBuild | None = None
    cuda_wheels: dict[str, str] = dataclasses.field(default_factory=dict)  # "nvidia-cudnn-cu12" -> version
    unmet_requirements: tuple[str, ...] = ()  # "vllm 0.11.0 needs torch==2.9.0, and 2.13.0 is installed"
    environment: dict[str, str] = dataclasses.field(default_factory=dict)  # those that change what is used
    matmuls: tuple[Matmul, ...] = ()

    @property
    def torch_version(self) -> str | None:
        return self.packages.get("torch")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def machine_from(values: Any, *, where: str) -> Machine:
    """Returns the machine that plain JSON or YAML `values` describe; `UsageError` names `where` they stand."""
    try:
        return convert_strictly(values, Machine)
    except StrictError as error:
        raise UsageError(f"{where}: {error} `shardline doctor --record FILE` writes such a description.") from None


def read_machine(path: str | Path) -> Machine:
    """Reads a recorded machine, YAML or JSON; `UsageError` for a file that is none."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"Can't read the machine description {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = str(error).replace("\n", " ")
        raise UsageError(f"{path} is neither YAML nor JSON: {line}.") from None
    return machine_from(values, where=str(path))


def write_machine(machine: Machine, path: str | Path, *, values: dict[str, Any] | None = None) -> None:
    """Writes `machine` as YAML (`values`: what to write in its place, such as its redacted facts)."""
    import json

    import yaml

    plain = json.loads(json.dumps(values if values is not None else machine.to_json()))  # tuples become lists
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=False, width=110)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"Can't write {path}: {error.strerror}. Choose another file for --record.") from None
