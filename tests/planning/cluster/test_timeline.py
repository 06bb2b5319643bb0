"""The picture of a pipeline's step: it is the schedule's, and as long as the predicted step."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest

from planning.cluster.page_reader import read_page
from shardline.hardware.catalogue import device
from shardline.models.presets import preset
from shardline.parallel.schedules import make_schedule
from shardline.planning.cluster.figures import share
from shardline.planning.cluster.job import ClusterLayout, Job, Schedule
from shardline.planning.cluster.shape import ModelShape
from shardline.planning.cluster.time import estimate_time
from shardline.planning.cluster.timeline import Timeline, pipeline_timeline, schedule_words, timeline_figure
from shardline.planning.moments import bubble

BUSY = ("compute", "attention", "recompute", "tensor", "context", "host")
SCHEDULES: list[tuple[Schedule, int]] = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero_bubble_v", 2)]


def job(
    schedule: Schedule = "1f1b", virtual: int = 1, *, pipeline: int = 4, num_micro_batches: int = 16, **more: Any
) -> Job:
    return Job(
        shape=ModelShape.of(preset("llama-3.1-70b"), name="llama-3.1-70b"),
        device=device("h100"),
        num_devices=8 * pipeline,
        sequence_length=4096,
        global_batch=num_micro_batches,
        micro_batch=1,
        layout=ClusterLayout(tensor=8, pipeline=pipeline, schedule=schedule, virtual_stages=virtual),
        **more,
    )


def timeline(one: Job, *, most: int | None = None) -> Timeline:
    drawn = pipeline_timeline(one, estimate_time(one), most=most)
    assert drawn is not None
    return drawn


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_every_rank_does_its_passes_in_the_schedule_s_order_one_at_a_time(schedule: Schedule, virtual: int):
    drawn = timeline(job(schedule, virtual), most=8)
    actions = make_schedule(schedule, num_ranks=4, num_micro_batches=8, stages_per_rank=virtual).actions
    assert [[each[:3] for each in passes] for passes in drawn.passes] == [list(rank) for rank in actions]
    for passes in drawn.passes:
        for one, after in pairwise(passes):
            assert one.start_s < one.end_s <= after.start_s + 1e-9
    ends = {each[:3]: each.end_s for passes in drawn.passes for each in passes}
    starts = {each[:3]: each.start_s for passes in drawn.passes for each in passes}
    last = 4 * virtual - 1
    for kind, stage, index in starts:
        if kind == "F" and stage:
            assert starts[kind, stage, index] >= ends["F", stage - 1, index] - 1e-9
        if kind == "B":
            needed = ("B", stage + 1, index) if stage < last else ("F", stage, index)
            assert starts[kind, stage, index] >= ends[needed] - 1e-9


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_a_whole_step_is_what_a_rank_does_and_the_schedule_s_bubble(schedule: Schedule, virtual: int):
    # Zero bubble's order is made for passes that compute nothing again.
    one = job(schedule, virtual, recompute="none" if schedule == "zero_bubble_v" else "full")
    parts = estimate_time(one).parts
    drawn = timeline(one, most=one.num_micro_batches)
    busy = sum(parts[name] for name in BUSY)
    for passes in drawn.passes:
        assert sum(each.end_s - each.start_s for each in passes) == pytest.approx(busy)
    idle = bubble(schedule, num_ranks=4, num_micro_batches=16, stages_per_rank=virtual)
    assert drawn.length_s == pytest.approx(busy * (1 + idle), rel=0.01)


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_a_whole_step_is_as_long_as_predicted(schedule: Schedule, virtual: int):
    one = job(schedule, virtual, recompute="full")
    parts = estimate_time(one).parts
    once = sum(parts[name] for name in ("pipeline", "data", "optimizer", "offload"))
    length_s = timeline(one, most=one.num_micro_batches).length_s
    assert length_s == pytest.approx(sum(parts.values()) - once, rel=0.03)


def test_backward_takes_what_is_computed_again():
    one = job(recompute="full")
    passes = timeline(one).passes[0]
    takes = {each.kind: each.end_s - each.start_s for each in passes}
    again = estimate_time(one).parts["recompute"] / one.num_micro_batches
    assert takes["B"] == pytest.approx(2 * takes["F"] + again)


def test_a_long_step_is_cut_and_says_so():
    one = job(num_micro_batches=256)
    drawn = timeline(one)
    assert (drawn.drawn, drawn.num_micro_batches) == (12, 256)
    text = read_page(timeline_figure(drawn, bubble=0.0117)).text
    assert "12 of the step's 256 micro-batches are drawn, as many as can be read" in text
    assert f"ranks wait {share(drawn.idle)} of the picture, but 1.2% of the step" in text
    short = read_page(timeline_figure(timeline(job(num_micro_batches=8)), bubble=0.3)).text
    assert "All 8 micro-batches" in short


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_the_picture_has_a_bar_for_every_pass_where_it_runs(schedule: Schedule, virtual: int):
    drawn = timeline(job(schedule, virtual))
    picture = read_page(timeline_figure(drawn, bubble=0.1)).one("svg", "gantt")
    bars = [bar for bar in picture.all("rect") if "idle" not in bar.classes]
    passes = [each for rank in drawn.passes for each in rank]
    for bar, one in zip(bars, passes, strict=True):
        assert one.kind.lower() in bar.classes
        assert bar.percent("x") == pytest.approx(100 * one.start_s / drawn.length_s, abs=0.001)
        assert bar.percent("width") == pytest.approx(100 * (one.end_s - one.start_s) / drawn.length_s, abs=0.001)
        assert ("later" in bar.classes) == (one.stage >= 4)
    assert len({bar.attributes["y"] for bar in bars}) == 4


def test_what_can_t_be_drawn_is_left_out():
    alone = dataclasses.replace(job(), layout=ClusterLayout(tensor=32))
    uneven = job("interleaved", 2, num_micro_batches=6)
    long = job(pipeline=40, num_micro_batches=40)
    for one in (alone, uneven, long):
        assert pipeline_timeline(one, estimate_time(one)) is None


def test_many_ranks_are_drawn_small_and_soon():
    figure = timeline_figure(timeline(job(pipeline=32, num_micro_batches=512)), bubble=0.06)
    assert len(figure) < 400_000
    assert "small" in read_page(figure).one("div", "lanes").classes


def test_schedules_have_names():
    layouts = [ClusterLayout(pipeline=4, schedule=name, virtual_stages=virtual) for name, virtual in SCHEDULES]
    assert [schedule_words(each) for each in layouts] == ["1F1B", "GPipe", "interleaved x2", "zero bubble V"]
    assert schedule_words(ClusterLayout(pipeline=4, virtual_stages=4)) == "interleaved x4"
