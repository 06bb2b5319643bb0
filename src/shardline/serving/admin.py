"""Administration: new weights in a running server, and sleep. Each is one transaction: it happens whole or not at all.

    POST /admin/reload   {"path": FOLDER, "mode": "drain" | "pause", "timeout_s": SECONDS}
    POST /admin/sleep    {"weights": false, "mode": "drain" | "pause", "timeout_s": SECONDS}
    POST /admin/wake     {"path": FOLDER}          path only for other weights than it went to sleep with

`drain` lets every request that arrived before end with the old weights; later ones wait and get the new. `pause` cuts
in between two steps: a running reply keeps the tokens that it has, its keys and values are computed again with the new
weights, and it goes on with those. Either way the prefix cache is dropped.

Asleep, the memory of the KV cache (and with `weights` that of the weights) belongs to the machine again; requests get
503 with Retry-After, paused ones wait.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from shardline.checkpoints.huggingface import read_config
from shardline.checkpoints.native import find_model_folder
from shardline.config.errors import ShardlineError
from shardline.serving.async_engine import AsyncEngine
from shardline.serving.engine import Engine
from shardline.serving.errors import ConflictError, RequestError, ServingError
from shardline.serving.metrics import Metrics
from shardline.serving.sleep import Released, drop_packed_weights, give_back, kv_tensors, weight_tensors

__all__ = ["Admin", "ReloadBody", "SleepBody", "WakeBody"]


class ReloadBody(msgspec.Struct, kw_only=True):
    path: str
    mode: Literal["drain", "pause"] = "drain"
    timeout_s: float | None = None


class SleepBody(msgspec.Struct, kw_only=True):
    weights: bool = False
    mode: Literal["drain", "pause"] = "drain"
    timeout_s: float | None = None


class WakeBody(msgspec.Struct, kw_only=True):
    path: str | None = None


class Admin:
    """The transactions of one server. `folder` is what its weights were loaded from, None where that is not known."""

    def __init__(self, async_engine: AsyncEngine, *, folder: str | Path | None, metrics: Metrics) -> None:
        self._async_engine = async_engine
        self._metrics = metrics
        self._folder = None if folder is None else str(folder)
        self._turn = asyncio.Lock()
        self._released: list[Released] = []
        self._lost_weights = False
        self.weights_version = 0

    async def reload(self, body: ReloadBody) -> dict[str, Any]:
        """Replaces the weights by those of another folder of the same shape."""
        _check_timeout(body.timeout_s)
        async with self._turn:
            if self._async_engine.asleep:
                raise ConflictError(
                    'The server sleeps; POST /admin/wake with {"path": FOLDER} wakes it with other weights.'
                )
            started_s = time.monotonic()
            folder = await asyncio.to_thread(self._check_folder, body.path)
            loaded_s = await self._async_engine.exclusively(
                lambda engine: _load(engine, folder), mode=body.mode, timeout_s=body.timeout_s
            )
            self._took(body.path)
            return self._report(status="reloaded", loaded_s=loaded_s, started_s=started_s)

    async def sleep(self, body: SleepBody) -> dict[str, Any]:
        """Gives memory back. Without `weights`, waking needs no folder."""
        _check_timeout(body.timeout_s)
        async with self._turn:
            if self._async_engine.asleep:
                raise ConflictError("The server sleeps already.")
            if self._async_engine.engine.config.tensor_parallel_size > 1:
                raise ConflictError("Sleep is not for --tensor-parallel-size above 1: it would free one process only.")
            if body.weights and self._folder is None:
                raise ConflictError("It is not known which folder the weights came from, so they must stay.")
            started_s = time.monotonic()
            self._async_engine.asleep = True
            try:
                self._released = await self._async_engine.exclusively(
                    lambda engine: _release(engine, weights=body.weights),
                    mode=body.mode,
                    timeout_s=body.timeout_s,
                    then_rest=True,
                )
            except BaseException:
                self._async_engine.asleep = False
                raise
            self._lost_weights = body.weights
            num_bytes = sum(released.num_bytes for released in self._released)
            return self._report(status="asleep", released_bytes=num_bytes, started_s=started_s)

    async def wake(self, body: WakeBody) -> dict[str, Any]:
        """Takes the memory again, and the weights where they were given back; when that fails it sleeps on."""
        async with self._turn:
            if not self._async_engine.asleep:
                raise ConflictError("The server is awake.")
            started_s = time.monotonic()
            path = body.path or (self._folder if self._lost_weights else None)
            folder = None if path is None else await asyncio.to_thread(self._check_folder, path)
            loaded_s = await self._async_engine.exclusively(
                lambda engine: _restore(engine, self._released, folder), mode="pause"
            )
            if body.path is not None:
                self._took(body.path)
            self._released, self._lost_weights = [], False
            self._async_engine.asleep = False
            return self._report(status="awake", loaded_s=loaded_s, started_s=started_s)

    def _took(self, path: str) -> None:
        self._folder = path
        self.weights_version += 1
        self._metrics.observe_reload()

    def _check_folder(self, path: str) -> Path:
        """Refuses what can be seen to be wrong before anyone has to wait for it."""
        try:
            folder = find_model_folder(path)
            config = read_config(folder)
        except ShardlineError as error:
            raise RequestError(str(error), param="path") from None
        served = self._async_engine.engine.decoder.config
        differing = [
            f"{field.name} {getattr(config, field.name)} instead of {getattr(served, field.name)}"
            for field in dataclasses.fields(config)
            if getattr(config, field.name) != getattr(served, field.name)
        ]
        if differing:
            raise RequestError(
                f"{path} holds another model than the one served: {'; '.join(differing)[:300]}.",
                param="path",
            )
        return folder

    def _report(self, *, status: str, started_s: float, **facts: Any) -> dict[str, Any]:
        return {
            "status": status,
            "path": self._folder,
            "weights_version": self.weights_version,
            **facts,
            "wall_s": round(time.monotonic() - started_s, 4),
        }


# These run on the engine's thread, with nothing running.


def _load(engine: Engine, folder: Path) -> float:
    started_s = time.monotonic()
    try:
        engine.reload(folder)
    except ServingError:
        raise
    except ShardlineError as error:
        raise RequestError(str(error), param="path") from None
    return round(time.monotonic() - started_s, 4)


def _release(engine: Engine, *, weights: bool) -> list[Released]:
    engine.reset_prefix_cache()
    released = [give_back(kv_tensors(engine))]
    if weights:
        released += [give_back(weight_tensors(engine)), drop_packed_weights(engine)]
    return released


def _restore(engine: Engine, released: list[Released], folder: Path | None) -> float:
    for memory in released:
        memory.take_again()
    return 0.0 if folder is None else _load(engine, folder)


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not 0 < timeout_s <= 86_400:
        raise RequestError(f"timeout_s = {timeout_s:g} must be greater than 0 and at most 86400.", param="timeout_s")
