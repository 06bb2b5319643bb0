"""The layouts that the gate goes through: every pair of choices that can stand together, in as few layouts as found.

    layouts()          # [Choice(...), ...], always the same ones

A layout is one choice on each axis. A mistake in the engine shows where two mechanisms meet, so that each possible pair
of choices is in at least one layout; `test_gate.py` checks that it is.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass

from shardline.config import OffloadConfig, ParallelConfig, RunConfig

GLOBAL_BATCH = 16
MOST_PROCESSES = 4

AXES: dict[str, tuple] = {
    "tied": (True, False),
    "zero": (0, 1, 2, 3),
    "data": (1, 2, 4),
    "copies": (1, 2),  # of ZeRO's shards: hybrid sharding
    "tensor": (1, 2, 4),
    "sequence_parallel": (False, True),
    "pipeline": ("none", "gpipe", "1f1b", "interleaved", "zero_bubble_v"),
    "accumulation": (1, 2, 4),
    "recompute": ("none", "selective", "full"),
    "offload": (
        "none",
        "optimizer on disk",
        "half the optimizer on disk",
        "optimizer on the host",
        "params on the host",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    tied: bool
    zero: int
    data: int
    copies: int
    tensor: int
    sequence_parallel: bool
    pipeline: str
    accumulation: int
    recompute: str
    offload: str

    @property
    def num_stages(self) -> int:
        return 1 if self.pipeline == "none" else 2

    @property
    def num_processes(self) -> int:
        return self.data * self.tensor * self.num_stages

    @property
    def is_possible(self) -> bool:
        if self.num_processes > MOST_PROCESSES or GLOBAL_BATCH % (self.data * self.accumulation):
            return False
        if self.sequence_parallel and self.tensor == 1:
            return False
        if self.zero and self.data == 1 and self.offload != "params on the host":
            return False  # one data rank has nothing to shard: such a layout is the same as ZeRO-0
        if self.copies > 1 and (self.zero < 2 or self.data != 4):
            return False
        if self.pipeline == "interleaved" and self.accumulation % 2:
            return False
        return self.offload != "params on the host" or self.zero == 3

    @property
    def pairs(self) -> frozenset[tuple]:
        chosen = [(axis, getattr(self, axis)) for axis in AXES]
        return frozenset(itertools.combinations(chosen, 2))

    def __str__(self) -> str:
        words = ["tied" if self.tied else "untied", f"data {self.data}", f"ZeRO-{self.zero}"]
        words += [f"over {self.data // self.copies}"] if self.copies > 1 else []
        words += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        words += ["sequence parallel"] if self.sequence_parallel else []
        words += [f"pipeline 2 {self.pipeline}"] if self.num_stages > 1 else []
        words += [f"accumulation {self.accumulation}"] if self.accumulation > 1 else []
        words += [f"{self.recompute} recompute"] if self.recompute != "none" else []
        words += [self.offload] if self.offload != "none" else []
        return ", ".join(words)

    def config(self, base: RunConfig) -> RunConfig:
        disk = self.offload.endswith("on disk")
        offload = OffloadConfig(
            optimizer="disk" if disk else "cpu" if self.offload == "optimizer on the host" else "none",
            optimizer_fraction=0.5 if self.offload.startswith("half") else 1.0,
            params="cpu" if self.offload == "params on the host" else "none",
        )
        parallel = ParallelConfig(
            tensor=self.tensor,
            pipeline=self.num_stages,
            zero=self.zero,
            zero_group=self.data // self.copies if self.copies > 1 else "auto",
            sequence_parallel=self.sequence_parallel,
            schedule="1f1b" if self.pipeline == "none" else self.pipeline,
            activation_checkpointing=self.recompute,
            offload=offload,
        )
        micro_batch = GLOBAL_BATCH // self.data // self.accumulation
        train = dataclasses.replace(base.train, global_batch=GLOBAL_BATCH, micro_batch=micro_batch)
        return dataclasses.replace(base, train=train, parallel=parallel)


@functools.cache
def possible() -> tuple[Choice, ...]:
    every = (Choice(**dict(zip(AXES, values, strict=True))) for values in itertools.product(*AXES.values()))
    return tuple(choice for choice in every if choice.is_possible)


@functools.cache
def layouts() -> tuple[Choice, ...]:
    """Greedy: the layout with the most new pairs, the one with the fewest processes among equals."""
    pairs = {choice: choice.pairs for choice in possible()}
    missing = frozenset().union(*pairs.values())
    chosen: list[Choice] = []
    while missing:
        best = max(pairs, key=lambda choice: (len(pairs[choice] & missing), -choice.num_processes))
        chosen.append(best)
        missing -= pairs.pop(best)
    return tuple(chosen)
