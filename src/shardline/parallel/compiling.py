"""`torch.compile` of a decoder's layers: one at a time, so that the time it takes does not grow with depth.

    compile_layers(decoder.model.layers)
    clock = compile_clock()
    trainer.train_step()
    clock.take_s()              # seconds of the step that went into compiling

What is compiled is a layer's arithmetic alone: hooks that gather or reduce parameters (ZeRO) stay outside. All layers
go through one compiled function that takes the layer's forward pass as an argument, and so share its code.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.callback import CallbackArgs, callback_handler

from shardline.models.feedforward import Experts

__all__ = ["CompileClock", "compile_clock", "compile_layers"]

BACKEND = "inductor"
"""torch.compile's backend; tests of everything but the generated code take `aot_eager`, which is fast."""

# Of one layer there are as many versions as there are windows, with and without gradients, with and without documents.
_MOST_VERSIONS = 64


def compile_layers(layers: Iterable[nn.Module], *, whole: bool = True) -> None:
    """Compiles each layer's forward pass; call it after `recompute` and before anything shards the layers.

    whole   a layer becomes one graph, or it is an error. Experts are left out in any case, and cut a layer in two: how
            many tokens each of them gets differs from batch to batch, and with it the code would
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VERSIONS)
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # rather than go on uncompiled and say nothing
    layers = list(layers)
    experts = [module for layer in layers for module in layer.modules() if isinstance(module, Experts)]
    for module in experts:
        module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    compiled = torch.compile(_call, backend=BACKEND, fullgraph=whole and not experts, dynamic=False)
    for layer in layers:
        layer.forward = functools.partial(compiled, layer.forward)  # type: ignore[method-assign]


def _call(forward: Callable[..., Any], *inputs: Any) -> Any:
    return forward(*inputs)


class CompileClock:
    """The seconds that this process has spent compiling, in whatever thread, for forward or backward."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._started = 0.0
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)

    def take_s(self) -> float:
        """Returns the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _start(self, _: CallbackArgs) -> None:
        self._started = time.perf_counter()

    def _end(self, _: CallbackArgs) -> None:
        self._seconds += time.perf_counter() - self._started


@functools.cache
def compile_clock() -> CompileClock:
    """The process's one clock: what it listens to is the process's too."""
    return CompileClock()
