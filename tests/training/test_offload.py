"""Offloaded state and parameters: the same numbers to the last bit, and the memory that is said to be freed is."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shardline.config import OffloadConfig, OptimizerConfig, ShardlineError
from shardline.parallel.offload import DiskMemory, HostMemory
from shardline.training.bucketed import BucketedOptimizer, LocalSource
from shardline.training.kinds import make_library_optimizer
from training.conftest import with_layout
from training.jobs import losses, saved_here_loaded_there, straight_and_resumed


def offloading(config, run: Path, **offload):
    parallel = dataclasses.replace(config.parallel, offload=OffloadConfig(**offload))
    return dataclasses.replace(config, parallel=parallel, run=str(run))


@pytest.fixture(scope="module")
def plain(workers, base_config, cache):
    """(processes, zero) -> the run with everything on the device; clipped hard, so that clipping is seen too."""
    found = {}

    def plain(processes, zero):
        if (processes, zero) not in found:
            config = clipped(with_layout(base_config, zero=zero, micro_batch=4, steps=6))
            found[processes, zero] = workers.run(processes, losses, config, cache, True)
        return found[processes, zero]

    return plain


def clipped(config):
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, clip=0.25))


@pytest.mark.parametrize(("processes", "zero"), [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (4, 3)])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_optimizer_changes_no_bit(place, processes, zero, plain, workers, base_config, cache, tmp_path):
    config = clipped(with_layout(base_config, zero=zero, micro_batch=4, steps=6))
    config = offloading(config, tmp_path, optimizer=place)
    assert workers.run(processes, losses, config, cache, True) == plain(processes, zero)


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (2, {"tensor": 2}),
        (2, {"pipeline": 2}),
        (4, {"tensor": 2, "zero": 1}),
        (4, {"tensor": 2, "zero": 3}),
        (4, {"pipeline": 2, "zero": 2}),
        (4, {"zero": 3, "zero_group": 2}),
    ],
    ids=str,
)
def test_nor_over_other_axes(processes, layout, workers, base_config, cache, tmp_path):
    config = clipped(with_layout(base_config, zero=0, micro_batch=4, steps=6))
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **layout))
    expected = workers.run(processes, losses, config, cache, True)
    assert workers.run(processes, losses, offloading(config, tmp_path, optimizer="disk"), cache, True) == expected


@pytest.mark.parametrize(
    ("processes", "layout"), [(2, {"pipeline": 2}), (2, {"tensor": 2}), (4, {"tensor": 2})], ids=str
)
def test_parameters_offloaded_over_other_axes(processes, layout, workers, base_config, cache, tmp_path):
    config = clipped(with_layout(base_config, zero=3, micro_batch=4, steps=4))
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **layout))
    expected = workers.run(processes, losses, config, cache, True)
    actual = workers.run(processes, losses, offloading(config, tmp_path, params="cpu"), cache, True)
    for key in ("loss", "grad_norm", "heldout"):
        np.testing.assert_allclose(actual[key], expected[key], rtol=1e-6, err_msg=key)


@pytest.mark.parametrize("zero", [1, 3])
def test_nor_does_a_part_of_it(zero, plain, workers, base_config, cache, tmp_path):
    config = clipped(with_layout(base_config, zero=zero, micro_batch=4, steps=6))
    config = offloading(config, tmp_path, optimizer="disk", optimizer_fraction=0.4)
    assert workers.run(2, losses, config, cache, True) == plain(2, zero)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("optimizer", ["none", "disk"])
def test_offloaded_parameters_change_no_bit(optimizer, processes, plain, workers, base_config, cache, tmp_path):
    config = clipped(with_layout(base_config, zero=3, micro_batch=4, steps=6))
    config = offloading(config, tmp_path, params="cpu", optimizer=optimizer)
    actual = workers.run(processes, losses, config, cache, True)
    if processes == 1:  # FSDP2 over one rank clips by a norm of norms in another order
        for key in ("loss", "grad_norm", "heldout"):
            assert actual[key] == pytest.approx(plain(1, 0)[key], rel=1e-6)
    else:
        assert actual == plain(2, 3)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_state_of_other_optimizers_goes_to_disk_too(name, workers, base_config, cache, tmp_path):
    config = with_layout(base_config, zero=2, micro_batch=4, steps=4)
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name=name))
    expected = workers.run(2, losses, config, cache, True)
    assert workers.run(2, losses, offloading(config, tmp_path, optimizer="disk"), cache, True) == expected


def test_a_resumed_run_continues_bit_for_bit(workers, base_config, cache, tmp_path):
    config = with_layout(base_config, zero=3, micro_batch=4, steps=6)
    config = offloading(config, tmp_path / "run", optimizer="disk")
    straight, resumed = workers.run(2, straight_and_resumed, config, cache, tmp_path)
    assert straight == resumed


@pytest.mark.parametrize(("saved", "loaded"), [("disk", "none"), ("none", "disk"), ("cpu", "disk")])
def test_a_checkpoint_does_not_know_where_state_lived(saved, loaded, workers, base_config, cache, tmp_path):
    first = offloading(with_layout(base_config, zero=1, micro_batch=4, steps=3), tmp_path / "a", optimizer=saved)
    second = offloading(with_layout(base_config, zero=3, micro_batch=4, steps=3), tmp_path / "b", optimizer=loaded)
    assert workers.run(2, saved_here_loaded_there, first, second, cache, tmp_path / "state") == 0.0


@pytest.mark.parametrize("memory", ["host", "host, by copies", "disk"])
def test_slices_step_as_the_whole_does(memory, tmp_path):
    """Parameters of odd sizes, cut into slices: PyTorch's fused AdamW over whole tensors gives the same bits."""
    torch.manual_seed(0)
    ours = {name: nn.Parameter(torch.randn(shape)) for name, shape in {"a": (37, 41), "b": (7,), "c": (1000,)}.items()}
    theirs = [nn.Parameter(each.detach().clone()) for each in ours.values()]
    config = OptimizerConfig(lr=1e-2)
    options = {"kind": "adamw", "lr": config.lr, "lr_scale": 1.0, "weight_decay": 0.1}
    optimizer = BucketedOptimizer(
        [{"params": list(ours.values()), "names": list(ours), **options}],
        source=LocalSource(ours, {}),
        libraries={"adamw": make_library_optimizer("adamw", config)},
        device=torch.device("cpu"),
        memory=DiskMemory(tmp_path) if memory == "disk" else HostMemory(),
        bucket_elements=128,
        copies="copies" in memory,
    )
    library = torch.optim.AdamW(theirs, lr=1e-2, betas=config.betas, eps=config.eps, weight_decay=0.1, fused=True)
    for _ in range(5):
        for mine, other in zip(ours.values(), theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        optimizer.step()
        library.step()
    for mine, other in zip(ours.values(), theirs, strict=True):
        assert torch.equal(mine, other)
    assert optimizer.shards()["a.step"].local == 5


def test_copies_in_the_host_s_memory_follow_weights_that_a_checkpoint_filled():
    weight = nn.Parameter(torch.zeros(1000))
    options = {"kind": "adamw", "lr": 0.0, "lr_scale": 1.0, "weight_decay": 0.0}
    optimizer = BucketedOptimizer(
        [{"params": [weight], "names": ["w"], **options}],
        source=LocalSource({"w": weight}, {}),
        libraries={"adamw": make_library_optimizer("adamw", OptimizerConfig())},
        device=weight.device,
        memory=HostMemory(),
        copies=True,
    )
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.shards()
    with torch.no_grad():
        weight.fill_(5.0)
    optimizer.step()
    assert (weight == 5.0).all()


def test_the_files_have_no_name_so_that_a_killed_run_leaves_none(tmp_path):
    memory = DiskMemory(tmp_path / "rank-0")
    tensor = memory.zeros((100, 100))
    tensor.fill_(3.0)
    memory.release(tensor)
    assert list(tmp_path.rglob("*")) == [tmp_path / "rank-0"]
    assert (tensor == 3.0).all()


def test_a_full_disk_is_a_sentence(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ShardlineError, match="has no room for 4,000 bytes of optimizer state more"):
        DiskMemory(tmp_path).zeros((1000,))


CHILD = """
import sys, torch
from pathlib import Path
from torch import nn
from shardline.config import OptimizerConfig
from shardline.parallel.offload import DiskMemory
from shardline.training.bucketed import BucketedOptimizer, LocalSource
from shardline.training.kinds import make_library_optimizer
weight = nn.Parameter(torch.zeros(4096, 4096))
weight.grad = torch.ones_like(weight)
optimizer = BucketedOptimizer(
    [{"params": [weight], "names": ["w"], "kind": "adamw", "lr": 1e-3, "lr_scale": 1.0, "weight_decay": 0.0}],
    source=LocalSource({"w": weight}, {}),
    libraries={"adamw": make_library_optimizer("adamw", OptimizerConfig())},
    device=torch.device("cpu"),
    memory=DiskMemory(Path(sys.argv[1])) if len(sys.argv) > 1 else None,
    bucket_elements=1 << 20,
)
for _ in range(2):
    optimizer.step()
lines = dict(line.split(":", 1) for line in open("/proc/self/status") if line.startswith("Vm"))
print(int(lines["VmHWM"].split()[0]) / 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from Linux's /proc")
def test_peak_memory_falls_by_the_state_but_for_a_bucket(tmp_path):
    """64 MiB of weights have 128 MiB of AdamW state; a bucket of it is 8 MiB."""

    def peak_mib(*words: str) -> float:
        return float(subprocess.run([sys.executable, "-c", CHILD, *words], capture_output=True, check=True).stdout)

    saved = peak_mib() - peak_mib(str(tmp_path))
    assert 128 - 8 - 12 < saved < 128 + 12
