"""A whole run: plan, data, model, loop, checkpoints, metrics. Every rank calls `train`; rank 0 writes and prints.

with start_world() as world:
    result = train(config, world=world, console=console, resume=False)
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from shardline.checkpoints.hub import TOKENIZER_FILES, pin, resolve
from shardline.checkpoints.huggingface import iter_tensors, read_config, read_generation_config
from shardline.checkpoints.native import Checkpoint, ModelFolder, load_state, prune
from shardline.checkpoints.saver import Saver
from shardline.config import RunConfig, UsageError
from shardline.config.cache import cache_dir
from shardline.hardware.memory import peak_rss_bytes
from shardline.hardware.peak import measure_matmul_flops
from shardline.hardware.probe import probe
from shardline.models.config import DecoderConfig
from shardline.models.presets import preset
from shardline.parallel.failure import watch_ranks
from shardline.parallel.world import World
from shardline.planning.flops import training_flops_per_token, utilisation
from shardline.planning.layouts import require_layout
from shardline.planning.search import make_plan
from shardline.text.dataset import prepare_dataset
from shardline.text.rows import PackedDataset
from shardline.text.tokenizer import Tokenizer, byte_tokenizer
from shardline.training.groups import assign_roles
from shardline.training.interruption import SIGNALS, Interruption
from shardline.training.kinds import require_library
from shardline.training.progress import Progress
from shardline.training.report import write_report
from shardline.training.run_directory import RunDirectory, open_log
from shardline.training.trainer import StepDeclined, StepResult, Trainer

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["TrainResult", "model_config", "train"]

_GIB = 2**30
_GRACE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run ended with. Losses are mean nats a token; memory is the fattest process's peak.

    stopped  the signal that ended it before its last step ("SIGTERM"); None for a run that is finished
    """

    run: str
    step: int
    loss: float | None
    heldout_loss_before: float | None
    heldout_loss_after: float | None
    predicted_memory_gib: float
    measured_memory_gib: float
    checkpoint: str | None
    model: str | None
    report: str
    stopped: str | None


def model_config(config: RunConfig) -> DecoderConfig:
    """Returns the architecture that a config trains: its folder's, or its preset's."""
    return read_config(resolve(config.model.path)) if config.model.path else preset(config.model.preset)


def train(
    config: RunConfig,
    *,
    world: World,
    console: Console,
    resume: bool = False,
    restarts: int = 0,
    require_fit: bool = True,
) -> TrainResult:
    """Trains `config` to its last step, or to a signal, and returns how it ended, the same on every rank.

    restarts  how often whoever started the ranks has started them anew after a failure; such a run continues by itself

    Raises `InfeasibleError` before anything is allocated when the plan says that the layout does not fit, unless
    `require_fit` is False.
    """
    run = RunDirectory(config.run)
    config = world.first(lambda: _pin_model(config))
    architecture = model_config(config)
    _require_context(config, architecture)
    require_layout(architecture, config, num_processes=world.size)
    require_library(config.optimizer.name)
    assign_roles(config.optimizer, architecture)  # a pattern that is wrong is told before any data is read
    # A machine that took another's place has not been restarted; whoever was counts for all.
    restarts = int(world.max(torch.tensor([float(restarts)])).item())
    try:
        checkpoint = world.first(lambda: run.open(config, resume=resume, restarts=restarts))
        log = open_log(run, rank=world.rank)
        log.info("rank %d of %d starts, process %d", world.rank, world.size, os.getpid())
        progress = Progress(console, steps=config.train.steps)
        plan = world.first(lambda: _plan(config, architecture, world, run, require_fit=require_fit))
        try:
            with watch_ranks(world, run.path / "logs", timeout_s=config.parallel.timeout_s):
                loop = _Loop(config, world, run, checkpoint, progress, architecture)
                world.limit_groups(config.parallel.timeout_s)
                with Interruption() as interruption:
                    return loop.run(interruption, predicted_memory_gib=plan)
        except BaseException:
            log.exception("rank %d stops", world.rank)
            raise
    finally:
        run.close()


class _Loop:
    """The objects of a running training, and the order in which they are used."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        run: RunDirectory,
        checkpoint: Checkpoint | None,
        progress: Progress,
        architecture: DecoderConfig,
    ) -> None:
        self._config, self._world, self._run, self._progress = config, world, run, progress
        self._saver = Saver(
            run.checkpoints,
            world=world,
            asynchronous=config.checkpoint.asynchronous,
            published=self._published,
            say=self._say,
        )
        self._saver.newest = checkpoint
        self._tokenizer = _load_tokenizer(config, architecture)
        rows, heldout = self._load_data()
        described = architecture
        if not config.model.path:  # a model that starts here takes its tokenizer's special ids
            described = dataclasses.replace(described, **_special_ids(self._tokenizer))
        generation = read_generation_config(resolve(config.model.path)) if config.model.path else {}
        self._model = ModelFolder(config=described, tokenizer=self._tokenizer, generation_config=generation)
        self._trainer = Trainer(
            config=config,
            world=world,
            architecture=architecture,
            rows=rows,
            heldout=heldout,
            weights=iter_tensors(resolve(config.model.path)) if config.model.path else None,
        )
        self._before: float | None = None
        self._saved_step = checkpoint.step if checkpoint else None
        if checkpoint is not None:
            load_state(checkpoint, self._trainer.state())
            self._trainer.step = checkpoint.step
            self._before = checkpoint.read_manifest()["heldout_loss_before"]
            self._say(f"resumed from {checkpoint.path}")
        self._flops_per_token = training_flops_per_token(architecture, sequence_length=config.data.sequence_length)
        self._peak_flops = self._measure_peak()

    def run(self, interruption: Interruption, *, predicted_memory_gib: float) -> TrainResult:
        try:
            return self._run_steps(interruption, predicted_memory_gib)
        except Exception:
            # A save in flight may be the newest; its own error, if any, is told but does not hide the first.
            self._world.heartbeat.ending = True
            if (error := self._saver.abandon(within_s=_GRACE_S)) is not None:
                self._say(str(error))
            raise

    def _run_steps(self, interruption: Interruption, predicted_memory_gib: float) -> TrainResult:
        config, trainer = self._config, self._trainer
        heldout = self._evaluate()
        if self._before is None:
            self._before = heldout
        row: dict[str, Any] = {}
        stopped: str | None = None
        while trainer.step < config.train.steps:
            started = time.perf_counter()
            self._world.heartbeat.begin_step(trainer.step + 1)
            self._world.heartbeat.mark("data")
            try:
                result = trainer.train_step(votes=(int(self._saver.failed), *interruption.votes))
            except StepDeclined as declined:
                failed, *signals = declined.reasons
                if failed:
                    self._saver.wait()  # raises why, on every rank
                stopped = next(number.name for number, came in zip(SIGNALS, signals, strict=True) if came)
                break
            step_s = time.perf_counter() - started - result.compile_s
            last = trainer.step == config.train.steps
            if last or _due(trainer.step, config.train.eval_every):
                heldout = self._evaluate()
            row = self._row(result, step_s=step_s, heldout=heldout)
            if self._world.is_first:
                self._run.append_metrics(row)
                self._progress.step(row)
            if last or _due(trainer.step, config.checkpoint.every):
                self._save()
        if stopped is None and self._saved_step != trainer.step:
            self._save()  # a run of no steps: the model as it began
        self._world.heartbeat.mark("end")
        if stopped is not None:
            self._stop(stopped)
        self._saver.wait()
        measured = self._peak_memory_gib()
        report = self._world.first(lambda: write_report(self._run.path))
        newest = self._saver.newest
        return TrainResult(
            run=str(self._run.path),
            step=trainer.step,
            loss=row.get("loss"),
            heldout_loss_before=self._before,
            heldout_loss_after=heldout,
            predicted_memory_gib=predicted_memory_gib,
            measured_memory_gib=measured,
            checkpoint=str(newest.path) if newest else None,
            model=str(newest.model_folder) if newest else None,
            report=str(report),
            stopped=stopped,
        )

    def _stop(self, name: str) -> None:
        """Saves where a signal ended the run, unless that step is saved or being saved already."""
        self._say(f"{name}: stopping after step {self._trainer.step}")
        if self._saved_step != self._trainer.step:
            self._save()
        self._saver.wait()
        self._say(
            f"stopped by {name} after step {self._trainer.step} of {self._config.train.steps}; --resume continues"
        )

    def _load_data(self) -> tuple[PackedDataset, PackedDataset]:
        """Rank 0 tokenises (or finds it done), then all ranks map the same files."""
        shown = -1

        def report(fraction: float) -> None:
            nonlocal shown
            tenth = int(fraction * 10)
            if tenth > shown and fraction < 1:
                shown = tenth
                self._say(f"tokenizing {self._config.data.source}: {fraction:.0%}")

        def prepare() -> tuple[int, int]:
            rows, heldout = prepare_dataset(self._config.data, self._tokenizer, cache_dir=cache_dir(), progress=report)
            return rows.num_rows, heldout.num_rows

        num_rows, num_heldout = self._world.first(prepare)
        self._say(
            f"data: {num_rows:,} rows of {self._config.data.sequence_length} tokens, {num_heldout:,} more held out"
        )
        return prepare_dataset(self._config.data, self._tokenizer, cache_dir=cache_dir())

    def _evaluate(self) -> float | None:
        self._world.heartbeat.mark("evaluate")
        loss = self._trainer.evaluate()
        if loss is not None:
            self._say(f"held-out loss at step {self._trainer.step}: {loss:.4f}")
        return loss

    def _save(self) -> None:
        self._world.heartbeat.mark("save")
        facts = {
            "config": msgspec.to_builtins(self._config),
            "layout": str(self._trainer.layout),
            "heldout_loss_before": self._before,
        }
        self._saver.save(step=self._trainer.step, state=self._trainer.state(), model=self._model, facts=facts)
        self._saved_step = self._trainer.step

    def _published(self, checkpoint: Checkpoint) -> None:
        """Drops what is too old and refreshes the report, on rank 0, maybe in a background thread."""
        keep = self._config.checkpoint
        prune(self._run.checkpoints, keep_last=keep.keep_last, keep_every=keep.keep_every)
        write_report(self._run.path)

    def _row(self, result: StepResult, *, step_s: float, heldout: float | None) -> dict[str, Any]:
        tokens = self._config.train.global_batch * self._config.data.sequence_length
        tokens_per_s = tokens / step_s
        return {
            "step": result.step,
            "tokens": result.step * tokens,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "tokens_per_s": tokens_per_s,
            "mfu": utilisation(self._flops_per_token, tokens_per_s=tokens_per_s, peak_flops=self._peak_flops),
            "memory_gib": self._peak_memory_gib(),
            "step_s": step_s,
            "data_wait_s": result.data_wait_s,
            "heldout_loss": heldout,
            "loss_scale": result.loss_scale,
            "num_skipped": result.num_skipped,
            "compile_s": result.compile_s,
        }

    def _peak_memory_gib(self) -> float:
        """The peak of the fattest rank so far: resident memory on a CPU, the allocator's on a GPU."""
        peak = peak_rss_bytes()
        if self._world.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._world.device)
        return self._world.max(torch.tensor([float(peak)], dtype=torch.float64)).item() / _GIB

    def _measure_peak(self) -> float | None:
        """All ranks at once, since they share the machine's memory and power when they train."""
        # A CPU's plain fp16 product is far slower than what its linears take, so its fp32 is the yardstick there.
        half = "float16" if self._world.device.type == "cuda" else "float32"
        dtype = {"fp32": "float32", "fp16": half}.get(self._config.train.precision, "bfloat16")
        peak = measure_matmul_flops(dtype, seconds=0.2, device=self._world.device.type)
        total = self._world.sum(torch.tensor([math.nan if peak is None else peak], dtype=torch.float64)).item()
        return None if math.isnan(total) else total

    def _say(self, text: str) -> None:
        if self._world.is_first:
            self._progress.say(text)


def _pin_model(config: RunConfig) -> RunConfig:
    """Puts the commit into `hf://` names: every rank, and every later resume, starts from the same files."""
    model = config.model
    path = pin(model.path) if model.path else model.path
    tokenizer = pin(model.tokenizer, patterns=TOKENIZER_FILES) if model.tokenizer else model.tokenizer
    return dataclasses.replace(config, model=dataclasses.replace(model, path=path, tokenizer=tokenizer))


def _plan(
    config: RunConfig, architecture: DecoderConfig, world: World, run: RunDirectory, *, require_fit: bool
) -> float:
    """Writes plan.json and returns the memory predicted for the fattest process, in GiB."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    machine = probe(folder=config.run)
    plan = make_plan(architecture, config, num_processes=world.size, machine=machine, processes_here=here)
    run.write_plan(plan.to_json())
    if require_fit:
        plan.require()
    return plan.configured.prediction.total_bytes / _GIB


def _load_tokenizer(config: RunConfig, architecture: DecoderConfig) -> Tokenizer:
    folder = config.model.tokenizer or config.model.path
    tokenizer = Tokenizer.load(resolve(folder, patterns=TOKENIZER_FILES)) if folder else byte_tokenizer()
    if tokenizer.vocab_size > architecture.vocab_size:
        raise UsageError(
            f"The tokenizer has {tokenizer.vocab_size} tokens, but the model only {architecture.vocab_size} "
            "embeddings; set model.tokenizer to the folder whose tokenizer belongs to this model."
        )
    return tokenizer


def _special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    return {"bos_token_id": tokenizer.bos_token_id, "eos_token_ids": tokenizer.eos_token_ids, "pad_token_id": None}


def _require_context(config: RunConfig, architecture: DecoderConfig) -> None:
    if config.data.sequence_length > architecture.max_position_embeddings:
        raise UsageError(
            f"data.sequence_length = {config.data.sequence_length} exceeds the model's context of "
            f"{architecture.max_position_embeddings} tokens; set it to that or less."
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
