"""Look-ups: which driver runs which CUDA, which wheel has code for which GPU; and descriptions, read strictly."""

from __future__ import annotations

import dataclasses

import pytest

from hardware.recorded import NAMES, machine, values
from shardline.config import UsageError
from shardline.hardware.devices import _cudnn_version
from shardline.hardware.machine import Machine, machine_from, read_machine, write_machine
from shardline.hardware.packages import required_versions, unmet_requirements
from shardline.hardware.strict import StrictError, convert_strictly
from shardline.hardware.tables import (
    capability,
    driver_for,
    gfx,
    newest_cuda_of_driver,
    runs_on,
    tables,
    wheel_archs,
    wheel_for_capability,
    wheel_for_driver,
)


@pytest.mark.parametrize(
    ("cuda", "driver"),
    [("13.2", "580.65.06"), ("12.8", "525.60.13"), ("11.7", "450.80.02"), ("10.1", "418.39"), ("7.5", None)],
)
def test_the_driver_that_a_toolkit_needs(cuda, driver):
    assert driver_for(cuda) == driver


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [("580.105.08", "13"), ("570.86.15", "12"), ("525.60.13", "12"), ("470.57", "11"), ("340.1", None)],
)
def test_the_toolkit_that_a_driver_runs(driver, cuda):
    assert newest_cuda_of_driver(driver) == cuda


@pytest.mark.parametrize(
    ("number", "archs", "runs"),
    [
        ("9.0", ("sm_90",), True),
        ("8.6", ("sm_80",), True),
        ("8.0", ("sm_86",), False),
        ("9.0", ("sm_80", "sm_86"), False),
        ("12.1", ("sm_80", "compute_90"), True),
        ("7.0", ("sm_75", "compute_80"), False),
        ("9.0", ("sm_90a",), True),
        ("10.0", ("sm_90a", "gfx942"), False),
        ("12.1", ("sm_120",), True),
        ("7.5", (), False),
    ],
)
def test_code_runs_within_its_generation_and_intermediate_code_on_later_ones(number, archs, runs):
    assert runs_on(number, archs) is runs


def test_wheels():
    assert "sm_70" in wheel_archs("2.10.0+cu128", "12.8")
    assert "sm_70" not in wheel_archs("2.11.1+cu128", "12.8")
    assert wheel_archs("1.13.0", "11.7") == ()
    assert wheel_for_capability("7.0") == ("2.14", "12.6"), "the last with Volta"
    assert wheel_for_capability("9.0") == ("2.15", "13.2")
    assert wheel_for_capability("3.5") is None
    assert wheel_for_driver("535.183.01", "8.0") == ("2.14", "12.6")
    assert wheel_for_driver("535.183.01", "12.0") == ("2.11", "12.8"), "Blackwell needs 12.8, the driver stops at 12"
    assert wheel_for_driver("450.80.02", None) is None


def test_capabilities():
    assert capability("8.6").name == "Ampere"
    assert (capability("7.5").bf16, capability("8.0").bf16) == (False, True)
    assert (capability("8.6").fp8, capability("8.9").fp8, capability("9.0").fp8) == (False, True, True)
    assert capability("9.0").flash == (2, 3, 4)
    assert (capability("10.3").mxfp8, capability("12.0").mxfp8) == (True, False)
    assert capability("3.5") is None
    assert gfx("gfx942").fp8 == "e4m3 FNUZ"
    assert gfx("gfx1035").name == "RDNA2"
    assert gfx("gfx1300") is None


def test_every_table_has_a_source():
    found = tables()
    for field in dataclasses.fields(found):
        table = getattr(found, field.name)
        assert getattr(table, "source", "") or all(row.source for row in table.rows)
    pairs = [(row.platform, row.framework) for row in found.platforms.rows]
    assert len(set(pairs)) == len(pairs)
    assert {row.support for row in found.platforms.rows} == {"yes", "partly", "no"}


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_that_is_written_is_read_again(name, tmp_path):
    write_machine(machine(name), tmp_path / "machine.yaml")
    assert read_machine(tmp_path / "machine.yaml") == machine(name)


def test_unknown_keys_and_wrong_types_are_named():
    facts = values("healthy-h100")
    with pytest.raises(UsageError, match=r"here: Unknown key 'mem' in nvidia.gpus\[0\]; did you mean"):
        machine_from({**facts, "nvidia": {"gpus": [{"index": 0, "name": "x", "mem": 3}]}}, where="here")
    with pytest.raises(StrictError, match=r"Expected `int`, got `str` - at `num_cores`"):
        convert_strictly({**facts, "num_cores": "8"}, Machine)
    with pytest.raises(StrictError, match="Expected `object`"):
        convert_strictly(["not", "a", "machine"], Machine)


def test_versions_of_cudnn():
    assert [_cudnn_version(number) for number in (91501, 90100, 8902)] == ["9.15.1", "9.1.0", "8.9.2"]


def test_requirements_come_from_the_packages_own_metadata(tmp_path, monkeypatch):
    assert required_versions()["torch"]
    for name, version, needs in (("jax", "1.0", "torch>=99"), ("horovod", "0.1", "torch>=1; python_version>'2'")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        text = f"{head}Requires-Dist: {needs}\nRequires-Dist: alpa==3; extra == 'x'\n"
        (folder / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = unmet_requirements(["jax", "horovod", "torch"])
    assert found.startswith("jax 1.0 needs torch>=99, and 2.")
