"""The limits that a container or a batch system puts on this process: control groups, version 1 and 2.

    limits = read_limits()
    limits.cpus              # 1.5 for a quota of one and a half cores; None when there is no quota
    limits.memory_bytes      # None when there is no limit

A limit of any ancestor group binds as well, so the smallest one on the way up counts. Files are those of the
kernel's documentation (admin-guide/cgroup-v2 and cgroup-v1); `root` lets tests present another machine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CgroupLimits", "read_limits"]

# Version 1 spells "no limit" as the largest page-aligned int64; no real machine has this much.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, kw_only=True)
class CgroupLimits:
    """What binds this process; None means that nothing does."""

    cpus: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None  # in the group with the smallest limit, without reclaimable page cache


def read_limits(root: Path = Path("/")) -> CgroupLimits:
    """Returns the limits in force; on a system without control groups, none."""
    mounts = list(_mounts(root))
    cpus: list[float] = []
    memory: list[tuple[int, int]] = []
    for controllers, path in _memberships(root):
        for mount in mounts:
            if mount.controllers.isdisjoint(controllers):
                continue
            for folder in mount.folders(path, root):
                cpus.extend(_cpus(folder))
                memory.extend(_memory(folder))
    limit_bytes, used_bytes = min(memory, default=(None, None))
    return CgroupLimits(cpus=min(cpus, default=None), memory_bytes=limit_bytes, memory_used_bytes=used_bytes)


@dataclass(frozen=True, kw_only=True)
class _Mount:
    controllers: frozenset[str]  # {""} for version 2
    group: str  # the group that the mount shows as its top
    folder: str

    def folders(self, path: str, root: Path) -> Iterator[Path]:
        """The folders of this process's group and its ancestors, as far as the mount shows them."""
        top = root / self.folder.lstrip("/")
        relative = path
        if self.group != "/":
            relative = path.removeprefix(self.group) if path.startswith(self.group) else ""
        folder = top / relative.strip("/")
        if ".." in folder.parts or not folder.is_dir():
            folder = top  # a container sees its own group as the top of the mount
        while True:
            yield folder
            if folder == top:
                return
            folder = folder.parent


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or len(tail) < 3 or tail[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = frozenset([""]) if tail[0] == "cgroup2" else frozenset(tail[2].split(","))
        yield _Mount(controllers=controllers, group=fields[3], folder=fields[4])


def _memberships(root: Path) -> Iterator[tuple[frozenset[str], str]]:
    for line in _lines(root / "proc/self/cgroup"):
        parts = line.split(":", 2)
        if len(parts) == 3:
            yield frozenset(parts[1].split(",")), parts[2]


def _cpus(folder: Path) -> Iterator[float]:
    quota = _words(folder / "cpu.max")  # "150000 100000" or "max 100000"
    if len(quota) != 2:
        quota = [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]  # -1: no quota
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0 and int(quota[0]) > 0:
        yield int(quota[0]) / int(quota[1])


def _memory(folder: Path) -> Iterator[tuple[int, int]]:
    for limit_name, used_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _words(folder / limit_name)
        if not limit or not limit[0].isdigit() or int(limit[0]) >= _NO_LIMIT_BYTES:
            continue
        used = _words(folder / used_name)
        used_bytes = int(used[0]) if used and used[0].isdigit() else 0
        yield int(limit[0]), max(0, used_bytes - _stat(folder / "memory.stat", cache_key))


def _stat(path: Path, key: str) -> int:
    for line in _lines(path):
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return 0


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []  # no such file or no right to read it: then that file limits nothing that we can know
