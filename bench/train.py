"""Speed and memory of a training step, against plain PyTorch loops of the same model that run in alternation.

    python bench/train.py                              # every case; about eight minutes on two quiet cores
    python bench/train.py --case fsdp2 --rounds 6      # one case (see --list)
    python bench/train.py --quick                      # tiny model, seconds: does the benchmark work?
    python bench/train.py --json out.json --table docs/benchmarks.md
    python bench/train.py --case deepspeed2 --deepspeed-python ENV/bin/python     # an environment of its own

A case is a rival and the layout of the engine that does the same, on the same processes, threads, rows and initial
weights. Both sides' processes are alive at once and take turns, step by step; while one works the other waits without
using the processor. A ratio compares neighbouring steps only, so that what else the machine does meets both alike. Peak
memory is the kernel's high-water mark (VmHWM) of the fattest process of each side.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1 << 20
ANSWERS = 1  # file descriptor of a process's answers
SIZES = {  # layers, hidden, heads, kv heads, ffn, vocabulary, sequence, global batch
    "full": (12, 384, 6, 2, 1024, 4096, 512, 8),
    "short": (4, 384, 6, 2, 1024, 4096, 512, 8),  # a third of the layers, for a machine that others use too
    "tiny": (4, 64, 4, 2, 128, 256, 32, 8),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """rival   a key of `train_plain.KINDS`; ours: the engine's overrides for the same layout."""

    rival: str
    processes: int
    ours: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    extra: bool = False  # only when asked for by name
    python: str | None = None  # the rival's interpreter, where it has an environment of its own
    cores: int = 2

    @property
    def threads(self) -> int:
        return max(1, self.cores // self.processes)


_PIPELINE = {"parallel.pipeline": 2}
CASES = {
    "eager": Case(rival="eager", processes=1),
    "compiled": Case(rival="compiled", processes=1, ours={"train.compile": True}),
    "ddp": Case(rival="ddp", processes=2),
    "fsdp2_keep": Case(rival="fsdp2_keep", processes=2, ours={"parallel.zero": 2}),
    "fsdp2": Case(rival="fsdp2", processes=2, ours={"parallel.zero": 3}),
    "dtensor": Case(rival="dtensor", processes=2, ours={"parallel.tensor": 2}),
    "dtensor_sequence": Case(
        rival="dtensor_sequence", processes=2, ours={"parallel.tensor": 2, "parallel.sequence_parallel": True}
    ),
    "pipelining": Case(rival="pipelining", processes=2, ours=_PIPELINE, micro_batches=4),
    "pipelining_zbv": Case(
        rival="pipelining_zbv",
        processes=2,
        ours={**_PIPELINE, "parallel.schedule": "zero_bubble_v"},
        micro_batches=4,
    ),
    "deepspeed1": Case(rival="deepspeed1", processes=2, ours={"parallel.zero": 1}, extra=True),
    "deepspeed2": Case(rival="deepspeed2", processes=2, ours={"parallel.zero": 2}, extra=True),
    "deepspeed3": Case(rival="deepspeed3", processes=2, ours={"parallel.zero": 3}, extra=True),
    "pipelining_fsdp2_keep": Case(
        rival="pipelining_fsdp2",
        processes=4,
        ours={**_PIPELINE, "parallel.zero": 2},
        micro_batches=4,
        extra=True,
    ),
    "pipelining_fsdp2": Case(
        rival="pipelining_fsdp2",
        processes=4,
        ours={**_PIPELINE, "parallel.zero": 3},
        micro_batches=4,
        extra=True,
    ),
}


class Side:
    """The processes of one side of a case, which wait for a word on their standard input."""

    def __init__(self, case: Case, *, name: str, size: str, log: Any) -> None:
        self.name = name
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        job = json.dumps({"case": asdict(case), "side": name, "size": size})
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(case.threads),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": str(case.processes),
            "PYTHONUNBUFFERED": "1",
        }
        if name == "rival" and case.python:  # the numbers that describe the model come from the package
            environment["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent / "src")
        python = case.python if name == "rival" and case.python else sys.executable
        self._ranks = [
            subprocess.Popen(
                [python, __file__, "--work", job],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            for rank in range(case.processes)
        ]

    def ask(self, word: str) -> list[dict[str, Any]]:
        """Sends every process a word and returns their answers."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(word + "\n")
            rank.stdin.flush()
        answers = []
        for rank in self._ranks:
            assert rank.stdout is not None
            if not (line := rank.stdout.readline()):
                raise SystemExit(f"a process of {self.name} ended early (exit code {rank.wait()}); see the log")
            answers.append(json.loads(line))
        return answers

    def step(self) -> dict[str, float]:
        """One step: wall seconds of the slowest process, processor seconds of all."""
        answers = self.ask("step")
        return {
            "wall_s": max(each["wall_s"] for each in answers),
            "cpu_s": sum(each["cpu_s"] for each in answers),
            "loss": answers[0]["loss"],
        }

    def close(self) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(30)
            except subprocess.TimeoutExpired:
                rank.kill()


def compare(name: str, *, size: str, rounds: int, cores: int, python: str | None, log: Any) -> dict[str, Any]:
    """Runs one case and returns its figures."""
    case = replace(CASES[name], cores=cores, python=python if name.startswith("deepspeed") else None)
    sides = {side: Side(case, name=side, size=size, log=log) for side in ("rival", "ours")}
    try:
        for side in sides.values():
            side.ask("ready")
        first = {side: each.step() for side, each in sides.items()}
        for side in sides.values():
            side.step()  # allocator and libraries settle
        steps: dict[str, list[dict[str, float]]] = {"rival": [], "ours": []}
        for number in range(rounds):
            order = ("rival", "ours") if number % 2 == 0 else ("ours", "rival")
            for side in order:
                steps[side].append(sides[side].step())
        memory = {side: max(each["peak"] for each in sides[side].ask("memory")) for side in sides}
        idle = {side: max(each["start"] for each in sides[side].ask("memory")) for side in sides}
        facts = sides["ours"].ask("facts")
        own = max(facts, key=lambda each: each["own"]["share"])["own"]
        peak = sum(each["peak_flops"] for each in facts)
    finally:
        for side in sides.values():
            side.close()
    difference = max(
        abs(a["loss"] - b["loss"]) / abs(a["loss"])
        for a, b in zip([first["rival"], *steps["rival"]], [first["ours"], *steps["ours"]], strict=True)
    )
    if difference > 1e-4:
        raise SystemExit(f"{name}: the two sides' losses differ by {difference:.1e}; they don't train the same model")
    result: dict[str, Any] = {
        "case": name,
        "processes": case.processes,
        "threads": case.threads,
        "layout": case.ours,
        "loss_difference": difference,
        "first_step_s": {side: first[side]["wall_s"] for side in sides},
        "memory_bytes": memory,
        "memory_before_model_bytes": idle,
        "own": own,
        "peak_flops": peak,
        "flops_per_token": facts[0]["flops_per_token"],
        "steps": steps,
    }
    tokens = SIZES[size][6] * SIZES[size][7]
    for clock in ("wall_s", "cpu_s"):
        ratios = [a[clock] / b[clock] for a, b in zip(steps["rival"], steps["ours"], strict=True)]
        result[f"ratio_{clock}"] = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        for side in sides:
            result[f"{side}_{clock}"] = statistics.median(each[clock] for each in steps[side])
    result["tokens_per_s"] = {side: tokens / result[f"{side}_wall_s"] for side in sides}
    best_s = min(each["wall_s"] for each in steps["ours"])
    result["mfu"] = facts[0]["flops_per_token"] * tokens / result["ours_wall_s"] / peak
    result["mfu_best"] = facts[0]["flops_per_token"] * tokens / best_s / peak
    return result


def work(job: dict[str, Any]) -> None:
    """One process of one side: answers each word on standard input with a line of JSON."""
    import torch

    from shardline.hardware.memory import peak_rss_bytes, rss_bytes
    from shardline.hardware.peak import measure_matmul_flops
    from shardline.models.config import DecoderConfig, RopeConfig
    from shardline.planning.flops import training_flops_per_token

    global ANSWERS
    ANSWERS = os.dup(1)
    os.dup2(2, 1)  # libraries that print do not answer
    case = Case(**job["case"])
    layers, hidden, heads, kv_heads, ffn, vocabulary, length, batch = SIZES[job["size"]]
    model = DecoderConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=length,
        rope=RopeConfig(),
        tie_word_embeddings=False,
    )
    torch.set_num_threads(case.threads)
    rows = np.random.default_rng(0).integers(vocabulary, size=(8 * batch, length + 1))
    answer = {"start": 0}

    def serve(step: Any, trainer: Any) -> None:
        for line in sys.stdin:
            word = line.strip()
            if word == "step":
                wall, cpu = time.perf_counter(), time.process_time()
                loss = step()
                tell({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "loss": loss})
            elif word == "memory":
                tell({"peak": peak_rss_bytes(), "start": answer["start"]})
            elif word == "facts":
                tell(
                    {
                        "own": own_time(trainer),
                        "peak_flops": measure_matmul_flops(seconds=1.0),
                        "flops_per_token": training_flops_per_token(model, sequence_length=length),
                    }
                )
            else:
                tell({"ready": True})

    if job["side"] == "ours":
        from train_own_time import own_time

        from shardline.parallel.world import start_world

        with start_world() as world:
            answer["start"] = rss_bytes()
            trainer = make_trainer(case, model, rows, world, length=length, batch=batch)
            serve(lambda: trainer.train_step().loss, trainer)
            del trainer
        return
    from train_plain import PlainSide

    if case.processes > 1:
        torch.distributed.init_process_group("gloo")
    answer["start"] = rss_bytes()
    weights = dict(make_decoder(model).named_parameters())
    side = PlainSide(case.rival, model, rows, weights=weights, batch=batch, micro_batches=case.micro_batches)
    del weights
    side._weights = {}
    serve(side.step, None)
    sys.stdout.flush()
    os._exit(0)  # no farewells between processes: some of torch's schedules wait for ever in them


def tell(answer: dict[str, Any]) -> None:
    os.write(ANSWERS, json.dumps(answer).encode() + b"\n")


def make_decoder(model: Any) -> Any:
    from shardline.models.decoder import Decoder

    decoder = Decoder(model)
    decoder.initialize(seed=0)
    return decoder


class Rows:
    """Rows as `text.rows.PackedDataset` gives them, each one document; row n of a step is row n of the array."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows, self.num_rows = rows, len(rows)

    def batch(self, rows: Any) -> Any:
        from shardline.text.rows import Batch

        taken = self._rows[np.asarray(rows)]
        shape = (len(taken), taken.shape[1] - 1)
        return Batch(
            tokens_BT=taken[:, :-1].copy(),
            targets_BT=taken[:, 1:].copy(),
            documents_BT=np.zeros(shape, dtype=np.int32),
            positions_BT=np.broadcast_to(np.arange(shape[1]), shape).copy(),
        )


def make_trainer(case: Case, model: Any, rows: np.ndarray, world: Any, *, length: int, batch: int) -> Any:
    """The engine's side. Its sampler permutes rows; the array is permuted so that both sides read the same."""
    from train_plain import BETAS, CLIP, DECAY, LR

    from shardline.config import load_config
    from shardline.text.sampler import sample_rows
    from shardline.training.trainer import Trainer

    data_ranks = case.processes // (case.ours.get("parallel.tensor", 1) * case.ours.get("parallel.pipeline", 1))
    words = {
        "train.global_batch": batch,
        "train.micro_batch": batch // data_ranks // case.micro_batches,
        "train.steps": 1000,
        "data.sequence_length": length,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.lr": LR,
        "optimizer.betas": json.dumps(BETAS),
        "optimizer.clip": CLIP,
        "optimizer.weight_decay": DECAY,
        **case.ours,
    }
    config = load_config(
        None, [f"--{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in words.items()]
    )
    order = np.concatenate(
        [
            sample_rows(step, global_batch=batch, num_rows=len(rows), seed=config.train.seed)
            for step in range(len(rows) // batch)
        ]
    )
    permuted = np.empty_like(rows)
    permuted[order] = rows
    data: Any = Rows(permuted)
    return Trainer(config=config, world=world, architecture=model, rows=data, heldout=None)


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| rival | processes x threads | speed ratio, wall (least - most) | ratio, CPU-seconds | seconds a step "
        "| peak MiB, rival / ours | ours / rival | own time | MFU median / best |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        wall, cpu = each["ratio_wall_s"], each["ratio_cpu_s"]
        rival, ours = each["memory_bytes"]["rival"], each["memory_bytes"]["ours"]
        lines.append(
            f"| {each['case']} | {each['processes']} x {each['threads']} "
            f"| **{wall['median']:.2f}** ({wall['least']:.2f} - {wall['most']:.2f}) "
            f"| {cpu['median']:.2f} ({cpu['least']:.2f} - {cpu['most']:.2f}) "
            f"| {each['rival_wall_s']:.2f} / {each['ours_wall_s']:.2f} | {rival / MIB:,.0f} / {ours / MIB:,.0f} "
            f"| {ours / rival:.2f} | {100 * each['own']['share']:.1f} % | {each['mfu']:.0%} / {each['mfu_best']:.0%} |"
        )
    return "\n".join(lines)


def machine() -> str:
    name = platform.processor() or platform.machine()
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace"))
        name = found.group(1) if found else name
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="one case; may be given more than once")
    parser.add_argument("--rounds", type=int, help="steps of each side that are compared (default 3; --quick: 1)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and four cases")
    parser.add_argument("--size", choices=SIZES, default="full", help="the model and its batch (default: full)")
    parser.add_argument(
        "--cores",
        type=int,
        default=2,
        help="processes x threads of each side (default 2); 1 where others use the machine: CPU-seconds of two threads "
        "then hold what they spend waiting for each other",
    )
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--table", help="Markdown file whose part between the benchmark's two marks is replaced")
    parser.add_argument("--deepspeed-python", help="interpreter of an environment with DeepSpeed, for its cases")
    parser.add_argument("--log", default=os.devnull, help="file for what the processes print as errors")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(json.loads(args.work))
        return
    if args.list:
        print("\n".join(CASES))
        return
    if not args.deepspeed_python and any(name.startswith("deepspeed") for name in args.case or ()):
        parser.error("DeepSpeed's cases need --deepspeed-python: an interpreter that has deepspeed")
    if args.quick:
        args.size = "tiny"
    quick = ["eager", "fsdp2", "dtensor_sequence", "pipelining"]
    names = args.case or (quick if args.quick else [name for name, case in CASES.items() if not case.extra])
    results = []
    with open(args.log, "w", encoding="utf-8") as log:
        for name in names:
            started = time.perf_counter()
            results.append(
                compare(
                    name,
                    size=args.size,
                    cores=args.cores,
                    python=args.deepspeed_python,
                    rounds=args.rounds or (1 if args.quick else 3),
                    log=log,
                )
            )
            print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
    import torch

    loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    what = f"size {args.size}: layers, hidden, heads, kv heads, ffn, vocabulary, sequence, batch = {SIZES[args.size]}"
    head = f"{what}; {datetime.date.today()}, {machine()}, torch {torch.__version__}, load average {loads}."
    text = f"{head}\n\n{table(results)}"
    print(text)
    if args.table:
        page = Path(args.table)
        begin, end = "<!-- bench/train.py begins -->", "<!-- bench/train.py ends -->"
        before, _, rest = page.read_text(encoding="utf-8").partition(begin)
        _, _, after = rest.partition(end)
        page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
