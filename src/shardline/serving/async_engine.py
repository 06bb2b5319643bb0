"""The engine on a thread of its own, used from asyncio: neither side ever waits for the other.

    async_engine = AsyncEngine(engine, metrics=Metrics("my-model"))
    async_engine.start()
    answers = async_engine.submit([request, ...])
    try:
        async for output in answers:
            ...
    finally:
        answers.close()              # aborts what is unfinished, in whatever state, and frees its blocks

    await async_engine.exclusively(lambda engine: engine.reload(folder), mode="drain")      # with nothing running

The thread takes commands from a queue between steps; what a step produced goes to the event loop in one call.
A step that raises fails the requests in it. `MAX_FAILED_STEPS` in a row, or anything else that breaks the thread,
mark the engine dead: every request fails, later ones are refused, and `health` says why. `health` also speaks up
when a step has not come back for `step_timeout_s`.

Exclusive work has a mode. `drain`: every request that arrived before it ends first; later ones are held until it is
done. `pause`: it comes between two steps; what runs gives its blocks back, keeps the tokens that it has, and is
computed again afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from shardline.config.errors import ShardlineError
from shardline.serving.engine import Engine
from shardline.serving.errors import (
    AsleepError,
    EngineDeadError,
    GenerationFailedError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
    ServingError,
)
from shardline.serving.metrics import Metrics
from shardline.serving.requests import FinishReason, Request, RequestOutput, SamplingParams

__all__ = ["Answers", "AsyncEngine", "Mode"]

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3

Mode = Literal["drain", "pause"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request
    arrived_s: float


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    function: Callable[[Engine], Any]
    mode: Mode
    then_rest: bool
    done: Future[Any]


class Answers:
    """The outputs of requests that were submitted together, as they come; ends when all have finished."""

    def __init__(self, request_ids: list[str], release: Callable[[str], None]) -> None:
        self._unfinished = set(request_ids)
        self._release = release
        self._arrived: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._failure: ServingError | None = None
        self._timer: asyncio.TimerHandle | None = None

    def put(self, output: RequestOutput) -> None:
        self._arrived.put_nowait(output)

    def fail(self, request_id: str, error: ServingError) -> None:
        """Ends a request with an error: its last output carries the sentence, `failure` the error itself."""
        self._failure = error
        self.put(_failure(request_id, str(error)))

    def failure(self, output: RequestOutput) -> ServingError:
        """Returns what to raise for an output that ended in an error."""
        message = output.error or "The engine failed this request."
        if output.error_param is not None:
            return RequestError(message, param=output.error_param)
        return self._failure or GenerationFailedError(message)

    def expire_after(self, timer: asyncio.TimerHandle) -> None:
        self._timer = timer

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
        if self._timer is not None:
            self._timer.cancel()
        while self._unfinished:
            self._release(self._unfinished.pop())


class AsyncEngine:
    """Owns the engine's thread. All methods but the thread's own belong to the event loop that called `start`."""

    def __init__(
        self,
        engine: Engine,
        *,
        metrics: Metrics,
        max_num_waiting: int = 512,
        step_timeout_s: float = 300.0,
        request_timeout_s: float | None = None,
    ) -> None:
        self.engine = engine
        self.max_in_flight = engine.config.max_num_seqs + max_num_waiting
        self.asleep = False  # set by who puts it to sleep: new requests are refused
        self._metrics = metrics
        self._step_timeout_s = step_timeout_s
        self._request_timeout_s = request_timeout_s
        self._commands: queue.SimpleQueue[_Add | _Abort | _Work | None] = queue.SimpleQueue()
        self._answers: dict[str, Answers] = {}
        self._thread = threading.Thread(target=self._run, name="shardline-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._step_started_s: float | None = None
        self._num_failed_steps = 0
        self._not_warm: str | None = "No token has been computed yet."
        self._death: str | None = None
        self._stopping = False
        self._work: _Work | None = None  # the thread's: exclusive work that waits
        self._held: list[_Add] = []  # arrived since
        self._resting = False  # no steps until exclusive work says otherwise
        metrics.watch_engine(
            engine,
            num_waiting=lambda: len(engine.scheduler.waiting) + len(self._held) + self._commands.qsize(),
            asleep=lambda: self.asleep,
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

    def ready(self) -> str | None:
        """Returns None once a real token was computed and requests are taken, otherwise the reason why not."""
        if self.asleep:
            return "The server sleeps; POST /admin/wake wakes it."
        if self._stopping:
            return "The server is shutting down."
        return self.health() or self._not_warm

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
        if self.asleep:
            raise AsleepError("The server sleeps and takes no requests; try again later.")
        self.check_count(len(requests))
        for request in requests:
            self.engine.check(request)
        if self.num_in_flight + len(requests) > self.max_in_flight:
            self._metrics.observe_rejection()
            raise OverloadedError(
                f"{self.num_in_flight} requests are running or waiting, and {self.max_in_flight} is the limit; "
                "try again later."
            )
        ids = [request.request_id for request in requests]
        answers = Answers(ids, self._abort)
        arrived_s = time.monotonic()
        for request in requests:
            self._answers[request.request_id] = answers
            self._commands.put(_Add(request, arrived_s))
        if self._request_timeout_s is not None and self._loop is not None:
            answers.expire_after(self._loop.call_later(self._request_timeout_s, self._expire, ids))
        return answers

    async def exclusively(
        self,
        function: Callable[[Engine], T],
        *,
        mode: Mode,
        timeout_s: float | None = None,
        then_rest: bool = False,
    ) -> T:
        """Runs `function` on the engine's thread with nothing running, and returns or raises what it does.

        One caller at a time. `timeout_s` bounds the wait for its turn: after it nothing has happened and
        `OverloadedError` is raised. `then_rest`: no step follows until the next exclusive work has been done.
        """
        if self._death is not None or self._stopping:
            raise EngineDeadError(self._death or "The server is shutting down.")
        done: Future[T] = Future()
        self._commands.put(_Work(function, mode, then_rest, done))
        waiter = asyncio.wrap_future(done)
        await asyncio.wait([waiter], timeout=timeout_s)
        if not waiter.done() and done.cancel():
            raise OverloadedError(
                f"The running requests did not end within {timeout_s:g} s; nothing was changed. Try again, wait "
                'longer, or use "mode": "pause".'
            )
        return await asyncio.shield(waiter)

    def _abort(self, request_id: str) -> None:
        if self._answers.pop(request_id, None) is not None:
            self._commands.put(_Abort(request_id))

    def _expire(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            answers = self._answers.get(request_id)
            if answers is not None:
                self._abort(request_id)
                message = f"The reply was not complete after {self._request_timeout_s:g} s, this server's limit."
                answers.fail(request_id, RequestTimeoutError(message))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            answers = self._answers.get(output.request_id)
            if answers is None:
                continue  # its client went away while the step ran
            if output.finished:
                del self._answers[output.request_id]
            answers.put(output)

    def _fail_all(self, reason: str) -> None:
        while self._answers:
            request_id, answers = self._answers.popitem()
            answers.fail(request_id, EngineDeadError(reason))

    # The rest runs on the engine's thread.

    def _run(self) -> None:
        try:
            self._warm_up()
            while self._obey():
                if self._work is not None and (self._work.mode == "pause" or not self.engine.has_unfinished):
                    self._do_work(self._work)
                elif self.engine.has_unfinished and not self._resting and not self._step():
                    break
        except Exception as error:  # noqa: BLE001 the thread's boundary: it must not die unseen
            self._die(error)
        self._refuse_work()

    def _warm_up(self) -> None:
        """Computes one token where the engine never has, so that `ready` means what it says."""
        if self.engine.last_schedule.num_tokens == 0:
            self._step_started_s = time.monotonic()
            sampling = SamplingParams(max_tokens=1)
            [output] = self.engine.generate([Request(request_id="warm-up", prompt_token_ids=(0,), sampling=sampling)])
            self._step_started_s = None
            if output.error is not None:
                self._not_warm = output.error
                return
        self._not_warm = None

    def _obey(self) -> bool:
        """Takes the commands that have come, waiting for one when there is nothing to compute; False: stop."""
        while True:
            if self._work is not None and self._work.done.cancelled():
                self._forget_work()
            idle = self._resting or not self.engine.has_unfinished
            try:
                command = self._commands.get(block=idle and self._work is None)
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, _Work):
                self._work = command
            elif isinstance(command, _Abort):
                num_held = len(self._held)
                self._held = [held for held in self._held if held.request.request_id != command.request_id]
                if self.engine.abort(command.request_id) or len(self._held) < num_held:
                    self._metrics.observe_abort()
            elif self._work is not None:
                self._held.append(command)
            else:
                self._add(command)

    def _add(self, command: _Add) -> None:
        try:
            self.engine.add_request(command.request, arrived_s=command.arrived_s)
        except Exception as error:
            logger.exception("Could not queue request %s.", command.request.request_id)
            self._send([_failure(command.request.request_id, _sentence(error))])

    def _do_work(self, work: _Work) -> None:
        if work.done.set_running_or_notify_cancel():
            self.engine.scheduler.preempt_all()
            try:
                result = work.function(self.engine)
            except Exception as error:  # noqa: BLE001 it goes to who asked for the work
                work.done.set_exception(error)
            else:
                self._resting = work.then_rest
                work.done.set_result(result)
        self._forget_work()

    def _forget_work(self) -> None:
        self._work = None
        held, self._held = self._held, []
        for command in held:
            self._add(command)

    def _refuse_work(self) -> None:
        """Answers exclusive work that will never have its turn."""
        waiting = [] if self._work is None else [self._work]
        while not self._commands.empty():
            command = self._commands.get()
            waiting += [command] if isinstance(command, _Work) else []
        for work in waiting:
            if work.done.set_running_or_notify_cancel():
                work.done.set_exception(EngineDeadError(self._death or "The server is shutting down."))

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
