"""Limits read from made-up trees of /proc and /sys/fs/cgroup, as containers and batch systems present them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.hardware.cgroup import CgroupLimits, read_limits

GIB = 1 << 30


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _v2(path: str = "/", group: str = "/") -> dict[str, str]:
    return {
        "proc/self/cgroup": f"0::{path}\n",
        "proc/self/mountinfo": f"30 20 0:26 {group} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw\n",
    }


def test_no_control_groups_means_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == CgroupLimits()


def test_version_2_container(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB}\n",
    }
    limits = read_limits(_tree(tmp_path, _v2() | files))
    assert limits == CgroupLimits(cpus=1.5, memory_bytes=4 * GIB, memory_used_bytes=2 * GIB)


def test_version_2_without_limits(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu.max": "max 100000\n", "sys/fs/cgroup/memory.max": "max\n"}
    assert read_limits(_tree(tmp_path, _v2() | files)) == CgroupLimits()


def test_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/job/cpu.max": "200000 100000\n",
        "sys/fs/cgroup/job/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
        "sys/fs/cgroup/job/step/memory.max": f"{8 * GIB}\n",
    }
    limits = read_limits(_tree(tmp_path, _v2("/job/step") | files))
    assert (limits.cpus, limits.memory_bytes) == (2.0, 2 * GIB)


def test_version_1_batch_job(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:memory:/slurm/job_7\n4:cpu,cpuacct:/slurm/job_7\n0::/\n",
        "proc/self/mountinfo": (
            "31 20 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "32 20 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        ),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes": f"{6 * GIB}\n",
        "sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/slurm/job_7/memory.stat": f"total_inactive_file {GIB}\n",
        "sys/fs/cgroup/cpu,cpuacct/slurm/job_7/cpu.cfs_quota_us": "400000\n",
        "sys/fs/cgroup/cpu,cpuacct/slurm/job_7/cpu.cfs_period_us": "100000\n",
    }
    limits = read_limits(_tree(tmp_path, files))
    assert limits == CgroupLimits(cpus=4.0, memory_bytes=6 * GIB, memory_used_bytes=GIB)


def test_version_1_without_a_quota(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:cpu:/\n",
        "proc/self/mountinfo": "32 20 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert read_limits(_tree(tmp_path, files)).cpus is None


@pytest.mark.parametrize("group", ["/docker/abc", "/"])
def test_a_container_sees_its_own_group_as_the_top(tmp_path: Path, group: str) -> None:
    """/proc/self/cgroup names the host's path, which the container's mount does not show."""
    files = {"sys/fs/cgroup/memory.max": f"{GIB}\n"}
    limits = read_limits(_tree(tmp_path, _v2("/docker/abc", group) | files))
    assert limits.memory_bytes == GIB


@pytest.mark.parametrize("text", ["", "garbage\n", "0::\n", "::::\n"])
def test_odd_files_are_no_limits(tmp_path: Path, text: str) -> None:
    files = {"proc/self/cgroup": text, "proc/self/mountinfo": text, "sys/fs/cgroup/cpu.max": text}
    assert read_limits(_tree(tmp_path, files)) == CgroupLimits()
