"""The engine on a thread of its own, used from asyncio: neither side ever waits for the other.

    async_engine = AsyncEngine(engine, metrics=Metrics("my-model"))
    async_engine.start()
    answers = async_engine.submit([request, ...])
    try:
        async for output in answers:
            ...
    finally:
        answers.close()              # aborts what is unfinished, in whatever state, and frees its blocks

The thread takes commands from a queue between steps; what a step produced goes to the event loop in one call.
A step that raises fails the requests in it. `MAX_FAILED_STEPS` in a row, or anything else that breaks the thread,
mark the engine dead: every request fails, later ones are refused, and `health` says why. `health` also speaks up
when a step has not come back for `step_timeout_s`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from shardline.config.errors import ShardlineError
from shardline.serving.engine import Engine
from shardline.serving.errors import EngineDeadError, OverloadedError, RequestError
from shardline.serving.metrics import Metrics
from shardline.serving.requests import FinishReason, Request, RequestOutput

__all__ = ["Answers", "AsyncEngine"]

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request
    arrived_s: float


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class Answers:
    """The outputs of requests that were submitted together, as they come; ends when all have finished."""

    def __init__(self, request_ids: list[str], release: Callable[[str], None]) -> None:
        self._unfinished = set(request_ids)
        self._release = release
        self._arrived: asyncio.Queue[RequestOutput] = asyncio.Queue()

    def put(self, output: RequestOutput) -> None:
        self._arrived.put_nowait(output)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._unfinished:
            raise StopAsyncIteration
        output = await self._arrived.get()
        if output.finished:
            self._unfinished.discard(output.request_id)
        return output

    def close(self) -> None:
        """Aborts whatever has not finished. Safe to call twice."""
        while self._unfinished:
            self._release(self._unfinished.pop())


class AsyncEngine:
    """Owns the engine's thread. All methods but the thread's own belong to the event loop that called `start`."""

    def __init__(
        self, engine: Engine, *, metrics: Metrics, max_num_waiting: int = 512, step_timeout_s: float = 300.0
    ) -> None:
        self.engine = engine
        self.max_in_flight = engine.config.max_num_seqs + max_num_waiting
        self._metrics = metrics
        self._step_timeout_s = step_timeout_s
        self._commands: queue.SimpleQueue[_Add | _Abort | None] = queue.SimpleQueue()
        self._answers: dict[str, Answers] = {}
        self._thread = threading.Thread(target=self._run, name="shardline-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._step_started_s: float | None = None
        self._num_failed_steps = 0
        self._death: str | None = None
        self._stopping = False
        metrics.watch_queues(
            running=lambda: len(engine.scheduler.running),
            waiting=lambda: len(engine.scheduler.waiting) + self._commands.qsize(),
            cache_usage=lambda: engine.blocks.usage,
        )

    @property
    def num_in_flight(self) -> int:
        return len(self._answers)

    def start(self) -> None:
        """Starts the thread; call it on the event loop that will use the engine."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after its present step; unfinished requests get an error."""
        self._stopping = True
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, 10.0)
        self._fail_all("The server is shutting down.")

    def health(self) -> str | None:
        """Returns None when all is well, otherwise the reason why not."""
        if self._death is not None:
            return self._death
        if not self._thread.is_alive():
            return "The engine's thread is not running."
        started_s = self._step_started_s
        if started_s is not None and time.monotonic() - started_s > self._step_timeout_s:
            return f"The engine's present step began {time.monotonic() - started_s:.0f} s ago and has not come back."
        return None

    def check_count(self, num_requests: int) -> None:
        """Raises `RequestError` for more requests than could ever be in flight together."""
        if num_requests > self.max_in_flight:
            raise RequestError(
                f"{num_requests} replies were asked for at once, but this server takes at most {self.max_in_flight}; "
                "split the request.",
                param="n",
            )

    def submit(self, requests: list[Request]) -> Answers:
        """Queues requests, all of them or none; raises `RequestError`, `OverloadedError` or `EngineDeadError`."""
        if self._death is not None or self._stopping:
            raise EngineDeadError(self._death or "The server is shutting down; send the request to another one.")
        self.check_count(len(requests))
        for request in requests:
            self.engine.check(request)
        if self.num_in_flight + len(requests) > self.max_in_flight:
            raise OverloadedError(
                f"{self.num_in_flight} requests are running or waiting, and {self.max_in_flight} is the limit; "
                "try again later."
            )
        answers = Answers([request.request_id for request in requests], self._abort)
        arrived_s = time.monotonic()
        for request in requests:
            self._answers[request.request_id] = answers
            self._commands.put(_Add(request, arrived_s))
        return answers

    def _abort(self, request_id: str) -> None:
        if self._answers.pop(request_id, None) is not None:
            self._commands.put(_Abort(request_id))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            answers = self._answers.get(output.request_id)
            if answers is None:
                continue  # its client went away while the step ran
            if output.finished:
                del self._answers[output.request_id]
            answers.put(output)

    def _fail_all(self, reason: str) -> None:
        self._deliver([_failure(request_id, reason) for request_id in self._answers])

    # The rest runs on the engine's thread.

    def _run(self) -> None:
        try:
            while self._obey():
                if self.engine.has_unfinished and not self._step():
                    return
        except Exception as error:  # noqa: BLE001 the thread's boundary: it must not die unseen
            self._die(error)

    def _obey(self) -> bool:
        """Takes the commands that have come, waiting for one when there is nothing to compute; False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_unfinished)
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, _Abort):
                if self.engine.abort(command.request_id):
                    self._metrics.observe_abort()
                continue
            try:
                self.engine.add_request(command.request, arrived_s=command.arrived_s)
            except Exception as error:
                logger.exception("Could not queue request %s.", command.request.request_id)
                self._send([_failure(command.request.request_id, _sentence(error))])

    def _step(self) -> bool:
        self._step_started_s = time.monotonic()
        try:
            outputs = self.engine.step()
            self._num_failed_steps = 0
        except Exception as error:
            logger.exception("A step failed.")
            failed = self.engine.abandon_step()
            outputs = [_failure(request_id, _sentence(error)) for request_id in failed]
            self._num_failed_steps += 1
            if self._num_failed_steps >= MAX_FAILED_STEPS:
                self._die(error)
                return False
        finally:
            self._step_started_s = None
        self._metrics.observe_step(self.engine.last_schedule, outputs)
        self._send(outputs)
        return True

    def _die(self, error: Exception) -> None:
        logger.critical("The engine stops: %s", error, exc_info=error)
        self._death = f"The engine has stopped: {_sentence(error)}"
        self._call(self._fail_all, self._death)

    def _send(self, outputs: list[RequestOutput]) -> None:
        if outputs:
            self._call(self._deliver, outputs)

    def _call(self, function: Callable[..., None], argument: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)


def _failure(request_id: str, reason: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, num_prompt_tokens=0, finish_reason=FinishReason.ERROR, error=reason)


def _sentence(error: Exception) -> str:
    if isinstance(error, ShardlineError):
        return str(error)
    first_line = (str(error).splitlines() or [""])[0]
    return f"The step that computed it failed with {type(error).__name__}: {first_line[:200]}"
