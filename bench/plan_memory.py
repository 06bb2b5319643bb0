"""Predicted against measured memory and step time: trains a few steps in each layout and compares.

    python bench/plan_memory.py                       # all cases, about ten minutes on two cores
    python bench/plan_memory.py --only 34m --json out.json

A case is one model, batch and layout. Its processes are started as `shardline train` starts them and load what it
loads; they build the model, run three steps and one evaluation on random tokens, and report the kernel's high-water
mark of their own memory (VmHWM). The prediction is what `shardline plan` would say. A step's time is the median of all
but the first; --steps 6 for one worth reading, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardline.config import RunConfig, load_config
from shardline.models.config import DecoderConfig, RopeConfig
from shardline.models.presets import preset

if TYPE_CHECKING:
    from shardline.hardware.probe import Machine

GIB = 1 << 30


def _small(name: str) -> DecoderConfig:
    """The preset's architecture, about the size of `34m`."""
    model = preset(name)
    return dataclasses.replace(
        model,
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1536,
        expert_size=512 if model.num_experts else 0,
        num_layers=8,
        num_heads=6,
        num_kv_heads=6 if model.num_kv_heads == model.num_heads else 2,
        head_dim=64,
        sliding_windows=model.sliding_windows[:8],
    )


MODELS: dict[str, DecoderConfig] = {
    "tiny": preset("tiny"),
    "34m": DecoderConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_layers=9,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        rope=RopeConfig(),
        tie_word_embeddings=False,
    ),
    "22m": DecoderConfig(
        vocab_size=4096,
        hidden_size=384,
        intermediate_size=1024,
        num_layers=12,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        rope=RopeConfig(),
        tie_word_embeddings=False,
    ),
    "smollm2-135m": preset("smollm2-135m"),
    "qwen3-wide-vocabulary": DecoderConfig(
        family="qwen3",
        vocab_size=100_000,
        hidden_size=256,
        intermediate_size=768,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        qk_norm=True,
        tie_word_embeddings=True,
    ),
    **{name: _small(name) for name in ("gemma-2-2b", "bloom-560m", "gpt2", "mixtral-8x7b")},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    processes: int
    zero: int
    micro_batch: int = 2
    accumulation: int = 1
    sequence_length: int = 512
    precision: str = "fp32"
    parallel: dict[str, Any] = field(default_factory=dict)  # more of the config's `parallel`

    @property
    def name(self) -> str:
        more = "".join(
            f" {key.removeprefix('offload.')}" if value is True else f" {key}={value}"
            for key, value in self.parallel.items()
        )
        return (
            f"{self.model} {self.precision} n={self.processes} zero={self.zero}{more} "
            f"b={self.micro_batch}x{self.accumulation} T={self.sequence_length}"
        )

    @property
    def data_ranks(self) -> int:
        return self.processes // (self.parallel.get("tensor", 1) * self.parallel.get("pipeline", 1))

    def config(self) -> RunConfig:
        words = {
            "parallel.zero": self.zero,
            "train.micro_batch": self.micro_batch,
            "train.global_batch": self.micro_batch * self.accumulation * self.data_ranks,
            "train.precision": self.precision,
            "data.sequence_length": self.sequence_length,
            "train.eval_rows": self.micro_batch * self.data_ranks,
            "run": tempfile.gettempdir() + "/plan-memory",
            **{f"parallel.{key}": value for key, value in self.parallel.items()},
        }
        return load_config(
            None, [f"--{name}={str(value).lower() if value is True else value}" for name, value in words.items()]
        )


CASES = [
    Case(model="tiny", processes=1, zero=0),
    Case(model="tiny", processes=2, zero=0, micro_batch=8),
    Case(model="tiny", processes=2, zero=2),
    *(Case(model="34m", processes=2, zero=zero) for zero in (0, 1, 2, 3)),
    Case(model="34m", processes=1, zero=0),
    Case(model="34m", processes=1, zero=0, micro_batch=1, accumulation=4, sequence_length=1024),
    Case(model="34m", processes=2, zero=0, micro_batch=8),
    Case(model="34m", processes=2, zero=3, micro_batch=4, accumulation=2),
    Case(model="34m", processes=4, zero=1, micro_batch=1),
    Case(model="34m", processes=4, zero=3, micro_batch=1),
    Case(model="smollm2-135m", processes=2, zero=0, micro_batch=1),
    Case(model="smollm2-135m", processes=2, zero=2, micro_batch=1),
    Case(model="smollm2-135m", processes=2, zero=3, micro_batch=1, sequence_length=256),
    Case(model="qwen3-wide-vocabulary", processes=2, zero=1, micro_batch=4),
    Case(model="qwen3-wide-vocabulary", processes=2, zero=3, micro_batch=4),
    Case(model="smollm2-135m", processes=2, zero=2, micro_batch=1, accumulation=2, sequence_length=256),
    Case(model="34m", processes=2, zero=0, micro_batch=1, accumulation=2),
    Case(model="smollm2-135m", processes=2, zero=0, micro_batch=1, accumulation=2, sequence_length=256),
    Case(model="34m", processes=1, zero=0, precision="bf16"),
    Case(model="34m", processes=2, zero=2, precision="bf16"),
    Case(model="gemma-2-2b", processes=1, zero=0),
    Case(model="gemma-2-2b", processes=1, zero=0, precision="bf16"),
    Case(model="bloom-560m", processes=1, zero=0),
    Case(model="gpt2", processes=1, zero=0),
    Case(model="mixtral-8x7b", processes=1, zero=0),
    Case(model="mixtral-8x7b", processes=2, zero=3),
    Case(model="22m", processes=2, zero=0, parallel={"tensor": 2}, micro_batch=4),
    Case(model="22m", processes=2, zero=0, parallel={"tensor": 2, "sequence_parallel": True}, micro_batch=4),
    *(
        Case(model="22m", processes=2, zero=0, parallel={"pipeline": 2, "schedule": schedule}, accumulation=4)
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble_v")
    ),
    Case(model="22m", processes=4, zero=3, parallel={"pipeline": 2}, accumulation=4),
    Case(model="22m", processes=4, zero=1, parallel={"pipeline": 2}, accumulation=4),
    Case(model="22m", processes=4, zero=0, parallel={"tensor": 2, "pipeline": 2}, accumulation=4),
    *(
        Case(model="22m", processes=2, zero=3, parallel={"activation_checkpointing": kind}, micro_batch=4)
        for kind in ("none", "selective", "full")
    ),
    Case(model="22m", processes=1, zero=0, parallel={"activation_checkpointing": "full"}, micro_batch=8),
    Case(model="34m", processes=1, zero=0, parallel={"offload.optimizer": "disk"}),
    Case(model="34m", processes=4, zero=3, parallel={"zero_group": 2}, micro_batch=1),
]


class RandomRows:
    """Rows as `text.rows.PackedDataset` gives them, two documents in each, without a file."""

    num_rows = 1 << 20

    def __init__(self, vocab_size: int, sequence_length: int) -> None:
        self._vocab_size, self._length = vocab_size, sequence_length

    def batch(self, rows: Any) -> Any:
        from shardline.text.rows import Batch

        generator = np.random.default_rng(int(rows[0]))
        tokens_BT = generator.integers(self._vocab_size, size=(len(rows), self._length))
        half = self._length // 2
        documents_T = (np.arange(self._length) >= half).astype(np.int32)
        return Batch(
            tokens_BT=tokens_BT,
            targets_BT=np.roll(tokens_BT, -1, axis=1),
            documents_BT=np.tile(documents_T, (len(rows), 1)),
            positions_BT=np.tile(np.arange(self._length) % half, (len(rows), 1)),
        )


def work(case: Case, steps: int) -> None:
    """One process of a case: trains, and prints its memory as JSON."""
    from shardline.parallel.world import start_world
    from shardline.text.tokenizer import byte_tokenizer

    importlib.import_module("shardline.training.run")  # all that a training process imports
    tokenizer = byte_tokenizer()  # not used here, but `shardline train` holds one
    assert tokenizer.vocab_size <= MODELS[case.model].vocab_size
    with start_world() as world:
        seen = train(case, steps, world)
        gc.collect()  # sharded modules hold the process group; one that outlives it now and then aborts at exit
        print(json.dumps({"rank": world.rank, **seen}), flush=True)


def train(case: Case, steps: int, world: Any) -> dict[str, int]:
    """Returns this process's memory at each point, in bytes."""
    from shardline.hardware.memory import peak_rss_bytes, rss_bytes
    from shardline.training.trainer import Trainer

    model = MODELS[case.model]
    rows: Any = RandomRows(model.vocab_size, case.sequence_length)
    seen = {"start": rss_bytes()}
    trainer = Trainer(config=case.config(), world=world, architecture=model, rows=rows, heldout=rows)
    seen["laid out"] = peak_rss_bytes()
    for step in range(steps):
        started = time.perf_counter_ns()
        trainer.train_step()
        seen[f"step {step + 1} ns"] = time.perf_counter_ns() - started
        seen[f"step {step + 1}"] = peak_rss_bytes()
    seen["resting"] = rss_bytes()
    trainer.evaluate()
    return {**seen, "peak": peak_rss_bytes()}


def measure(case: Case, steps: int) -> dict[str, int]:
    """Returns the fattest process's memory at each point, in bytes."""
    threads = max(1, (os.cpu_count() or 1) // case.processes)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(case.processes),
    }
    command = [sys.executable, __file__, "--work", json.dumps(vars(case)), "--steps", str(steps)]
    ranks = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE
        )
        for rank in range(case.processes)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if not all(outputs):
        raise SystemExit(f"{case.name} failed, exit codes {[rank.returncode for rank in ranks]}")
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    return max(results, key=lambda result: result["peak"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(Case(**json.loads(args.work)), args.steps)
        return
    from shardline.hardware.probe import probe
    from shardline.planning.memory import predict

    results, machine = [], probe()
    print(
        "| case | predicted GiB | measured GiB | error | phase | predicted s | measured s | ratio |\n"
        "|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    for case in CASES:
        if args.only not in case.name:
            continue
        seen = measure(case, args.steps)
        prediction = predict(MODELS[case.model], case.config(), data_ranks=case.data_ranks)
        error = prediction.total_bytes / seen["peak"] - 1
        step_s = (
            statistics.median(seen[f"step {step + 1} ns"] for step in range(min(1, args.steps - 1), args.steps)) / 1e9
        )
        expected_s = predict_step_s(case, machine)
        print(
            f"| {case.name} | {prediction.total_bytes / GIB:.2f} | {seen['peak'] / GIB:.2f} | {100 * error:+.1f} % "
            f"| {prediction.phase} | {expected_s:.2f} | {step_s:.2f} | {expected_s / step_s:.2f} |",
            flush=True,
        )
        times = {"predicted": expected_s, "measured": step_s}
        results.append(
            {"case": case.name, "predicted": prediction.to_json(), "measured": seen, "error": error, "step_s": times}
        )
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(results, file, indent=1)
    errors = sorted(abs(result["error"]) for result in results)
    if errors:
        within = sum(error <= 0.1 for error in errors)
        print(
            f"\n{within} of {len(errors)} within 10 %; worst {100 * errors[-1]:.1f} %, "
            f"median {100 * errors[len(errors) // 2]:.1f} %"
        )
        print_times(results)


def predict_step_s(case: Case, machine: Machine) -> float:
    """Returns the seconds that `shardline plan` says a step takes here."""
    from shardline.parallel.grid import Layout
    from shardline.planning.layouts import Option
    from shardline.planning.timing import Speed, Timing

    run = case.config()
    layout = Layout.resolve(run.parallel, world_size=case.processes)
    speed = Speed.of(machine, num_processes=case.processes, precision=case.precision)
    option = Option(layout=layout, micro_batch=case.micro_batch, recompute=run.parallel.activation_checkpointing)
    return Timing(MODELS[case.model], run, speed).step(option).total_s


def print_times(results: list[dict[str, Any]]) -> None:
    """How far the seconds are off, and whether their order is right, which is what they are for."""
    pairs = [(each["step_s"]["predicted"], each["step_s"]["measured"]) for each in results]
    ratios = sorted(predicted / measured for predicted, measured in pairs)
    both = list(itertools.combinations(pairs, 2))
    agree = sum((a - c) * (b - d) > 0 for (a, b), (c, d) in both) - sum(
        (a - c) * (b - d) < 0 for (a, b), (c, d) in both
    )
    print(
        f"steps: predicted over measured {ratios[0]:.2f} to {ratios[-1]:.2f}, median {ratios[len(ratios) // 2]:.2f}; "
        f"Kendall's tau of their order {agree / max(1, len(both)):.2f}"
    )


if __name__ == "__main__":
    main()
