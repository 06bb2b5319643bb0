"""What the workers run for the gate, and what the gate asks of it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardline.config import RunConfig
from shardline.models.config import DecoderConfig, RopeConfig
from shardline.parallel.world import World
from shardline.text.dataset import prepare_dataset
from shardline.text.tokenizer import byte_tokenizer
from shardline.training.loss import IGNORED
from shardline.training.trainer import Trainer
from training.jobs import whole_gradients

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4


def gate_model(*, tied: bool) -> DecoderConfig:
    """Four layers, two kv heads for four query heads, and more that four ranks can't deal out evenly."""
    return DecoderConfig(
        vocab_size=322,
        hidden_size=48,
        intermediate_size=90,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        max_position_embeddings=256,
        rope=RopeConfig(theta=10000.0),
        qk_norm=True,
        tie_word_embeddings=tied,
    )


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a layout came to.

    losses     of each step, and the held-out ones before and after
    norms      of each step's gradient
    gradients  of the first step after clipping, every parameter's, whole
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The worst relative differences of a layout from one process; gradients relative to each one's largest entry."""

    loss: float
    norm: float
    gradient: float
    parameter: str

    @classmethod
    def between(cls, actual: Training, expected: Training, *, null: str = "") -> Difference:
        """`null` matches parameters whose gradient is zero but for rounding: that is what is asked of them."""
        assert actual.gradients.keys() == expected.gradients.keys()
        largest = {name: float(np.abs(gradient).max()) for name, gradient in expected.gradients.items()}
        for name in fnmatch.filter(largest, null):
            assert max(largest.pop(name), np.abs(actual.gradients[name]).max()) < 1e-6 * max(largest.values()), name
        gradients = {
            name: float(np.abs(actual.gradients[name] - expected.gradients[name]).max()) / size
            for name, size in largest.items()
        }
        worst = max(gradients, key=gradients.__getitem__)
        return cls(
            loss=_worst(actual.losses, expected.losses),
            norm=_worst(actual.norms, expected.norms),
            gradient=gradients[worst],
            parameter=worst,
        )

    def check(self) -> None:
        """Raises an `AssertionError` that says what is too far apart."""
        assert self.loss <= LOSS_TOLERANCE, f"losses are {self.loss:.1e} apart"
        assert self.norm <= LOSS_TOLERANCE, f"gradient norms are {self.norm:.1e} apart"
        assert self.gradient <= GRADIENT_TOLERANCE, f"the gradient of {self.parameter} is {self.gradient:.1e} off"


def train(world: World, config: RunConfig, cache: Path, model: DecoderConfig, fault: str | None = None) -> Training:
    """Trains a layout, with one of `FAULTS` built into the engine if named."""
    rows, heldout = prepare_dataset(config.data, byte_tokenizer(), cache_dir=cache)
    with FAULTS[fault]() if fault else _sound():
        trainer = Trainer(config=config, world=world, architecture=model, rows=rows, heldout=heldout)
        gradients: dict[str, np.ndarray] = {}

        def record(*_: object) -> None:
            if not gradients:
                gradients.update(whole_gradients(trainer, copies_are_equal=fault is None))

        trainer._optimizer.register_step_pre_hook(record)
        before = trainer.evaluate()
        steps = [trainer.train_step() for _ in range(config.train.steps)]
        after = trainer.evaluate()
    assert before is not None
    assert after is not None
    return Training(
        losses=[*(step.loss for step in steps), before, after],
        norms=[step.grad_norm or 0.0 for step in steps],
        gradients=gradients,
    )


def _worst(actual: list[float], expected: list[float]) -> float:
    assert len(actual) == len(expected)
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(actual, expected, strict=True))


@contextmanager
def _sound() -> Iterator[None]:
    yield


@contextmanager
def _patched(path: str, replacement: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path, replacement)
        yield


def _nothing(*_: object, **__: object) -> None: ...


@contextmanager
def _denominator_of_this_rank() -> Iterator[None]:
    """The mistake of many trainers: a mean over each micro-batch's own tokens."""
    sound = Trainer._run_micro_batches

    def wrong(self: Trainer, batches: Any, scale: float) -> Any:
        own = sum(int((targets != IGNORED).sum()) for _, targets, _, _ in batches)
        return sound(self, batches, self._ranks.num_ranks / (own * self.layout.data))

    with _patched("shardline.training.trainer.Trainer._run_micro_batches", wrong):
        yield


def _without_sums(names: str) -> Callable[[], Any]:
    """The engine without the sums over tensor ranks that a table of partial gradients asks for."""
    return lambda: _patched(f"shardline.parallel.tensor.{names}", ())


FAULTS: dict[str, Callable[[], Any]] = {
    "norms' gradients not summed over the sequence's pieces": _without_sums("PARTIAL_WITH_SEQUENCE"),
    "query and key norms' gradients not summed over heads": _without_sums("PARTIAL"),
    "shared kv heads' gradients not summed": lambda: _patched(
        "shardline.parallel.tensor.TensorParallel.sum_gradients", _nothing
    ),
    "tied embeddings not summed over the pipeline": lambda: _patched(
        "shardline.training.model.ParallelModel.finish_gradients", _nothing
    ),
    "gradients not averaged over data ranks": lambda: _patched(
        "shardline.parallel.data._Replicated.finish_gradients", _nothing
    ),
    "each rank divides by its own tokens": _denominator_of_this_rank,
    "copies count twice in the norm": lambda: _patched(
        "shardline.training.model.ParallelModel._is_second_copy", lambda *_: False
    ),
    "no gradient from a column-parallel part to what it read": lambda: _patched(
        "shardline.parallel.collectives._all_reduce", lambda x, _: x.clone()
    ),
}
