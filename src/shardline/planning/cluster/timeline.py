"""A pipeline's step as a picture: which pass runs on which rank and when, simulated from the schedule itself.

    timeline = pipeline_timeline(job, time)      # None where there is no pipeline to draw
    timeline.passes[rank]                        # (Pass(kind, stage, micro_batch, start_s, end_s), ...)
    timeline_figure(timeline, bubble=0.02), timeline_svg(timeline)

The order of passes is that of `parallel.schedules`, which training runs too; how long they take follows from the parts
of the predicted step. All stages count as equal. Of a long step only so many micro-batches are drawn
as can be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardline.parallel.schedules import DURATIONS, Kind, ScheduleName, make_schedule
from shardline.planning.cluster.figures import label, seconds, share, svg, time_ticks
from shardline.planning.moments import pass_ends

if TYPE_CHECKING:
    from shardline.planning.cluster.job import ClusterLayout, Job, Time

__all__ = ["KINDS", "Pass", "Timeline", "pipeline_timeline", "schedule_words", "timeline_figure", "timeline_svg"]

KINDS: dict[Kind, str] = {"F": "forward", "B": "backward", "W": "weights' gradients"}
_NAMES: dict[ScheduleName, str] = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "interleaved", "zero_bubble_v": "zero bubble V",
}  # fmt: skip
# What a rank does for a micro-batch; the rest of a step is done once.
_BUSY = ("compute", "attention", "recompute", "tensor", "context", "host")
_MOST_RANKS = 32
_FEW_RANKS, _FEW_MICRO_BATCHES = 8, 12  # up to so many, numbers can be read on passes
_LANE, _AXIS = 26, 26


class Pass(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Passes by pipeline rank; `drawn` of `num_micro_batches` micro-batches."""

    passes: tuple[tuple[Pass, ...], ...]
    schedule: ScheduleName
    num_micro_batches: int
    drawn: int

    @property
    def length_s(self) -> float:
        return max(each.end_s for rank in self.passes for each in rank)

    @property
    def idle(self) -> float:
        """Share of the picture in which ranks wait."""
        busy = sum(each.end_s - each.start_s for rank in self.passes for each in rank)
        return 1 - busy / (self.length_s * len(self.passes))

    @property
    def kinds(self) -> list[Kind]:
        return [kind for kind in KINDS if any(each.kind == kind for each in self.passes[0])]

    def stages_of(self, rank: int) -> list[int]:
        return sorted({each.stage for each in self.passes[rank]})


def pipeline_timeline(job: Job, time: Time, *, most: int | None = None) -> Timeline | None:
    """Returns the passes of a step with at most `most` micro-batches (None: as many as can be read)."""
    num_ranks, total = job.layout.pipeline, job.num_micro_batches
    if not 1 < num_ranks <= _MOST_RANKS:
        return None
    name, stages = _schedule(job.layout)
    drawn = min(total, most or _legible(name, num_ranks))
    if name == "interleaved" and drawn % num_ranks:  # its groups of micro-batches are as many as there are ranks
        return None
    schedule = make_schedule(name, num_ranks=num_ranks, num_micro_batches=drawn, stages_per_rank=stages)
    takes = _durations(job, time, stages=stages, splits=schedule.split_backward)
    ends = pass_ends(schedule, takes)
    return Timeline(
        passes=tuple(
            tuple(Pass(*action, start_s=ends[action] - takes[action.kind], end_s=ends[action]) for action in actions)
            for actions in schedule.actions
        ),
        schedule=name,
        num_micro_batches=total,
        drawn=drawn,
    )


def schedule_words(layout: ClusterLayout) -> str:
    """Returns what a pipeline's order of passes is called."""
    name, stages = _schedule(layout)
    return f"{_NAMES[name]} x{stages}" if name == "interleaved" else _NAMES[name]


def timeline_figure(timeline: Timeline, *, bubble: float) -> str:
    """Returns heading, legend and picture; `bubble` is the share of the whole step in which ranks wait."""
    ranks, drawn, total = len(timeline.passes), timeline.drawn, timeline.num_micro_batches
    extent = f"All {total} micro-batches of a step; ranks wait {share(timeline.idle)} of the time."
    if drawn < total:
        extent = (
            f"{drawn} of the step's {total} micro-batches are drawn, as many as can be read; so ranks wait "
            f"{share(timeline.idle)} of the picture, but {share(bubble)} of the step."
        )
    few = ranks <= _FEW_RANKS
    keys = "".join(f'<li><span class="swatch {kind.lower()}"></span>{KINDS[kind]}</li>' for kind in timeline.kinds)
    if len(timeline.stages_of(0)) > 1:
        later = "".join(f'<span class="swatch {kind.lower()} later"></span>' for kind in timeline.kinds)
        keys += f"<li>{later}the same on a rank's other stages</li>"
    lanes = "".join(f"<li>{_lane(timeline, rank)}</li>" for rank in range(ranks))
    return (
        f"<h3>What the {ranks} pipeline ranks do: {_NAMES[timeline.schedule]}</h3>"
        f'<p class="soft">{"Numbers are micro-batches. " if few else ""}{extent}</p>'
        f'<ul class="legend">{keys}<li><span class="swatch bubble"></span>waiting (the bubble)</li></ul>'
        f'<div class="lanes{"" if few else " small"}"><ol aria-hidden="true">{lanes}</ol>'
        f"{timeline_svg(timeline)}</div>"
    )


def timeline_svg(timeline: Timeline) -> str:
    """Returns the picture: a lane a rank, seconds from left to right."""
    few = len(timeline.passes) <= _FEW_RANKS
    lane, gap = (_LANE, 6) if few else (12, 3)
    height = len(timeline.passes) * (lane + gap) + _AXIS
    scale = 100 / timeline.length_s
    body = "".join(_axis(timeline, scale, height))
    for rank, passes in enumerate(timeline.passes):
        y = rank * (lane + gap)
        body += f'<rect class="idle" x="0%" y="{y}" width="100%" height="{lane}"/>'
        body += "".join(_pass(each, timeline, scale, y, lane) for each in passes)
    title = f"Passes of {len(timeline.passes)} pipeline ranks"
    desc = (
        f"{len(timeline.passes)} pipeline ranks, one below the other, and {timeline.drawn} micro-batches of the "
        f"{_NAMES[timeline.schedule]} schedule over {seconds(timeline.length_s)}. Ranks wait {timeline.idle:.0%} of it."
    )
    return svg(body, height=height, title=title, desc=desc, css="gantt")


def _lane(timeline: Timeline, rank: int) -> str:
    stages = timeline.stages_of(rank)
    if len(stages) == 1:
        return f"stage {stages[0]}"
    return f"stages {', '.join(map(str, stages))}" if len(stages) == 2 else f"rank {rank}"


def _axis(timeline: Timeline, scale: float, height: int) -> Iterator[str]:
    for tick, text in time_ticks(timeline.length_s):
        x = tick * scale
        side = "start" if tick == 0 else "end" if x > 96 else "middle"
        yield f'<line class="grid" x1="{x:.3f}%" x2="{x:.3f}%" y1="0" y2="{height - _AXIS + 4}"/>'
        yield f'<text class="tick {side}" x="{x:.3f}%" y="{height - 7}">{text}</text>'


def _pass(each: Pass, timeline: Timeline, scale: float, y: int, lane: int) -> str:
    x, width = each.start_s * scale, (each.end_s - each.start_s) * scale
    later = " later" if each.stage // len(timeline.passes) % 2 else ""  # a rank's other stage
    place = f'class="{each.kind.lower()}{later}" x="{x:.3f}%" y="{y}" width="{width:.3f}%" height="{lane}"'
    if lane < _LANE:
        return f"<rect {place}/>"
    number = str(each.micro_batch + 1)
    what = f"{KINDS[each.kind]} of micro-batch {number}, stage {each.stage}"
    when = f"{seconds(each.start_s)} to {seconds(each.end_s)}"
    css = each.kind.lower() + later
    shown = label([number], x=x + width / 2, width=width, y=y + 18, css=css, wide=820, narrow=250)
    return f"<rect {place}><title>{what}: {when}</title></rect>{shown}"


def _legible(name: ScheduleName, num_ranks: int) -> int:
    if name == "zero_bubble_v":
        return max(8, num_ranks + 4)
    if name == "interleaved":
        return -(-_FEW_MICRO_BATCHES // num_ranks) * num_ranks
    return max(_FEW_MICRO_BATCHES, min(2 * num_ranks, 32), num_ranks + 4)


def _schedule(layout: ClusterLayout) -> tuple[ScheduleName, int]:
    """Returns (name, stages a rank)."""
    if layout.schedule == "zero_bubble_v":
        return layout.schedule, 2
    if layout.virtual_stages > 1:
        return "interleaved", layout.virtual_stages
    return ("1f1b" if layout.schedule == "interleaved" else layout.schedule), 1


def _durations(job: Job, time: Time, *, stages: int, splits: bool) -> dict[Kind, float]:
    """Returns the seconds of one pass: what a rank does, by the proportions that schedules are made with. Activations
    are computed again at the start of backward."""
    one = 1 / (job.num_micro_batches * stages)
    again = time.parts.get("recompute", 0.0) * one
    unit = (sum(time.parts.get(name, 0.0) for name in _BUSY) * one - again) / sum(DURATIONS.values())
    takes: dict[Kind, float] = {kind: unit * share for kind, share in DURATIONS.items()}
    if not splits:
        takes["B"] += takes["W"]
    takes["B"] += again
    return takes
