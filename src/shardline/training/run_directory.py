"""RUN/: the files of a run, and the rules that keep saved work safe.

    RUN/config.yaml            the resolved config
    RUN/plan.json              what was predicted, with reasons
    RUN/metrics.jsonl          one object a step
    RUN/checkpoints/step-N/    see `shardline.checkpoints.native`
    RUN/logs/rank-K.log        what rank K did and said
    RUN/report.html            see `shardline.training.report`

A run that exists is only ever continued (`--resume`); nothing here overwrites one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from shardline.checkpoints.native import Checkpoint, find_checkpoints
from shardline.config import RunConfig, ShardlineError, UsageError, dump_config

__all__ = ["RunDirectory", "open_log", "read_metrics"]

# What a step means depends on these; the rest (steps, learning rate, layout, ...) may change when a run goes on.
_FIXED = (
    ("model", "preset"),
    ("model", "path"),
    ("model", "tokenizer"),
    ("data", "source"),
    ("data", "sequence_length"),
    ("data", "heldout_fraction"),
    ("train", "global_batch"),
    ("train", "seed"),
)

_PATIENCE_S = 5.0  # for the end of what is being continued


class RunDirectory:
    """The files of a run. It is one run's from `open` to `close`, or to the end of the process."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def open(self, config: RunConfig, *, resume: bool, restarts: int = 0) -> Checkpoint | None:
        """Makes the folder ready and returns the checkpoint to continue from, verified; None for a start at step 0.

        A launcher's restart (`restarts` > 0) continues the run that it has begun without being told to; but what its
        first attempt was refused stays refused, or a restart would go on with somebody's finished run.

        Raises `UsageError` when the folder holds a run and `resume` is False, when a run is going on in it, or when
        `config` changes what its steps mean.
        """
        self._take(patience_s=_PATIENCE_S if resume or restarts else 0.0)
        refused = self.path / ".refused"
        goes_on = resume or (restarts > 0 and not refused.exists())
        if not goes_on and (self.metrics.exists() or find_checkpoints(self.checkpoints)):
            with contextlib.suppress(OSError):
                refused.touch()
            raise UsageError(
                f"{self.path} already holds a run; pass --resume to continue it, or choose another folder with --run."
            )
        refused.unlink(missing_ok=True)
        found = find_checkpoints(self.checkpoints)
        checkpoint = found[-1] if found else None
        if checkpoint is not None:
            self._require_same_run(config, checkpoint.verify())
        self._keep_metrics_up_to(checkpoint.step if checkpoint else 0)
        _replace(self.path / "config.yaml", dump_config(config))
        return checkpoint

    def close(self) -> None:
        """Leaves the folder to the next run."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write_plan(self, plan: dict[str, Any]) -> None:
        _replace(self.path / "plan.json", json.dumps(plan, indent=2) + "\n")

    def append_metrics(self, row: dict[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _take(self, *, patience_s: float) -> None:
        """Makes sure that no other run goes on in the folder; the lock goes with the process that holds it."""
        if self._lock is not None:
            return
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            reason = error.strerror
            raise UsageError(f"Can't write the run directory {self.path}: {reason}. Choose another --run.") from None
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                self.close()
                raise UsageError(
                    f"Another process is training in {self.path}; stop it, or choose another folder with --run."
                ) from None
            except OSError as error:
                if error.errno in (errno.ENOLCK, errno.ENOTSUP):  # a file system without locks
                    return
                raise

    def _keep_metrics_up_to(self, step: int) -> None:
        """Steps after the checkpoint run again, so their old rows go, and with them a line that a kill cut short."""
        if self.metrics.exists():
            rows = [row for row in read_metrics(self.metrics) if row["step"] <= step]
            _replace(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))

    def _require_same_run(self, config: RunConfig, manifest: dict[str, Any]) -> None:
        ours, theirs = msgspec.to_builtins(config), manifest["config"]
        for section, key in _FIXED:
            if ours[section][key] != theirs[section][key]:
                raise UsageError(
                    f"{self.path} was trained with {section}.{key} = {theirs[section][key]!r}, and this config says "
                    f"{ours[section][key]!r}; put it back to resume, or choose another folder with --run."
                )


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the complete rows of a metrics.jsonl; a last line that a kill cut short is passed over."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                return
            raise ShardlineError(f"{path}:{number} is not a JSON object; repair or delete that line.") from None


def open_log(run: RunDirectory, *, rank: int) -> logging.Logger:
    """Returns this rank's logger, writing to RUN/logs/rank-K.log."""
    folder = run.path / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / f"rank-{rank}.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger(f"shardline.rank{rank}")
    for earlier in logger.handlers:
        earlier.close()
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)
    return logger


def _replace(path: Path, text: str) -> None:
    """Writes a small file so that a reader sees the old or the new one, never half."""
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
