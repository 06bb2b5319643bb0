"""Dynamic loss scaling: fp16 gradients below 6e-8 are lost, so the loss is multiplied before the backward pass.

    scaler = LossScaler()
    (loss * scaler.scale).backward()
    scaler.unscale(parameters)
    if scaler.update(finite=math.isfinite(grad_norm)):
        optimizer.step()

The scale doubles after 2,000 steps without an overflow and halves at each, whose step is left out (Micikevicius et
al., 2018, arXiv:1710.03740; the numbers are those of torch.amp.GradScaler). Every rank decides by the global gradient
norm, which is the same on all of them, so they leave out the same steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shardline.config import ShardlineError
from shardline.parallel.shards import Shard

__all__ = ["LossScaler"]

_INITIAL = 2.0**16
_GROWTH_INTERVAL = 2000


class LossScaler:
    """The scale, the steps since it last changed, and the steps that were left out: all of it goes into checkpoints."""

    def __init__(self, *, initial: float = _INITIAL, growth_interval: int = _GROWTH_INTERVAL) -> None:
        self._scale = torch.tensor(initial, dtype=torch.float32)
        self._good_steps = torch.tensor(0, dtype=torch.int64)
        self._skipped_steps = torch.tensor(0, dtype=torch.int64)
        self._growth_interval = growth_interval

    @property
    def scale(self) -> float:
        return float(self._scale)

    @property
    def skipped_steps(self) -> int:
        return int(self._skipped_steps)

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divides the gradients by the scale. It is a power of two, so nothing is rounded."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1 / self.scale)

    def update(self, *, finite: bool) -> bool:
        """Adapts the scale after a backward pass and returns whether its gradients may be used.

        Raises `ShardlineError` when no scale helps any more.
        """
        if finite:
            self._good_steps += 1
            if self._good_steps >= self._growth_interval:
                self._scale *= 2
                self._good_steps.zero_()
            return True
        self._scale /= 2
        self._good_steps.zero_()
        self._skipped_steps += 1
        if self._scale < 1:
            raise ShardlineError(
                "fp16 gradients overflow even with a loss scale of 1, so the model itself has left fp16's range of "
                "65,504; resume from the last checkpoint with train.precision bf16 or a lower optimizer.lr."
            )
        return False

    def shards(self) -> dict[str, Shard]:
        """Returns live tensors, to save or to fill."""
        return {
            "scale": Shard.whole(self._scale),
            "good_steps": Shard.whole(self._good_steps),
            "skipped_steps": Shard.whole(self._skipped_steps),
        }
