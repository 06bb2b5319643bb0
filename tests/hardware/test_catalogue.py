"""The catalogue of devices: names, figures and how device counts are written."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardline.config import UsageError
from shardline.hardware.catalogue import device, device_names, parse_devices


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("V100-32GB", "v100-32gb"),
        ("v100-32", "v100-32gb"),
        ("A100 80GB", "a100-80gb"),
        ("H100-SXM", "h100-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("TPU v5e", "tpu-v5e"),
    ],
)
def test_aliases(alias: str, name: str) -> None:
    assert device(alias).name == name


def test_every_device_that_is_promised_is_there() -> None:
    wanted = ["V100-16GB", "V100-32GB", "A100-40GB", "A100-80GB", "A10", "L4", "L40S", "H100-SXM", "H100-PCIe", "H200"]
    wanted += ["B200", "MI250X", "MI300X", "RTX-3090", "RTX-4090", "RTX-5090", "v4", "v5e", "v5p", "v6e"]
    assert len({device(name).name for name in wanted}) == len(wanted)


@pytest.mark.parametrize("name", device_names())
def test_a_measured_peak_is_below_the_nominal_one_and_figures_have_sources(name: str) -> None:
    found = device(name)
    assert set(found.matmul_flops) == set(found.nominal_flops)
    for dtype, rate in found.matmul_flops.items():
        assert 0.3 * found.nominal_flops[dtype] < rate < found.nominal_flops[dtype]
    assert found.source
    assert found.measured_source
    assert found.memory_gib > 10
    assert found.link_between <= found.link_within
    assert found.host_copy <= found.bandwidth


def test_counts() -> None:
    count, found = parse_devices("8xV100-32GB")
    assert (count, found.name) == (8, "v100-32gb")
    assert parse_devices("rtx 4090")[0] == 1
    assert parse_devices("1024 x H100")[0] == 1024


def test_processes_on_this_machine_share_what_it_has() -> None:
    (one, whole), (four, quarter) = parse_devices("cpu"), parse_devices("cpu:4")
    assert (one, four) == (1, 4)
    assert quarter.memory_bytes == pytest.approx(whole.memory_bytes / 4, rel=1e-6)
    assert quarter.flops("fp32") == pytest.approx(whole.flops("fp32") / 4)


def test_this_machine_is_measured() -> None:
    _, found = parse_devices("this")
    assert found.measured_source == "measured here"
    assert found.flops("fp32") > 1e9
    assert found.bandwidth > 1e8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xV100-23GB", "did you mean 'v100-32gb'"),
        ("0xA100", "0 devices"),
        ("-2xA100", "-2 devices"),
        ("cpu:0", "0 devices"),
        ("banana", "choose one of"),
    ],
)
def test_bad_names(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_devices(text)


def test_a_dtype_that_a_device_lacks_falls_back_to_the_next_best() -> None:
    assert device("v100-32gb").flops("bf16") == device("v100-32gb").flops("fp16")
    assert device("a100").flops("fp8") == device("a100").flops("bf16")
    assert device("a100").nominal("fp8") is None


def test_reading_the_catalogue_loads_no_torch() -> None:
    code = "import sys; from shardline.hardware.catalogue import device; device('h100'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
