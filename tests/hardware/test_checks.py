"""What the doctor says of machines with one known fault each, and its six lines."""

from __future__ import annotations

import json

import pytest

from hardware.machines import GIB, machine
from shardline.cli.main import main
from shardline.hardware.checks import checks_text, examine, to_json
from shardline.hardware.probe import Accelerator

NAMES = ["cores", "memory", "disk", "instructions", "accelerator", "packages"]
OLD = {"torch": "2.4.1", "transformers": "5.24.0", "numpy": "2.4.6", "safetensors": "0.8.0"}
GONE = {**OLD, "torch": "2.13.0", "safetensors": None}

FAULTS = {
    "one core": ({"num_cores": 1, "cores_limit": "cgroup quota"}, "cores", "warn", "cgroup quota"),
    "narrow affinity": ({"num_cores": 4, "cores_limit": "affinity"}, "cores", "warn", "4 of the machine's cores"),
    "little memory": ({"memory_available_bytes": GIB // 2, "memory_limit": "cgroup"}, "memory", "fail", "1 GiB"),
    "tight memory": ({"memory_available_bytes": 3 * GIB}, "memory", "warn", "4 GiB"),
    "small shm": ({"shm_free_bytes": 64 << 20}, "memory", "warn", "/dev/shm"),
    "full disk": ({"disk_free_bytes": GIB // 2}, "disk", "fail", "checkpoints"),
    "tight disk": ({"disk_free_bytes": 5 * GIB}, "disk", "warn", "checkpoints"),
    "old CPU": ({"isa": ("sse4_2",)}, "instructions", "warn", "AVX2"),
    "unused NVIDIA": (
        {"no_accelerator": "an NVIDIA device is here, but torch 2.13.0+cpu is a CPU build"},
        "accelerator",
        "warn",
        "unused",
    ),
    "no driver": (
        {"no_accelerator": "torch is built for CUDA 13.0, but no NVIDIA driver is loaded"},
        "accelerator",
        "warn",
        "expects a device",
    ),
    "old torch": ({"packages": OLD}, "packages", "fail", "torch 2.4.1 is older than 2.13"),
    "no safetensors": ({"packages": GONE}, "packages", "fail", "safetensors is not installed"),
}


def test_a_healthy_machine_is_ok_in_six_lines() -> None:
    checks = examine(machine(), matmul_flops=200e9)
    assert [check.name for check in checks] == NAMES
    assert {check.verdict for check in checks} == {"ok"}
    lines = checks_text(checks).plain.split("\n")
    assert len(lines) == 6
    assert all(line.startswith("ok") for line in lines)
    assert "200 GFLOP/s" in lines[3]
    assert not any(check.reason or check.fix for check in checks)


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_each_fault_is_found_explained_and_given_a_fix(fault: str) -> None:
    changes, name, verdict, words = FAULTS[fault]
    checks = {check.name: check for check in examine(machine(**changes), matmul_flops=200e9)}
    assert checks[name].verdict == verdict
    assert words in checks[name].reason
    assert checks[name].fix.endswith(".")
    assert {other.verdict for key, other in checks.items() if key != name} == {"ok"}


def test_a_matmul_that_does_not_run_fails() -> None:
    check = examine(machine(), matmul_flops=None)[3]
    assert check.verdict == "fail"


def test_a_cpu_limit_is_named() -> None:
    limited = machine(num_cores=12, cores_limit="cgroup quota", memory_limit="cgroup")
    cores, memory, *_ = examine(limited, matmul_flops=200e9)
    assert "12 usable of 16 logical" in cores.facts
    assert "set by cgroup quota" in cores.facts
    assert "set by the cgroup" in memory.facts


def test_arm_and_accelerators() -> None:
    gpu = Accelerator(kind="cuda", name="Example GPU", memory_bytes=80 * GIB, capability="9.0")
    found = machine(isa=("neon",), shm_free_bytes=None, accelerators=(gpu, gpu), no_accelerator="")
    checks = {check.name: check for check in examine(found, matmul_flops=50e9)}
    assert {check.verdict for check in checks.values()} == {"ok"}
    assert checks["accelerator"].facts == "2 x Example GPU (cuda, 80.0 GiB, capability 9.0)"
    assert "/dev/shm" not in checks["memory"].facts


def test_the_verb_prints_six_lines_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == NAMES
    assert code == (1 if any(line.startswith("fail") for line in lines) else 0)
    assert main(["doctor", "--json"]) == code
    result = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in result["checks"]] == NAMES
    assert result["matmul_gflops"] > 0.1
    assert result["machine"]["num_cores"] >= 1


def test_checks_as_json() -> None:
    assert set(to_json(examine(machine(), matmul_flops=1e9))[0]) == {"name", "verdict", "facts", "reason", "fix"}
