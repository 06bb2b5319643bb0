"""The model of a step's time: what must hold for every machine, and what is sent."""

from __future__ import annotations

import dataclasses

import pytest

from hardware.machines import machine
from shardline.config import load_config
from shardline.hardware.probe import Accelerator
from shardline.models.presets import preset
from shardline.parallel.grid import Layout
from shardline.planning.layouts import Option
from shardline.planning.parameters import count_parameters
from shardline.planning.timing import Speed, StepTime, Timing

MODEL = preset("llama-3.2-1b")
WORDS = ("--train.global_batch=64", "--train.micro_batch=2", "--data.sequence_length=1024")
GPU = machine(accelerators=(Accelerator(kind="cuda", name="Example GPU", memory_bytes=80 << 30),))


def _timing(*words: str, here=None) -> Timing:
    run = load_config(None, [*WORDS, *words])
    speed = Speed.of(here or machine(), num_processes=8, precision=run.train.precision)
    return Timing(MODEL, run, speed)


def _option(*, micro_batch: int = 2, recompute: str = "none", **axes: object) -> Option:
    return Option(layout=Layout(**axes), micro_batch=micro_batch, recompute=recompute)


def _step(timing: Timing, **fields: object) -> StepTime:
    return timing.step(_option(**fields))


@pytest.mark.parametrize("here", [machine(), GPU], ids=["cpu", "gpu"])
def test_more_work_takes_longer(here) -> None:
    timing = _timing(here=here)
    plain = _step(timing, data=8)
    assert plain.total_s == pytest.approx(sum(plain.parts().values()))
    assert (
        _step(timing, data=8, recompute="full").recompute_s > _step(timing, data=8, recompute="selective").recompute_s
    )
    assert _step(timing, data=8, zero=3).data_s > _step(timing, data=8, zero=2).data_s > plain.data_s
    assert _step(timing, data=8, micro_batch=1).compute_s > plain.compute_s
    assert _step(timing, data=8, zero=1).optimizer_s == pytest.approx(plain.optimizer_s / 8)
    assert plain.bubble_s == plain.tensor_s == plain.pipeline_s == 0


def test_full_recomputation_is_a_third_more_of_the_layers() -> None:
    timing = _timing()
    step = _step(timing, data=8, recompute="full")
    head = count_parameters(MODEL).embedding
    share = 1 - 6 * head / timing._grid(Layout(data=8))[0]
    assert step.recompute_s == pytest.approx(step.compute_s * share / 3)


def test_ranks_share_the_work_of_the_axes_and_pay_for_each() -> None:
    timing = _timing()
    alone = _step(timing, data=1)
    assert _step(timing, data=8).compute_s == pytest.approx(alone.compute_s / 8)
    assert _step(timing, data=1, tensor=8).compute_s == pytest.approx(alone.compute_s / 8)
    pipeline = _step(timing, data=1, pipeline=4)
    assert pipeline.compute_s > alone.compute_s / 4, "stages are whole layers"
    assert pipeline.compute_s < alone.compute_s / 2
    assert pipeline.bubble_s == pytest.approx(pipeline.compute_s * 3 / 32)
    schedules = ("1f1b", "interleaved", "zero_bubble_v")
    idle = [
        _step(timing, data=1, pipeline=4, schedule=name, virtual_stages=1 if name == "1f1b" else 2).bubble_s
        for name in schedules
    ]
    assert idle == sorted(idle, reverse=True)


def test_what_is_sent_is_counted_by_axis() -> None:
    timing = _timing()
    stream = 4 * 2 * 1024 * MODEL.hidden_size
    sent = timing.sent(_option(data=2, tensor=4))
    assert sent.tensor_bytes == (4 * MODEL.num_layers + 2) * 16 * 2 * stream * 3 // 4
    assert sent.tensor_messages == (4 * MODEL.num_layers + 2) * 16
    sent = timing.sent(_option(data=2, pipeline=4))
    assert sent.pipeline_bytes == 2 * 16 * stream
    cut = timing.sent(_option(data=1, pipeline=4, tensor=2, sequence_parallel=True))
    assert cut.pipeline_bytes == 2 * 32 * stream // 2
    whole, hybrid = (timing.sent(_option(data=8, zero=3, zero_group=group)).data_bytes for group in (None, 4))
    total = 4 * count_parameters(MODEL).total
    assert whole == 3 * 4 * total * 7 // 8
    assert hybrid == 3 * 4 * total * 3 // 4 + 2 * 4 * total // 4 // 2


def test_a_gpu_hides_traffic_that_a_cpu_cannot() -> None:
    def share(here) -> float:
        timing = _timing("--train.micro_batch=4", here=here)
        step, sent = _step(timing, data=8, micro_batch=4), timing.sent(_option(data=8, micro_batch=4))
        return step.data_s / (sent.data_bytes / timing._speed.link_bytes_per_s)

    assert share(machine()) >= 1
    assert share(GPU) < 0.5


def test_processes_share_the_cores() -> None:
    four, eight = (Speed.of(machine(num_cores=4), num_processes=n, precision="fp32") for n in (4, 8))
    assert eight.flops_per_s == four.flops_per_s / 2
    assert eight.latency_s > four.latency_s
    plain = dataclasses.replace(machine(), isa=("sse4_2",))
    assert Speed.of(plain, num_processes=4, precision="fp32").flops_per_s < four.flops_per_s * 4
