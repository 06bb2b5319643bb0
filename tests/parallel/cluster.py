"""Real runs of a few processes with something wrong in one of them, for the tests of hangs and of many machines."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from shardline.config import CheckpointConfig, DataConfig, ParallelConfig, RunConfig, TrainConfig, dump_config
from shardline.parallel.heartbeat import Beat, read_beat

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

# Python imports this at its start. In the rank and step that FAULT names, training then sleeps, or fails; a rank that
# halts is stopped when it first writes its part of a checkpoint.
_SITE = """
import os

fault = os.environ.get("FAULT", "").split()  # "sleep RANK STEP SECONDS", "crash RANK STEP" or "halt RANK"
if fault and fault[0] == "halt" and os.environ.get("RANK") == fault[1]:
    import signal

    from shardline.checkpoints import native

    native._write_state = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
elif fault and os.environ.get("RANK") == fault[1]:
    import time

    from shardline.training.trainer import Trainer

    train_step = Trainer.train_step

    def with_fault(self, *args, **kwargs):
        if self.step + 1 == int(fault[2]):
            if fault[0] == "crash":
                raise RuntimeError("the rank is ill")
            time.sleep(float(fault[3]))
        return train_step(self, *args, **kwargs)

    Trainer.train_step = with_fault
"""


class Cluster:
    """A folder with a config, a corpus and a cache, and processes that train from it."""

    def __init__(self, folder: Path, **parallel: object) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.file = folder / "run.yaml"
        (folder / "corpus").mkdir(parents=True)
        for index in range(30):
            (folder / "corpus" / f"{index}.txt").write_text(f"{index} is the number of this text. " * (5 + index))
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(_SITE)
        self.config = RunConfig(
            data=DataConfig(source=str(folder / "corpus"), sequence_length=32, heldout_fraction=0.1),
            train=TrainConfig(steps=6, global_batch=4, micro_batch=2, eval_every=0, eval_rows=2),
            parallel=ParallelConfig(**parallel),  # type: ignore[arg-type]
            checkpoint=CheckpointConfig(every=2),
            run=str(self.run),
        )
        self.write()

    def write(self, **train: int) -> None:
        self.config = dataclasses.replace(self.config, train=dataclasses.replace(self.config.train, **train))
        self.file.write_text(dump_config(self.config))

    def environment(self, fault: str = "") -> dict[str, str]:
        ours = {
            "FAULT": fault,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(self.folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "SHARDLINE_CACHE": str(self.folder / "cache"),
            "NO_COLOR": "1",
        }
        return {**os.environ, **ours}

    def start(self, command: list[str], *, fault: str = "") -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, env=self.environment(fault), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def ours(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "shardline", "train", str(self.file), "--nproc", "2", *words]

    def torchrun(self, *words: str) -> list[str]:
        options = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        return [*TORCHRUN, *options, "-m", "--", "shardline", "train", str(self.file), *words]

    def beat_of(self, rank: int, *, step: int, process: subprocess.Popen[str]) -> Beat:
        """Waits until `rank` has said that it is in `step` or later."""
        deadline = time.monotonic() + 60
        while True:
            beat = read_beat(self.run / "logs", rank)
            if beat is not None and beat.step >= step:
                return beat
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise AssertionError(f"rank {rank} did not reach step {step}:\n{process.communicate()[0]}")
            time.sleep(0.05)

    def losses(self) -> list[float]:
        rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        return [row["loss"] for row in rows]


def processes_of(pattern: str) -> list[int]:
    """Returns the ids of living processes whose command line has `pattern`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            state = re.search(r"\) (\w)", (path / "stat").read_text())
        except OSError:
            continue
        if pattern in line and state and state[1] != "Z":
            found.append(int(path.name))
    return found


def kill(beat: Beat, number: signal.Signals) -> float:
    """Sends the signal to the rank that wrote `beat`, and returns when."""
    os.kill(beat.pid, number)
    return time.monotonic()
