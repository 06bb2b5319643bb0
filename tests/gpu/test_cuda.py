"""The CUDA paths in one process: NCCL beside gloo, half precision, flash attention, offload through pinned memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardline.config import OffloadConfig, OptimizerConfig
from shardline.kernels.attention import attention
from shardline.parallel.offload import HostMemory, HostStream
from shardline.training.bucketed import BucketedOptimizer, LocalSource
from shardline.training.kinds import make_library_optimizer
from shardline.training.rounding import StochasticRounding
from training.conftest import with_layout
from training.jobs import losses, scaled_losses


def changed(config, *, train=None, optimizer=None, offload=None, zero=0):
    config = with_layout(config, zero=zero, micro_batch=4, steps=6)
    parallel = dataclasses.replace(config.parallel, offload=OffloadConfig(**(offload or {})))
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, **(train or {})),
        optimizer=dataclasses.replace(config.optimizer, **(optimizer or {})),
        parallel=parallel,
    )


@pytest.fixture
def plain(world, base_config, cache):
    return losses(world, changed(base_config), cache, True)


def test_collectives_run_where_the_tensor_is(world):
    assert world.device.type == "cuda"
    assert world.sum(torch.ones(3)).tolist() == [1.0] * 3
    on_gpu = torch.ones(3, device=world.device)
    dist.all_reduce(on_gpu)
    assert on_gpu.tolist() == [1.0] * 3


def test_flash_attention_is_the_reference_attention():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 64, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        fast = attention(q, k, v, mask_BTS=None, causal=True, scale=0.125)
    with sdpa_kernel(SDPBackend.MATH):
        slow = attention(q.float(), k.float(), v.float(), mask_BTS=None, causal=True, scale=0.125)
    assert (fast.float() - slow).abs().max() < 2e-2


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure", "fp16"])
def test_half_precision_stays_near_fp32(precision, plain, world, base_config, cache):
    config = changed(base_config, train={"precision": precision})
    actual = scaled_losses(world, config, cache, 2.0**12) if precision == "fp16" else losses(world, config, cache, True)
    np.testing.assert_allclose(actual["loss"], plain["loss"], rtol=1e-2)


@pytest.mark.parametrize(
    ("offload", "zero"),
    [
        ({"optimizer": "cpu"}, 0),
        ({"optimizer": "cpu", "optimizer_fraction": 0.5}, 0),
        ({"optimizer": "disk"}, 0),
        ({"params": "cpu"}, 3),
        ({"params": "cpu", "optimizer": "disk"}, 3),
    ],
    ids=str,
)
def test_offload_gives_the_same_losses(offload, zero, plain, world, base_config, cache, tmp_path):
    """Clipping included. The step is then the CPU's AdamW and not the GPU's, so the last bits may differ."""
    config = dataclasses.replace(changed(base_config, offload=offload, zero=zero), run=str(tmp_path))
    actual = losses(world, config, cache, True)
    for key in ("loss", "grad_norm", "heldout"):
        np.testing.assert_allclose(actual[key], plain[key], rtol=1e-4, err_msg=key)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
@pytest.mark.parametrize("place", ["none", "cpu"])
def test_whole_matrix_optimizers(name, place, world, base_config, cache):
    config = changed(base_config, optimizer={"name": name}, offload={"optimizer": place})
    actual = losses(world, config, cache, True)["loss"]
    assert actual[-1] < actual[0]


def test_offloaded_state_is_pinned_and_leaves_the_gpu():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weight = nn.Parameter(torch.randn(2048, 2048, device="cuda"))
    host = nn.Parameter(weight.detach().cpu())
    config = OptimizerConfig(lr=1e-2)
    optimizer = BucketedOptimizer(
        [{"params": [weight], "names": ["w"], "kind": "adamw", "lr": 1e-2, "lr_scale": 1.0, "weight_decay": 0.1}],
        source=LocalSource({"w": weight}, {}),
        libraries={"adamw": make_library_optimizer("adamw", config)},
        device=weight.device,
        memory=HostMemory(),
        bucket_elements=1 << 18,
    )
    library = torch.optim.AdamW([host], lr=1e-2, betas=config.betas, eps=config.eps, weight_decay=0.1, fused=True)
    for _ in range(3):
        host.grad = torch.randn(host.shape)
        weight.grad = host.grad.to("cuda")
        optimizer.step()
        library.step()
    assert torch.equal(weight.cpu(), host), "the same arithmetic, on the same kind of device"
    state = optimizer.shards()["w.exp_avg"].local
    assert state.device.type == "cpu"
    assert state.is_pinned()
    assert torch.cuda.memory_allocated() - before < 2.1 * weight.nbytes, "weights and gradients only"


def test_the_host_s_copy_follows_weights_that_a_checkpoint_filled():
    weight = nn.Parameter(torch.zeros(1000, device="cuda"))
    optimizer = BucketedOptimizer(
        [{"params": [weight], "names": ["w"], "kind": "adamw", "lr": 0.0, "lr_scale": 1.0, "weight_decay": 0.0}],
        source=LocalSource({"w": weight}, {}),
        libraries={"adamw": make_library_optimizer("adamw", OptimizerConfig())},
        device=weight.device,
        memory=HostMemory(),
    )
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.shards()
    with torch.no_grad():
        weight.fill_(5.0)
    optimizer.step()
    assert (weight == 5.0).all()


def test_streams_carry_both_ways():
    stream = HostStream(torch.device("cuda"), num_elements=1 << 16)
    values = [torch.randn(100, 100, device="cuda"), torch.randn(7, device="cuda")]
    stream.fetch(0, values)
    copies = stream.take(0)
    assert all(torch.equal(copy, value.cpu()) for copy, value in zip(copies, values, strict=True))
    host = torch.randn(7).pin_memory()
    stream.push(host, values[1])
    stream.finish()
    assert torch.equal(values[1].cpu(), host)


def test_random_bits_are_those_of_the_cpu():
    value = torch.randn(100_000)
    answers = []
    for device in ("cpu", "cuda"):
        target = torch.empty(value.shape, dtype=torch.bfloat16, device=device)
        StochasticRounding(seed=3).copy(value.to(device), target, step=1, name="w", index=0)
        answers.append(target.cpu())
    assert torch.equal(*answers)
