"""A step on fake tensors holds what the formulas say, and needs no memory for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shardline.config import InfeasibleError, RunConfig
from shardline.hardware.catalogue import device
from shardline.hardware.memory import rss_bytes
from shardline.models.presets import preset
from shardline.parallel.grid import Layout
from shardline.planning.cluster.job import ClusterLayout, Job
from shardline.planning.cluster.memory import estimate_memory
from shardline.planning.cluster.shape import ModelShape
from shardline.planning.memory import Predictor
from shardline.planning.parameters import count_parameters
from shardline.training.exact import exact_memory
from training.jobs import small_model

# torch hides this one by what it does with shown warnings, so that it would still be an error here.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

SMALL = 1 << 14  # step counters and the loss's sums
MODEL = small_model(tied=False)
P = count_parameters(MODEL).total
# Wide enough for its own tensors to be the larger part.
WIDE = dataclasses.replace(preset("llama-3.2-1b"), num_layers=8, vocab_size=32000, sliding_windows=())


def config(*, global_batch: int = 8, micro_batch: int = 1, sequence_length: int = 128, **parallel: object) -> RunConfig:
    run = RunConfig()
    return dataclasses.replace(
        run,
        train=dataclasses.replace(run.train, global_batch=global_batch, micro_batch=micro_batch),
        data=dataclasses.replace(run.data, sequence_length=sequence_length),
        parallel=dataclasses.replace(run.parallel, **parallel),
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("zero", [2, 3])
def test_between_steps_a_rank_keeps_its_share_of_weights_and_moments(zero: int, rank: int):
    exact = exact_memory(config(zero=zero), MODEL, world_size=2, rank=rank)
    assert 0 <= exact.kept_bytes - 12 * P // 2 < SMALL  # gradients are gone
    assert exact.first_bytes <= exact.step_bytes
    assert 0 <= exact_memory(config(zero=zero), MODEL, world_size=4, rank=rank).kept_bytes - 12 * P // 4 < SMALL


def test_one_process_tensor_ranks_and_stages():
    assert exact_memory(config(zero=0), MODEL, world_size=1).kept_bytes - 12 * P < SMALL
    half = exact_memory(config(zero=0, data=1, tensor=2), MODEL, world_size=2)
    assert 12 * P / 2 <= half.kept_bytes < 1.05 * 12 * P / 2  # norms are on both
    stages = [exact_memory(config(zero=0, data=1, pipeline=2), MODEL, world_size=2, rank=rank) for rank in (0, 1)]
    assert 0 <= sum(stage.kept_bytes for stage in stages) - 12 * P < 2 * SMALL


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_closed_form_finds_about_as_much(recompute: str):
    """Beside the allocator's share and the process itself, which are no tensors."""
    run = config(zero=3, micro_batch=4, sequence_length=256, activation_checkpointing=recompute)
    exact = exact_memory(run, preset("tiny"), world_size=2)
    predictor = Predictor(preset("tiny"), run)
    found = predictor.predict(Layout.resolve(run.parallel, world_size=2), micro_batch=4, recompute=recompute)
    tensors = found.total_bytes - found.runtime_bytes - found.allocator_bytes - found.checkpoint_bytes
    assert exact.peak_bytes <= tensors <= 1.3 * exact.peak_bytes


def test_a_model_that_this_machine_could_not_hold_is_counted():
    model = preset("llama-3.1-8b")
    before = rss_bytes()
    exact = exact_memory(config(zero=3, global_batch=64, sequence_length=512), model, world_size=64)
    assert 0 <= exact.kept_bytes - 12 * count_parameters(model).total // 64 < SMALL
    assert rss_bytes() - before < 2**30


def test_mixtures_are_refused():
    with pytest.raises(InfeasibleError, match="each of 8 experts gets depends on values"):
        exact_memory(config(zero=3), preset("mixtral-8x7b"), world_size=2)


def piped(schedule: str, stages: int = 1, **sizes: int) -> ClusterLayout:
    return ClusterLayout(pipeline=2, schedule=schedule, virtual_stages=stages, **sizes)  # pyrefly: ignore


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        *((ClusterLayout(data=8, zero=3), recompute) for recompute in ("none", "selective", "full")),
        (ClusterLayout(data=8, zero=2), "none"),
        (ClusterLayout(data=8, zero=3, shard=2), "full"),
        (ClusterLayout(tensor=2), "none"),
        (ClusterLayout(data=2, tensor=2, sequence_parallel=True, zero=3), "selective"),
        (piped("1f1b"), "full"),
        (piped("interleaved", 2), "none"),
        (piped("zero_bubble_v", 2), "none"),
        (piped("1f1b", data=4, zero=3), "none"),
    ],
    ids=str,
)
def test_a_plan_for_other_devices_finds_about_as_much(layout: ClusterLayout, recompute: Any):
    """It calculates a kernel's temporary memory too, which is no tensor."""
    count, rows = 2 * layout.pipeline, 1
    job = Job(
        shape=ModelShape.of(WIDE),
        device=device("h100"),
        num_devices=layout.num_devices,
        sequence_length=1024,
        global_batch=layout.data * rows * count,
        micro_batch=rows,
        layout=layout,
        recompute=recompute,
        precision="fp32",
    )
    found = estimate_memory(job, measure="allocated")
    run = config(
        zero=layout.zero,
        zero_group=layout.shard or "auto",
        data=layout.data,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        sequence_parallel=layout.sequence_parallel,
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages if layout.virtual_stages > 1 else "auto",
        activation_checkpointing=recompute,
        global_batch=job.global_batch,
        micro_batch=rows,
        sequence_length=1024,
    )
    rank = found.pipeline_rank * layout.data * layout.tensor
    counted = exact_memory(run, WIDE, world_size=layout.num_devices, rank=rank).peak_bytes
    assert 0.95 * counted <= found.expected_bytes <= 1.12 * counted


def test_ddp_is_refused_with_what_to_do():
    with pytest.raises(InfeasibleError, match=r"parallel\.zero = 1 over 2 data ranks is DDP.*set parallel\.zero to 2"):
        exact_memory(config(zero=1), MODEL, world_size=2)
