"""The training step, the evaluation and the state of a run. No files, no printing: `training.run` does those.

    trainer = Trainer(config=config, world=world, architecture=preset("tiny"), rows=train_rows, heldout=heldout_rows)
    result = trainer.train_step()       # one optimizer step over train.global_batch rows

The same losses come out of every layout: rows are chosen by the step's index alone, and the loss is divided by the
valid tokens of the whole global batch before the backward pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardline.config import RunConfig, ShardlineError
from shardline.models.config import DecoderConfig
from shardline.parallel.compiling import compile_clock
from shardline.parallel.data import clip_gradients, gradient_norm, parallelize
from shardline.parallel.grid import Layout
from shardline.parallel.pipeline import Pipeline
from shardline.parallel.shards import Shard
from shardline.parallel.world import World
from shardline.text.rows import Batch, PackedDataset
from shardline.text.sampler import sample_rows
from shardline.training.groups import assign_roles, freeze
from shardline.training.loss import IGNORED
from shardline.training.model import ParallelModel
from shardline.training.optimizer import begin_step, build_optimizer, learning_rate, optimizer_state
from shardline.training.scaler import LossScaler

__all__ = ["StepDeclined", "StepResult", "Trainer"]

_Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""Of a micro-batch: tokens, targets, documents, positions; each [B, T]. No documents: each row is one, all real."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step, the same on every rank.

    loss        mean over the global batch's valid tokens, in nats
    num_tokens  valid tokens of the global batch
    grad_norm   global gradient norm before clipping; None: fp16 gradients overflowed and the step was left out
    loss_scale  fp16's, of this step's backward pass; None in other precisions
    num_skipped steps left out so far
    compile_s   seconds of this step in which torch.compile worked, the mean over ranks
    """

    step: int
    loss: float
    num_tokens: int
    grad_norm: float | None
    learning_rate: float
    data_wait_s: float
    loss_scale: float | None = None
    num_skipped: int = 0
    compile_s: float = 0.0


class StepDeclined(Exception):  # noqa: N818 - not an error: ranks agreed to stop here
    """Some rank voted against beginning a step; `reasons` says for each of the votes whether any rank had it."""

    def __init__(self, reasons: tuple[bool, ...]) -> None:
        super().__init__(reasons)
        self.reasons = reasons


class Trainer:
    """A model laid out over the ranks, its optimizer, and the step that both have reached."""

    def __init__(
        self,
        *,
        config: RunConfig,
        world: World,
        architecture: DecoderConfig,
        rows: PackedDataset,
        heldout: PackedDataset | None,
        weights: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        """`weights` are the (name, whole tensor) pairs to start from; without them train.seed makes them."""
        self.layout = Layout.resolve(config.parallel, world_size=world.size)
        self.step = 0
        self._config = config
        self._world = world
        self._rows = rows
        self._heldout = heldout
        self._num_micro_batches = self.layout.accumulation(config.train)
        _, self._data_rank, self._tensor_rank = self.layout.coordinates(world.rank)
        mesh = self.layout.mesh(world.device.type)
        self.model = ParallelModel(config, architecture, layout=self.layout, mesh=mesh)
        if config.train.precision == "bf16_pure":
            self.model.module.to(torch.bfloat16)
        roles = assign_roles(config.optimizer, architecture)
        freeze(self.model, roles)
        self._ranks = parallelize(
            self.model.module,
            layers=self.model.layers,
            layout=self.layout,
            mesh=mesh,
            precision=config.train.precision,
            device=world.device,
            fill=lambda: self.model.fill(weights, seed=config.train.seed),
            offload_parameters=config.parallel.offload.params == "cpu",
        )
        self._pipeline = self._make_pipeline(mesh) if self.layout.pipeline > 1 else None
        self._optimizer = build_optimizer(
            config,
            self._ranks,
            self.model,
            roles=roles,
            mesh=mesh,
            placements=self.model.placements,
            folder=Path(config.run) / "offload" / f"rank-{world.rank}",
        )
        self._scaler = LossScaler() if config.train.precision == "fp16" else None
        self._compile_clock = compile_clock() if config.train.compile else None

    def train_step(self, *, votes: Sequence[int] = ()) -> StepResult:
        """Runs one optimizer step; raises `ShardlineError`, before weights change, if loss or gradient isn't finite.

        votes  this rank's reasons not to begin the step, each 0 or 1. They travel with the count of tokens, and when
               any rank has one, every rank raises `StepDeclined` before it computes anything.
        """
        config, started = self._config, time.perf_counter()
        if self._compile_clock is not None:
            self._compile_clock.take_s()  # what an evaluation compiled is no part of the step
        micro_batches = list(self._micro_batches())
        count = sum(int((m.targets_BT != IGNORED).sum()) for m in micro_batches) * self._counts_here
        num_tokens, *tally = self._world.sum(torch.tensor([count, *votes], dtype=torch.float64)).tolist()
        if any(tally):
            raise StepDeclined(tuple(map(bool, tally)))
        data_wait_s = time.perf_counter() - started
        if not num_tokens:
            raise ShardlineError(f"Step {self.step} holds no token to learn from; check data.source.")
        loss_scale = self._scaler.scale if self._scaler is not None else None
        # Every layout averages gradients over its ranks; the loss is a sum over them.
        scale = self._ranks.num_ranks / num_tokens * (loss_scale or 1.0)
        self._world.heartbeat.mark("forward-backward")
        loss_sum = self._run_micro_batches([self._to_device(batch) for batch in micro_batches], scale)
        self._world.heartbeat.mark("gradients")
        self._ranks.finish_gradients()
        self.model.finish_gradients()
        compiled_s = self._compile_clock.take_s() if self._compile_clock is not None else 0.0
        sums = torch.stack((loss_sum * self._loss_counts_here, torch.tensor([compiled_s])))
        loss_total, compiled_s = self._world.sum(sums).flatten().tolist()
        loss = loss_total / num_tokens
        if self._scaler is not None:
            self._scaler.unscale(self.model.parameters())
        shares = self.model.norm_shares(num_copies=self._ranks.num_copies)
        grad_norm = gradient_norm(shares, total=self._world.sum)
        clip_gradients(shares, norm=grad_norm, max_norm=config.optimizer.clip)
        usable = self._scaler is None or self._scaler.update(finite=math.isfinite(grad_norm))
        self._require_finite(loss, grad_norm if usable else 0.0)
        rate = learning_rate(config.optimizer, step=self.step, steps=config.train.steps)
        self._world.heartbeat.mark("optimizer")
        begin_step(self._optimizer, rate=rate, step=self.step)
        if usable:
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        return StepResult(
            step=self.step,
            loss=loss,
            num_tokens=int(num_tokens),
            grad_norm=grad_norm if usable else None,
            learning_rate=rate,
            data_wait_s=data_wait_s,
            loss_scale=loss_scale,
            num_skipped=self._scaler.skipped_steps if self._scaler is not None else 0,
            compile_s=compiled_s / self._world.size,
        )

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Returns the mean loss over the first `train.eval_rows` held-out rows, or None where nothing is held out."""
        if self._heldout is None or self._heldout.num_rows == 0:
            return None
        num_rows = min(self._config.train.eval_rows, self._heldout.num_rows)
        self._world.heartbeat.mark("evaluate")
        totals = torch.zeros(2, dtype=torch.float64)
        self.model.module.eval()
        with self._ranks.evaluation():
            for batch in self._heldout_batches(num_rows):
                inputs = self._to_device(batch)
                totals[0] += self._forward_only(inputs).cpu() * self._loss_counts_here
                totals[1] += int((batch.targets_BT != IGNORED).sum()) * self._counts_here
        self.model.module.train()
        loss_sum, num_tokens = self._world.sum(totals).tolist()
        return loss_sum / num_tokens if num_tokens else None

    def state(self) -> dict[str, Shard]:
        """Returns what a checkpoint holds, under names that no layout changes: live tensors, to save or fill.

        A rank returns what it holds: its shards under ZeRO-2 and 3, its own parameters' optimizer state under ZeRO-1.
        """
        state = {f"model.{name}": self.model.shard(name, each) for name, each in self.model.named_parameters()}
        for name, shard in optimizer_state(self._optimizer, self.model, placements=self.model.placements).items():
            state[f"optimizer.{name}"] = shard
        for name, shard in self._scaler.shards().items() if self._scaler is not None else ():
            state[f"scaler.{name}"] = shard
        return state

    def _run_micro_batches(self, batches: list[_Inputs], scale: float) -> Tensor:
        """Forward and backward of a step; returns the sum of this rank's losses, [1] fp32 on the CPU."""
        last = len(batches) - 1
        if self._pipeline is not None:

            def call(stage: int, x_BTD: Tensor | None, index: int) -> Tensor:
                with self._ranks.micro_batch(last=False):
                    return self._ranks.module(stage, *batches[index], scale, x_BTD)

            loss = self._pipeline.step(call, loss_scale=scale, prepare=self._ranks.prepare_backward)
            return loss.cpu().reshape(1)
        loss_sum = torch.zeros(1)
        for index, batch in enumerate(batches):
            with self._ranks.micro_batch(last=index == last):
                part = self._ranks.module(0, *batch, scale)
            self._ranks.prepare_backward(last=index == last)
            (part.float() * scale).backward()
            loss_sum += part.detach().float().cpu()
        return loss_sum

    def _forward_only(self, batch: _Inputs) -> Tensor:
        """Returns the loss of one batch, 0 where it does not arise on this rank."""
        if self._pipeline is None:
            return self._ranks.module(0, *batch)
        return self._pipeline.forward(lambda stage, x_BTD: self._ranks.module(stage, *batch, None, x_BTD))

    def _make_pipeline(self, mesh: DeviceMesh) -> Pipeline:
        config = self._config
        length = config.data.sequence_length // (self.layout.tensor if self.layout.sequence_parallel else 1)
        half = torch.float16 if config.train.precision == "fp16" else torch.bfloat16
        # Autocast leaves the residual stream in fp32; FSDP2 and pure bf16 have it in the parameters' dtype.
        is_half = config.train.precision == "bf16_pure" or (
            config.train.precision != "fp32" and isinstance(self.model.module, FSDPModule)
        )
        return Pipeline(
            self.layout.make_schedule(self._num_micro_batches),
            self.model.module.stages,
            mesh=mesh,
            shape=(config.train.micro_batch, length, self.model.config.hidden_size),
            dtype=half if is_half else torch.float32,
            device=self._world.device,
        )

    @property
    def _counts_here(self) -> int:
        """1 on the one rank of each data rank's replicas that counts its tokens, 0 on the others."""
        return int(0 in self.model.stage_indices and self._tensor_rank == 0)

    @property
    def _loss_counts_here(self) -> int:
        """1 on the one rank of each data rank's replicas whose loss counts, 0 on the others."""
        return int(self.model.is_last and self._tensor_rank == 0)

    def _micro_batches(self) -> Iterator[Batch]:
        """This rank's share of the step's rows: micro-batch m of rank r is the (m * ranks + r)-th piece."""
        train = self._config.train
        rows = sample_rows(self.step, global_batch=train.global_batch, num_rows=self._rows.num_rows, seed=train.seed)
        size, ranks = train.micro_batch, self.layout.data
        for index in range(self._num_micro_batches):
            start = (index * ranks + self._data_rank) * size
            yield self._rows.batch(rows[start : start + size])

    def _heldout_batches(self, num_rows: int) -> Iterator[Batch]:
        """Equally many batches on every rank, since sharded layouts gather together; what pads them has no targets."""
        assert self._heldout is not None
        size, ranks = self._config.train.micro_batch, self.layout.data
        for start in range(0, num_rows, size * ranks):
            wanted = np.arange(start + self._data_rank * size, start + (self._data_rank + 1) * size)
            batch = self._heldout.batch(np.minimum(wanted, num_rows - 1))
            batch.targets_BT[wanted >= num_rows] = IGNORED
            yield batch

    def _to_device(self, batch: Batch) -> _Inputs:
        """Rows of one document each are told apart here, where a look at the values makes no device wait."""
        arrays = (batch.tokens_BT, batch.targets_BT, batch.documents_BT, batch.positions_BT)
        tokens, targets, documents, positions = (torch.from_numpy(array).to(self._world.device) for array in arrays)
        return tokens, targets, documents if batch.documents_BT.any() else None, positions

    def _require_finite(self, loss: float, grad_norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        raise ShardlineError(
            f"Step {self.step + 1}: the loss is {loss} and the gradient norm {grad_norm}; training stopped before the "
            "weights changed. Resume from the last checkpoint with a lower optimizer.lr, a longer warm-up or a lower "
            "optimizer.clip, and look at the rows of this step."
        )
