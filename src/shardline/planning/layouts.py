"""Which layouts are possible for a model, a run and a number of processes, and the nearest to one that is not.

    layout = require_layout(model, run, num_processes=8)     # InfeasibleError: the equation, and the nearest layout
    for option in options(model, run, num_processes=8): ...  # what the search looks at

An option is possible when heads, kv heads, words and inner features can be dealt out to the tensor ranks, every
pipeline stage gets a layer, and rows divide over data ranks and micro-batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, cast

from shardline.config import InfeasibleError, RunConfig
from shardline.parallel.division import check_tensor_parallel
from shardline.parallel.grid import Layout

if TYPE_CHECKING:
    from shardline.models.config import DecoderConfig
    from shardline.parallel.recompute import Recompute
    from shardline.parallel.schedules import ScheduleName

__all__ = ["Option", "Zero", "check_layout", "configured_option", "options", "require_layout", "with_option"]

Zero = Literal[0, 1, 2, 3]
_STAGES: tuple[Zero, ...] = (0, 1, 2, 3)
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
# Smaller micro-batches than these many are looked at only over the axes that the config asks for.
_SIZES = 4


@dataclass(frozen=True, kw_only=True)
class Option:
    """A layout with what else decides its memory and speed."""

    layout: Layout
    micro_batch: int
    recompute: Recompute

    @property
    def axes(self) -> tuple[int, int, int]:
        return self.layout.data, self.layout.tensor, self.layout.pipeline


def check_layout(config: RunConfig, architecture: DecoderConfig, layout: Layout) -> None:
    """Raises `InfeasibleError` with the equation that fails where a layout does not suit the model or the batch."""
    if layout.tensor > 1:
        sequence_length = config.data.sequence_length if layout.sequence_parallel else None
        check_tensor_parallel(architecture, size=layout.tensor, sequence_length=sequence_length)
    layout.check_depth(architecture.num_layers)
    layout.accumulation(config.train)


def require_layout(model: DecoderConfig, run: RunConfig, *, num_processes: int) -> Layout:
    """Returns the layout that `run` asks for; raises `InfeasibleError` that ends with the nearest one that works."""
    try:
        layout = Layout.resolve(run.parallel, world_size=num_processes)
        check_layout(run, model, layout)
    except InfeasibleError as error:
        close = _nearest(model, run, num_processes)
        lines = [str(error)]
        if close is not None:
            processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
            lines += [f"The nearest layout that works with {processes}:", *_yaml(run, close)]
        raise InfeasibleError("\n".join(lines)) from None
    return layout


def configured_option(run: RunConfig, layout: Layout) -> Option:
    return Option(layout=layout, micro_batch=run.train.micro_batch, recompute=run.parallel.activation_checkpointing)


def options(model: DecoderConfig, run: RunConfig, *, num_processes: int) -> Iterator[Option]:
    """Yields every option once: all ways to share out the processes, ZeRO stages, micro-batches and recomputation.

    Over the config's own axes every micro-batch that divides is there; elsewhere the config's and a few smaller ones.
    With tensor ranks the sequence is cut where it divides: as much is sent, and less kept.
    """
    asked = Layout.resolve(run.parallel, world_size=num_processes)
    own = asked.data, asked.tensor, asked.pipeline
    for layout in _grids(model, run, num_processes):
        rows = run.train.global_batch // layout.data
        sizes = [size for size in _divisors(rows) if size <= run.train.micro_batch][-_SIZES:]
        if (layout.data, layout.tensor, layout.pipeline) == own:
            layout = dataclasses.replace(asked, zero=0, zero_group=None, micro_batches=None)
            sizes = _divisors(rows)
        for size in sizes:
            if not _accumulates(run, layout, size):
                continue
            for zero in _stages(run, layout):
                group = asked.zero_group if zero >= 2 and layout.data == asked.data else None
                for recompute in _RECOMPUTE:
                    yield Option(
                        layout=dataclasses.replace(layout, zero=zero, zero_group=group),
                        micro_batch=size,
                        recompute=recompute,
                    )


def with_option(run: RunConfig, option: Option) -> RunConfig:
    """Returns the config that asks for an option."""
    layout = option.layout
    return dataclasses.replace(
        run,
        train=dataclasses.replace(run.train, micro_batch=option.micro_batch),
        parallel=dataclasses.replace(
            run.parallel,
            data=layout.data,
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            zero=cast(Zero, layout.zero),
            zero_group=layout.zero_group or "auto",
            sequence_parallel=layout.sequence_parallel,
            schedule=layout.schedule,
            virtual_stages=layout.virtual_stages if layout.virtual_stages > 2 else "auto",
            micro_batches="auto",
            activation_checkpointing=option.recompute,
        ),
    )


def _grids(model: DecoderConfig, run: RunConfig, num_processes: int) -> Iterator[Layout]:
    """Every way to share out the processes that suits the model, with the config's schedule."""
    parallel = run.parallel
    for tensor in _divisors(num_processes):
        if not _tensor_fits(model, tensor, None):
            continue
        cuts_sequence = tensor > 1 and run.data.sequence_length % tensor == 0
        for pipeline in _divisors(num_processes // tensor):
            asked = dataclasses.replace(
                parallel, data="auto", tensor=tensor, pipeline=pipeline, zero=0, zero_group="auto", micro_batches="auto"
            )
            layout = dataclasses.replace(
                Layout.resolve(asked, world_size=num_processes), sequence_parallel=cuts_sequence
            )
            if layout.num_stages <= model.num_layers and run.train.global_batch % layout.data == 0:
                yield layout


def _stages(run: RunConfig, layout: Layout) -> tuple[Zero, ...]:
    if run.parallel.offload.params == "cpu":
        return (3,)
    return _STAGES if layout.data > 1 else (0,)


def _accumulates(run: RunConfig, layout: Layout, micro_batch: int) -> bool:
    rows = layout.data * micro_batch
    if run.train.global_batch % rows:
        return False
    grouped = layout.pipeline > 1 and layout.schedule == "interleaved"
    return not grouped or run.train.global_batch // rows % layout.pipeline == 0


@lru_cache(maxsize=1024)
def _tensor_fits(model: DecoderConfig, size: int, sequence_length: int | None) -> bool:
    try:
        check_tensor_parallel(model, size=size, sequence_length=sequence_length)
    except InfeasibleError:
        return False
    return True


def _nearest(model: DecoderConfig, run: RunConfig, num_processes: int) -> RunConfig | None:
    """The config with the fewest and smallest changes to its layout that works, its batch kept if at all possible."""
    tries = sorted(_changes(model, run, num_processes), key=lambda each: each[0])
    for _, changed in tries:
        try:
            check_layout(changed, model, Layout.resolve(changed.parallel, world_size=num_processes))
        except InfeasibleError:
            continue
        return changed
    return None


def _changes(model: DecoderConfig, run: RunConfig, num_processes: int) -> Iterator[tuple[float, RunConfig]]:
    """(how far from what was asked, config), axes by doublings."""
    asked = run.parallel
    for tensor in _divisors(num_processes):
        if not _tensor_fits(model, tensor, None):
            continue
        for pipeline in _divisors(num_processes // tensor):
            data = num_processes // tensor // pipeline
            moved = abs(math.log2(tensor / asked.tensor)) + abs(math.log2(pipeline / asked.pipeline))
            for batch_cost, train in _batches(run, data):
                for other_cost, fields in _fields(asked.schedule):
                    parallel = dataclasses.replace(
                        asked, data=data, tensor=tensor, pipeline=pipeline, micro_batches="auto", **fields
                    )
                    changed = dataclasses.replace(run, train=train, parallel=parallel)
                    yield moved + batch_cost + other_cost, changed


def _batches(run: RunConfig, data: int) -> Iterable[tuple[float, Any]]:
    train = run.train
    rows, found = train.global_batch // data, []
    if train.global_batch % data == 0:
        for size in _divisors(rows):
            found.append((abs(math.log2(size / train.micro_batch)) / 2, dataclasses.replace(train, micro_batch=size)))
    per_step = data * train.micro_batch
    rounded = max(1, round(train.global_batch / per_step)) * per_step
    found.append((4.0, dataclasses.replace(train, global_batch=rounded)))
    return found


def _fields(schedule: ScheduleName) -> list[tuple[float, dict[str, Any]]]:
    """What else may have to change, with its price."""
    plain = {"schedule": "1f1b", "virtual_stages": "auto"}
    return [
        (0.0, {}),
        (0.25, {"zero_group": "auto"}),
        (0.25, {"sequence_parallel": False}),
        (0.4, {"virtual_stages": "auto"}),
        (0.5 if schedule != "1f1b" else 0.4, plain),
        (0.9, {**plain, "zero_group": "auto", "sequence_parallel": False}),
    ]


def _yaml(run: RunConfig, close: RunConfig) -> list[str]:
    """The layout as lines of a config, and the batch where it changed."""
    parallel = close.parallel
    lines = ["parallel:", *(f"  {name}: {getattr(parallel, name)}" for name in ("data", "tensor", "pipeline", "zero"))]
    if parallel.zero_group != "auto" or run.parallel.zero_group != "auto":
        lines.append(f"  zero_group: {parallel.zero_group}")
    if parallel.tensor > 1 or run.parallel.sequence_parallel:
        lines.append(f"  sequence_parallel: {str(parallel.sequence_parallel).lower()}")
    if parallel.pipeline > 1:
        lines.append(f"  schedule: {parallel.schedule}")
    if parallel.virtual_stages != run.parallel.virtual_stages or parallel.virtual_stages != "auto":
        lines.append(f"  virtual_stages: {parallel.virtual_stages}")
    if parallel.micro_batches != run.parallel.micro_batches:
        lines.append("  micro_batches: auto")
    names = [name for name in ("global_batch", "micro_batch") if getattr(close.train, name) != getattr(run.train, name)]
    return lines + (["train:", *(f"  {name}: {getattr(close.train, name)}" for name in names)] if names else [])


@lru_cache(maxsize=4096)
def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]
