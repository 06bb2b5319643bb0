"""Look-ups in tables.yaml: drivers, wheels, capabilities, platforms.

driver_for("12.8")                       # "525.60.13": the oldest driver that runs it
wheel_for_capability("7.0")              # ("2.14", "12.6"): the newest wheel with code for it
capability("8.6").name                   # "Ampere"
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from functools import cache

from shardline.hardware.conditions import version_key
from shardline.hardware.strict import convert_strictly, load_tables

__all__ = [
    "Capability",
    "Gfx",
    "Platform",
    "Tables",
    "capability",
    "driver_for",
    "gfx",
    "newest_cuda_of_driver",
    "runs_on",
    "tables",
    "wheel_archs",
    "wheel_for_capability",
    "wheel_for_driver",
]


@dataclass(frozen=True, kw_only=True)
class Driver:
    cuda: str
    driver: str


@dataclass(frozen=True, kw_only=True)
class Drivers:
    source: str
    date: datetime.date
    rows: tuple[Driver, ...]


@dataclass(frozen=True, kw_only=True)
class Wheel:
    torch: str
    cuda: str
    archs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Wheels:
    source: str
    date: datetime.date
    rows: tuple[Wheel, ...]


@dataclass(frozen=True, kw_only=True)
class Capability:
    """`flash` are the versions of FlashAttention that have kernels for it."""

    capability: str
    name: str
    tensor_cores: bool
    bf16: bool
    fp8: bool
    mxfp8: bool
    nvfp4: bool
    flash: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    source: str
    date: datetime.date
    rows: tuple[Capability, ...]


@dataclass(frozen=True, kw_only=True)
class Gfx:
    gfx: str
    name: str
    bf16: bool
    fp8: str
    flash: bool


@dataclass(frozen=True, kw_only=True)
class GfxTable:
    source: str
    date: datetime.date
    rows: tuple[Gfx, ...]


@dataclass(frozen=True, kw_only=True)
class Platform:
    """What `framework` does on `platform`: support is "yes", "partly" or "no"."""

    platform: str
    framework: str
    support: str
    note: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Platforms:
    date: datetime.date
    rows: tuple[Platform, ...]


@dataclass(frozen=True, kw_only=True)
class Tables:
    cuda_drivers: Drivers
    torch_wheels: Wheels
    capabilities: Capabilities
    gfx: GfxTable
    platforms: Platforms


@cache
def tables() -> Tables:
    return convert_strictly(load_tables("tables.yaml"), Tables)


def driver_for(cuda: str) -> str | None:
    """Returns the oldest driver that runs applications of a CUDA toolkit; None for a toolkit that is not listed."""
    for row in tables().cuda_drivers.rows:
        if version_key(cuda)[: len(version_key(row.cuda))] == version_key(row.cuda):
            return row.driver
    return None


def newest_cuda_of_driver(driver: str) -> str | None:
    """Returns the newest CUDA generation that a driver runs ("12"); None for one older than the table."""
    rows = tables().cuda_drivers.rows
    return next((row.cuda for row in rows if version_key(driver) >= version_key(row.driver)), None)


def capability(number: str) -> Capability | None:
    """Returns the row of the newest listed capability that is not newer and of the same generation."""
    rows = tables().capabilities.rows
    found = [
        row
        for row in rows
        if version_key(row.capability)[0] == version_key(number)[0]
        and version_key(row.capability) <= version_key(number)
    ]
    return found[-1] if found else None


def gfx(name: str) -> Gfx | None:
    return next((row for row in tables().gfx.rows if name.startswith(row.gfx)), None)


def runs_on(number: str, arch_list: tuple[str, ...]) -> bool:
    """Returns whether code for `arch_list` ("sm_80", "compute_120") runs on a GPU of capability `number`.

    Machine code runs on later GPUs of the same generation; "compute_" is an intermediate code that any later GPU's
    driver compiles; code for "sm_90a" runs on exactly that one.
    """
    own = version_key(number)
    for arch in arch_list:
        kind, _, digits = arch.partition("_")
        specific = not digits.isdigit()
        digits = digits.rstrip("af")
        if not digits.isdigit():
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        if specific:
            if built == own:
                return True
        elif built <= own and (kind == "compute" or built[0] == own[0]):
            return True
    return False


def wheel_archs(torch: str, cuda: str) -> tuple[str, ...]:
    """Returns what PyTorch's wheel was built for, as torch would name it; () for one that is not listed."""
    for row in tables().torch_wheels.rows:
        if row.torch == _minor(torch) and row.cuda == cuda:
            return tuple(f"sm_{arch.replace('.', '')}" for arch in row.archs)
    return ()


def wheel_for_capability(number: str) -> tuple[str, str] | None:
    """Returns (torch, CUDA) of the newest wheel with code for a capability, and of those the newest CUDA."""
    return _newest(row for row in tables().torch_wheels.rows if runs_on(number, wheel_archs(row.torch, row.cuda)))


def wheel_for_driver(driver: str, number: str | None) -> tuple[str, str] | None:
    """Returns (torch, CUDA) of the newest wheel that a driver runs and that has code for a capability (None: any)."""
    return _newest(
        row
        for row in tables().torch_wheels.rows
        if version_key(driver) >= version_key(driver_for(row.cuda) or "0")
        and (number is None or runs_on(number, wheel_archs(row.torch, row.cuda)))
    )


def _newest(rows) -> tuple[str, str] | None:
    found = max(rows, key=lambda row: (version_key(row.torch), version_key(row.cuda)), default=None)
    return (found.torch, found.cuda) if found else None


def _minor(version: str) -> str:
    return ".".join(map(str, version_key(version)[:2]))
