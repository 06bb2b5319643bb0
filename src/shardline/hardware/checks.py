"""What a machine's facts mean: six checks, each with a verdict, the facts, the reason and the fix.

    machine = probe(with_torch=True)
    checks = examine(machine, matmul_flops=measure_matmul_flops())
    console.print(checks_text(checks))

A rule is data: what to say of the machine, and the faults in the order in which they are looked for. The
first fault found gives the verdict; a machine without one is `ok`.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shardline.hardware.probe import Machine

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["Check", "Verdict", "checks_text", "examine", "to_json"]

Verdict = Literal["ok", "warn", "fail"]
GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the doctor's report."""

    name: str
    verdict: Verdict
    facts: str
    reason: str = ""  # why it is not ok
    fix: str = ""  # what to do about it


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the rules look at."""

    machine: Machine
    matmul_flops: float | None  # fp32 on the CPU, measured; None when it can't run
    required: dict[str, str]  # package -> smallest version


@dataclass(frozen=True, kw_only=True)
class Fault:
    verdict: Verdict
    when: Callable[[Report], bool]
    reason: Callable[[Report], str]
    fix: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    name: str
    facts: Callable[[Report], str]
    faults: tuple[Fault, ...]


def examine(machine: Machine, *, matmul_flops: float | None) -> tuple[Check, ...]:
    """Returns one check for each rule, in order."""
    report = Report(machine=machine, matmul_flops=matmul_flops, required=_required_versions())
    return tuple(_apply(rule, report) for rule in RULES)


def checks_text(checks: Sequence[Check]) -> Text:
    """Returns the checks as one line each, coloured, for a `rich` console; the terminal wraps long ones."""
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        text = Text.assemble(
            (check.verdict.ljust(6), colours[check.verdict]),
            (check.name.ljust(width + 2), "bold"),
            check.facts,
        )
        if check.reason:
            text.append(f": {check.reason}. {check.fix}")
        lines.append(text)
    return Text("\n").join(lines)


def _apply(rule: Rule, report: Report) -> Check:
    fault = next((fault for fault in rule.faults if fault.when(report)), None)
    if fault is None:
        return Check(name=rule.name, verdict="ok", facts=rule.facts(report))
    return Check(
        name=rule.name,
        verdict=fault.verdict,
        facts=rule.facts(report),
        reason=fault.reason(report),
        fix=fault.fix,
    )


def _cores(report: Report) -> str:
    machine = report.machine
    host = f"{machine.num_logical_cores} logical ({machine.num_physical_cores} physical)"
    text = f"{machine.num_cores} usable of {host}"
    if machine.cores_limit != "host":
        text += f", set by {machine.cores_limit}"
    return f"{text}, {machine.cpu_name}"


def _memory(report: Report) -> str:
    machine = report.machine
    limit = ", set by the cgroup" if machine.memory_limit == "cgroup" else ""
    shm = "" if machine.shm_free_bytes is None else f", /dev/shm {_gib(machine.shm_free_bytes)} free"
    return f"{_gib(machine.memory_available_bytes)} available of {_gib(machine.memory_bytes)}{limit}{shm}"


def _instructions(report: Report) -> str:
    isa = " ".join(report.machine.isa) or "none known"
    if report.matmul_flops is None:
        return f"{isa}; the fp32 matmul did not run"
    return f"{isa}; fp32 matmul {report.matmul_flops / 1e9:.0f} GFLOP/s measured"


def _accelerator(report: Report) -> str:
    found = report.machine.accelerators
    if not found:
        return f"none ({report.machine.no_accelerator}); the CPU is used, so offload to the CPU gains nothing"
    first = found[0]
    detail = f", capability {first.capability}" if first.capability else ""
    return f"{len(found)} x {first.name} ({first.kind}, {_gib(first.memory_bytes)}{detail})"


def _packages(report: Report) -> str:
    versions = [f"{name} {version or 'missing'}" for name, version in report.machine.packages.items()]
    return ", ".join([f"python {report.machine.python_version}", *versions])


def _wrong_packages(report: Report) -> list[str]:
    wrong = []
    for name, smallest in report.required.items():
        if name not in report.machine.packages:
            continue
        version = report.machine.packages[name]
        if version is None:
            wrong.append(f"{name} is not installed")
        elif _numbers(version) < _numbers(smallest):
            wrong.append(f"{name} {version} is older than {smallest}")
    return wrong


def _required_versions() -> dict[str, str]:
    """The smallest versions that this package's own metadata asks for, so that they stand in one place."""
    try:
        requirements = importlib.metadata.requires("shardline") or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return {}
    found = (re.match(r"([\w-]+)>=([\d.]+)$", requirement) for requirement in requirements)
    return {match[1]: match[2] for match in found if match}


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def _has(report: Report, *names: str) -> bool:
    return all(name in report.machine.isa for name in names)


RULES: tuple[Rule, ...] = (
    Rule(
        name="cores",
        facts=_cores,
        faults=(
            Fault(
                verdict="warn",
                when=lambda r: r.machine.num_cores == 1,
                reason=lambda r: f"one core runs one process; {r.machine.cores_limit} sets it",
                fix="Give the container or job more CPUs (docker --cpus 2, srun --cpus-per-task 2).",
            ),
            Fault(
                verdict="warn",
                when=lambda r: r.machine.num_cores * 2 <= r.machine.num_physical_cores,
                reason=lambda r: f"this process may use {r.machine.num_cores} of the machine's cores",
                fix="Raise the CPU limit (docker --cpus, taskset, srun --cpus-per-task) if the rest is free.",
            ),
        ),
    ),
    Rule(
        name="memory",
        facts=_memory,
        faults=(
            Fault(
                verdict="fail",
                when=lambda r: r.machine.memory_available_bytes < 1 * GIB,
                reason=lambda r: "a training process needs about 1 GiB before any weights",
                fix="Close other programs, or raise the container's memory limit.",
            ),
            Fault(
                verdict="warn",
                when=lambda r: r.machine.memory_available_bytes < 4 * GIB,
                reason=lambda r: "training a 135M-parameter model takes about 4 GiB",
                fix="Use a smaller preset, sequence_length or micro_batch; `shardline plan` tells which fit.",
            ),
            Fault(
                verdict="warn",
                when=lambda r: r.machine.shm_free_bytes is not None and r.machine.shm_free_bytes < 256 * MIB,
                reason=lambda r: "/dev/shm is too small for processes that share tensors",
                fix="Start the container with --shm-size=1g (docker, podman).",
            ),
        ),
    ),
    Rule(
        name="disk",
        facts=lambda r: f"{_gib(r.machine.disk_free_bytes)} free at {r.machine.disk_path}",
        faults=(
            Fault(
                verdict="fail",
                when=lambda r: r.machine.disk_free_bytes < 1 * GIB,
                reason=lambda r: "a run of a 135M-parameter model writes checkpoints of 1.6 GB each",
                fix="Free some space, or set `run:` to a folder on another disk.",
            ),
            Fault(
                verdict="warn",
                when=lambda r: r.machine.disk_free_bytes < 10 * GIB,
                reason=lambda r: "three checkpoints of a 135M-parameter model take 5 GB",
                fix="Set checkpoint.keep_last: 1, or `run:` to a folder on another disk.",
            ),
        ),
    ),
    Rule(
        name="instructions",
        facts=_instructions,
        faults=(
            Fault(
                verdict="fail",
                when=lambda r: r.matmul_flops is None,
                reason=lambda r: "torch can't multiply two matrices here",
                fix="Reinstall torch for this platform: pip install --force-reinstall torch.",
            ),
            Fault(
                verdict="warn",
                when=lambda r: not _has(r, "avx2", "fma") and not _has(r, "neon"),
                reason=lambda r: "without AVX2 and FMA (or NEON) arithmetic is several times slower",
                fix="Use a CPU from 2013 or later; in a virtual machine pass the CPU through (-cpu host).",
            ),
        ),
    ),
    Rule(
        name="accelerator",
        facts=_accelerator,
        faults=(
            Fault(
                verdict="warn",
                when=lambda r: "CPU build" in r.machine.no_accelerator,
                reason=lambda r: "the device stays unused",
                fix="Install the build that https://pytorch.org/get-started/locally names for it.",
            ),
            Fault(
                verdict="warn",
                when=lambda r: "torch is built for" in r.machine.no_accelerator,
                reason=lambda r: "this torch expects a device",
                fix="Load or update the driver, or pass the device into the container (docker --gpus all).",
            ),
        ),
    ),
    Rule(
        name="packages",
        facts=_packages,
        faults=(
            Fault(
                verdict="fail",
                when=lambda r: bool(_wrong_packages(r)),
                reason=lambda r: "; ".join(_wrong_packages(r)),
                fix="Run: pip install -U shardline.",
            ),
        ),
    ),
)


def to_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Returns the checks as JSON values, in order."""
    return [{"name": c.name, "verdict": c.verdict, "facts": c.facts, "reason": c.reason, "fix": c.fix} for c in checks]
