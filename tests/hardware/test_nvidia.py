"""nvidia-smi's answers as the program prints them, from drivers of several years, healthy and not."""

from __future__ import annotations

import pytest

from shardline.hardware.devices import find_amd, find_tpu
from shardline.hardware.nvidia import FIELDS, parse_gpus, parse_links, parse_version, probe_nvidia

HEADER = """Tue Dec  1 05:00:00 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.105.08             Driver Version: 580.105.08     CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+
"""
ROW = (
    "0, NVIDIA H100 80GB HBM3, 9.0, 81559, GPU-7e1c2a4b-1f8d-4d5e-9c3b-0a1b2c3d4e5f, 1650123456789, "
    "00000000:18:00.0, Enabled, 0, Disabled, 700.00, 700.00, 16, 16, Enabled, Default\n"
)
GEFORCE = (
    "0, NVIDIA GeForce RTX 4090, 8.9, 24564, GPU-11111111-2222-3333-4444-555555555555, [N/A], 00000000:01:00.0, "
    "[N/A], [N/A], [N/A], 450.00, 450.00, 8, 16, Disabled, Default\n"
)
TOPOLOGY = """\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPXB\t0-55,112-167\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t56-111,168-223\t1\t\tN/A
NIC0\tPXB\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


class Program:
    """Stands for nvidia-smi on another machine; `unknown` are fields that its driver does not know."""

    def __init__(
        self, *, gpus: str, topology: str = "", unknown: tuple[str, ...] = (), code: int = 0, said: str = HEADER
    ):
        self.gpus, self.topology, self.unknown, self.code, self.said = gpus, topology, unknown, code, said

    def __call__(self, words):
        if not words:
            return self.code, self.said
        if words[0] == "topo":
            return 0, self.topology
        fields = words[0].partition("=")[2].split(",")
        for field in self.unknown:
            if field in fields:
                return 2, f'Field "{field}" is not a valid field to query.\n'
        kept = [number for number, field in enumerate(FIELDS) if field in fields]
        rows = [line.split(", ") for line in self.gpus.splitlines()]
        return 0, "".join(", ".join(row[number] for number in kept) + "\n" for row in rows)


def test_a_node_of_two(tmp_path):
    second = ROW.replace("0, NVIDIA", "1, NVIDIA", 1)
    found = probe_nvidia(ask=Program(gpus=ROW + second, topology=TOPOLOGY), root=tmp_path)
    assert (found.driver, found.cuda_max, found.error) == ("580.105.08", "13.0", "")
    assert found.links == (("X", "NV18"), ("NV18", "X"))
    gpu = found.gpus[1]
    assert (gpu.index, gpu.capability, gpu.memory_bytes) == (1, "9.0", 81559 << 20)
    assert (gpu.ecc, gpu.mig, gpu.uncorrected_errors) == (True, False, 0)
    assert (gpu.power_limit_w, gpu.pcie_width, gpu.compute_mode) == (700.0, 16, "Default")


def test_a_card_without_ecc_mig_or_serial():
    (gpu,) = parse_gpus(GEFORCE, FIELDS)
    assert (gpu.ecc, gpu.mig, gpu.uncorrected_errors, gpu.serial) == (None, None, None, None)
    assert (gpu.pcie_width, gpu.pcie_width_max, gpu.persistence) == (8, 16, False)


def test_an_old_driver_is_asked_again_without_what_it_does_not_know(tmp_path):
    found = probe_nvidia(ask=Program(gpus=ROW, unknown=("compute_cap", "mig.mode.current")), root=tmp_path)
    (gpu,) = found.gpus
    assert (gpu.capability, gpu.mig, gpu.memory_bytes) == (None, None, 81559 << 20)


@pytest.mark.parametrize(
    "said",
    [
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.107\n",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
        "NVIDIA driver is installed and running.\n",
        "No devices were found\n",
    ],
)
def test_what_it_says_instead_of_an_answer_is_kept(said, tmp_path):
    folder = tmp_path / "proc/driver/nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\nGCC version:\n"
    )
    found = probe_nvidia(ask=Program(gpus="", code=9, said=said), root=tmp_path)
    assert found.error == " ".join(said.split())
    assert found.driver == "550.90.07"


def test_the_open_kernel_module_without_the_program(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe_nvidia(root=tmp_path) is None
    folder = tmp_path / "proc/driver/nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)\n"
    )
    found = probe_nvidia(root=tmp_path)
    assert (found.driver, found.nodes, found.gpus) == ("580.65.06", False, ())
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert not probe_nvidia(root=tmp_path).nodes
    (tmp_path / "dev/nvidia3").touch()
    assert probe_nvidia(root=tmp_path).nodes


@pytest.mark.parametrize(
    "text", ["", "garbage\n", "a, b\n", "\n\n", "Warning: infoROM is corrupted at gpu 0000:01:00.0\n"]
)
def test_odd_answers_are_no_gpus(text):
    assert parse_gpus(text, FIELDS) == ()
    assert parse_links(text) == ()
    assert parse_version(text) == (None, None)


def test_units_and_warnings_among_the_answers():
    row = ROW.replace("81559", "81559 MiB").replace("700.00", "700.00 W")
    (gpu,) = parse_gpus(f"WARNING: infoROM is corrupted\n{row}\n", FIELDS)
    assert (gpu.memory_bytes, gpu.power_limit_w) == (81559 << 20, 700.0)


def test_a_matrix_that_is_cut_short_is_none():
    assert parse_links("\n".join(TOPOLOGY.splitlines()[:2])) == ()


def test_amd_and_tpu_from_the_kernel_s_files(tmp_path):
    assert find_amd(tmp_path) is None
    assert find_tpu(tmp_path, {}) is None
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number, version in enumerate((0, 90402, 90010, 100300)):
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "properties").write_text(
            f"cpu_cores_count 0\ngfx_target_version {version}\nvendor_id 4098\n"
        )
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert find_amd(tmp_path).gfx == ("gfx942", "gfx90a", "gfx1030")
    for number, kind in enumerate(("0x120000", "0x020000")):  # a TPU, and Google's network adapter
        device = tmp_path / f"sys/bus/pci/devices/{number}"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1ae0\n")
        (device / "class").write_text(f"{kind}\n")
    found = find_tpu(tmp_path, {"TPU_ACCELERATOR_TYPE": "v5litepod-8"})
    assert (found.kind, found.num_chips) == ("v5litepod-8", 1)
