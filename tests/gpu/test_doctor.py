"""The doctor beside a real NVIDIA GPU: nvidia-smi's answers, what torch says of its build, and products that run."""

from __future__ import annotations

import dataclasses

import torch

from shardline.hardware.checks import examine
from shardline.hardware.matmuls import measure_matmuls
from shardline.hardware.probe import probe


def test_a_gpu_that_torch_uses_is_found_and_has_no_fault_of_driver_or_wheel():
    machine = probe(with_torch=True, with_devices=True)
    machine = dataclasses.replace(machine, matmuls=(*measure_matmuls("cpu"), *measure_matmuls("cuda")))
    assert machine.accelerators
    assert machine.nvidia is not None
    assert len(machine.nvidia.gpus) >= len(machine.accelerators)
    assert machine.nvidia.driver
    assert machine.nvidia.gpus[0].capability == machine.accelerators[0].capability
    assert machine.torch.cuda == torch.version.cuda
    assert machine.torch.arch_list
    assert machine.torch.cudnn
    checks = examine(machine)
    assert {check.name for check in checks} >= {"driver", "gpus", "torch", "matmul"}
    assert [check.rule for check in checks if check.name == "driver" and check.rule] == []
    assert "no-kernel-image" not in {check.rule for check in checks}


def test_products_run_in_the_dtypes_that_the_gpu_has():
    before = torch.backends.cuda.matmul.fp32_precision
    found = {each.dtype: each for each in measure_matmuls("cuda")}
    assert torch.backends.cuda.matmul.fp32_precision == before
    capability = torch.cuda.get_device_capability()
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        assert found[dtype].gflops > 0, found[dtype].error
    if capability >= (8, 0):
        assert found["tf32"].gflops > found["float32"].gflops
        assert found["int8"].gflops > 0, found["int8"].error
    if capability >= (8, 9):
        assert found["float8_e4m3fn"].gflops > 0, found["float8_e4m3fn"].error
    else:
        assert found["float8_e4m3fn"].error
