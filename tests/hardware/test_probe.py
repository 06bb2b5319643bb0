"""This machine's facts, and how limits combine with them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from shardline.hardware.cgroup import CgroupLimits
from shardline.hardware.memory import max_rss_to_bytes, peak_rss_bytes, rss_bytes
from shardline.hardware.peak import measure_matmul_flops
from shardline.hardware.probe import probe, usable_cores, usable_memory


def test_probe_of_this_machine() -> None:
    machine = probe()
    assert 1 <= machine.num_cores <= machine.num_logical_cores
    assert 0 < machine.memory_available_bytes <= machine.memory_bytes
    assert machine.disk_free_bytes > 0
    assert machine.cpu_name
    assert machine.torch_version is not None
    assert json.loads(json.dumps(machine.to_json()))["packages"]["torch"] == machine.torch_version


def test_probe_takes_a_run_folder_that_is_not_there_yet(tmp_path) -> None:
    assert probe(folder=tmp_path / "runs" / "new").disk_path == str(tmp_path)


def test_probe_loads_no_torch() -> None:
    code = "import sys; from shardline.hardware.probe import probe; probe(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_without_an_accelerator_the_reason_is_given() -> None:
    machine = probe(with_torch=True)
    assert bool(machine.accelerators) != bool(machine.no_accelerator)


@pytest.mark.parametrize(
    ("affinity", "cpus", "expected"),
    [
        (8, None, (8, "host")),
        (3, None, (3, "affinity")),
        (8, 2.5, (2, "cgroup quota")),
        (8, 0.5, (1, "cgroup quota")),
        (2, 4.0, (2, "affinity")),
        (8, 16.0, (8, "host")),
    ],
)
def test_cores_are_the_smallest_limit(affinity: int, cpus: float | None, expected: tuple[int, str]) -> None:
    assert usable_cores(affinity, 8, CgroupLimits(cpus=cpus)) == expected


def test_memory_is_the_smaller_of_host_and_group() -> None:
    assert usable_memory(100, 80, CgroupLimits()) == (100, 80, "host")
    assert usable_memory(100, 80, CgroupLimits(memory_bytes=200, memory_used_bytes=10)) == (100, 80, "host")
    assert usable_memory(100, 80, CgroupLimits(memory_bytes=50, memory_used_bytes=20)) == (50, 30, "cgroup")
    assert usable_memory(100, 10, CgroupLimits(memory_bytes=50, memory_used_bytes=20)) == (50, 10, "cgroup")
    assert usable_memory(100, 80, CgroupLimits(memory_bytes=50, memory_used_bytes=60)) == (50, 0, "cgroup")


def test_the_peak_remembers_what_was_freed() -> None:
    before = peak_rss_bytes()
    block = bytearray(b"x") * (96 << 20)
    assert rss_bytes() >= 96 << 20
    del block
    assert peak_rss_bytes() >= max(before, 96 << 20)


def test_a_child_does_not_inherit_a_fat_peak() -> None:
    block = bytearray(b"x") * (200 << 20)
    code = "from shardline.hardware.memory import peak_rss_bytes; print(peak_rss_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < len(block)


def test_memory_of_another_process() -> None:
    code = "block = bytearray(b'x') * (64 << 20); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert rss_bytes(child.pid) >= 64 << 20
        assert peak_rss_bytes(child.pid) >= 64 << 20
        child.communicate(b"\n")


def test_units_of_ru_maxrss() -> None:
    assert max_rss_to_bytes(2048, "darwin") == 2048
    assert max_rss_to_bytes(2048, "linux") == 2048 * 1024


def test_matmul_peak_is_measured_and_unknown_ones_have_none() -> None:
    flops = measure_matmul_flops(seconds=0.02, size=256)
    assert flops is not None
    assert flops > 1e8
    assert measure_matmul_flops(device="cuda:97", seconds=0.02, size=64) is None
    assert measure_matmul_flops("bool", seconds=0.02, size=64) is None


def test_machines_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        probe().num_cores = 3  # type: ignore[misc]
