from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from shardline.config import DataConfig, OffloadConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from training.workers import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    pool = Workers(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real text of very uneven lengths: the standard library's json package, and a few one-line files."""
    folder = tmp_path_factory.mktemp("corpus")
    for path in Path(json.__file__).parent.glob("*.py"):
        shutil.copy(path, folder)
    for index in range(40):
        (folder / f"short{index:02d}.txt").write_text("a line of text\n" * (1 + index % 5))
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def base_config(corpus: Path) -> RunConfig:
    return RunConfig(
        data=DataConfig(source=str(corpus), sequence_length=64, heldout_fraction=0.1),
        train=TrainConfig(steps=20, global_batch=16, micro_batch=4, eval_rows=5),
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=4),
        parallel=ParallelConfig(),
    )


def with_layout(config: RunConfig, *, zero: int | None = None, micro_batch: int, steps: int | None = None) -> RunConfig:
    train = dataclasses.replace(config.train, micro_batch=micro_batch, steps=steps or config.train.steps)
    parallel = config.parallel if zero is None else dataclasses.replace(config.parallel, zero=zero)
    return dataclasses.replace(config, train=train, parallel=parallel)


class At(NamedTuple):
    """A layout for a global batch of 16: four micro-batches a step, so that every schedule has some to order."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    disk: bool = False

    @property
    def num_processes(self) -> int:
        return self.data * self.tensor * self.pipeline

    def of(self, config: RunConfig) -> RunConfig:
        parallel = ParallelConfig(
            data=self.data,
            tensor=self.tensor,
            pipeline=self.pipeline,
            zero=self.zero,  # type: ignore[arg-type]
            sequence_parallel=self.sequence_parallel,
            schedule=self.schedule,  # type: ignore[arg-type]
            offload=OffloadConfig(optimizer="disk" if self.disk else "none"),
        )
        train = dataclasses.replace(config.train, micro_batch=4 // self.data)
        return dataclasses.replace(config, parallel=parallel, train=train)
