"""Several servers of one model behind one address: data-parallel replicas, each an engine and a process of its own.

    app = make_router([launch(), launch()], launch=launch)      # an ASGI application; launch() starts one server

A request is passed on as it came, and its answer as it comes. Where it goes is said by `routing`. A client that leaves
takes its request with it. A replica that dies is started again, and one whose /health says no gets nothing until it
says yes; a request that a dead one has not answered yet goes to another. /metrics joins what all of them say, under the
label `replica`; what is sent to /admin/ goes to every one, one after the other, so that a reload never stops them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from shardline.config.errors import ShardlineError
from shardline.serving.disconnect import ClientGoneError, while_connected
from shardline.serving.keys import json_response
from shardline.serving.launch import ServerProcess
from shardline.serving.openai_format import error_body
from shardline.serving.routing import PrefixRouting

__all__ = ["make_router"]

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
_RESTART_S = 5.0  # between two attempts to start a replica
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}
)
_RESPONSE_ID = re.compile(r'"id"\s*:\s*"(resp_[0-9A-Za-z_-]+)"')
_METHODS = ["GET", "POST", "DELETE", "OPTIONS", "HEAD"]


class _Replica:
    """One server: its process while there is one, and what is known of it."""

    def __init__(self, index: int, process: ServerProcess) -> None:
        self.index = index
        self.process: ServerProcess | None = process
        self.healthy = True
        self.in_flight = 0

    @property
    def load(self) -> int | None:
        return self.in_flight if self.healthy and self.process is not None else None

    @property
    def url(self) -> str:
        assert self.process is not None
        return self.process.url


class _DiedError(Exception):
    """A replica went away before it answered."""


def make_router(
    processes: Sequence[ServerProcess], *, launch: Callable[[], ServerProcess], max_body_bytes: int = 16 * 2**20
) -> Starlette:
    """Returns the application; its lifespan watches the replicas and ends them. `launch` replaces one that died."""
    router = _Router(processes, launch, max_body_bytes)
    return Starlette(
        routes=[
            Route("/health", router.health),
            Route("/ready", router.ready),
            Route("/metrics", router.metrics),
            Route("/admin/{rest:path}", router.admin, methods=["POST"]),
            Route("/{rest:path}", router.forward, methods=_METHODS),
        ],
        lifespan=router.lifespan,
    )


class _Router:
    """The endpoints, and the replicas behind them."""

    def __init__(
        self, processes: Sequence[ServerProcess], launch: Callable[[], ServerProcess], max_body_bytes: int
    ) -> None:
        self._launch, self._max_body_bytes = launch, max_body_bytes
        self._replicas = [_Replica(index, process) for index, process in enumerate(processes)]
        self._routing = PrefixRouting(len(processes))
        self._responses: OrderedDict[str, int] = OrderedDict()  # stored response -> replica that keeps it
        self._client = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None))

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncGenerator[None]:
        watchers = [asyncio.create_task(self._watch(replica)) for replica in self._replicas]
        try:
            yield
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            await self._client.aclose()
            processes = [replica.process for replica in self._replicas if replica.process is not None]
            await asyncio.gather(*(asyncio.to_thread(process.stop) for process in processes))

    async def health(self, _request: Request) -> Response:
        """200 while any replica can answer."""
        healthy = [replica.index for replica in self._replicas if replica.load is not None]
        if healthy:
            return json_response({"status": "ok", "replicas": {"healthy": len(healthy), "all": len(self._replicas)}})
        return _refuse("None of the replicas is healthy.", status=503, code="engine_unhealthy")

    async def ready(self, request: Request) -> Response:
        return await self.health(request)

    async def metrics(self, _request: Request) -> Response:
        texts = {}
        for replica in self._replicas:
            if replica.load is not None:
                with contextlib.suppress(httpx2.TransportError):
                    texts[replica.index] = (await self._client.get(f"{replica.url}/metrics")).text
        registry = CollectorRegistry()
        registry.register(_Joined(texts))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def admin(self, request: Request) -> Response:
        """Every replica in turn; the first that refuses ends it, and its answer says why."""
        body = await self._read(request)
        if isinstance(body, Response):
            return body
        answer: httpx2.Response | None = None
        for replica in self._replicas:
            if replica.load is None:
                return _refuse(f"Replica {replica.index} is not healthy; nothing more was changed.", status=503)
            answer = await self._client.post(
                f"{replica.url}{request.url.path}", content=body, headers=_passed_on(request.headers.items())
            )
            self._routing.forget(replica.index)
            if answer.status_code != 200:
                break
        assert answer is not None
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    async def forward(self, request: Request) -> Response:
        body = await self._read(request)
        if isinstance(body, Response):
            return body
        path = request.url.path
        tried: set[int] = set()
        while True:
            replica = self._choose(path, body, tried)
            if replica is None:
                return _refuse("No replica can take the request now; try again.", status=503, retry=True)
            tried.add(replica.index)
            try:
                return await while_connected(request.receive, self._pass_on(request, body, replica))
            except ClientGoneError:
                return Response(status_code=499)
            except _DiedError:
                replica.healthy = False
                logger.warning("Replica %d went away before it answered %s.", replica.index, path)

    async def _pass_on(self, request: Request, body: bytes, replica: _Replica) -> Response:
        """Sends the request and returns its answer, of which the body is still to come."""
        url = f"{replica.url}{request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
        outgoing = self._client.build_request(
            request.method, url, content=body, headers=_passed_on(request.headers.items())
        )
        replica.in_flight += 1
        try:
            answer = await self._client.send(outgoing, stream=True)
        except httpx2.TransportError as error:
            replica.in_flight -= 1
            raise _DiedError from error
        except BaseException:
            replica.in_flight -= 1
            raise
        headers = dict(_passed_on(answer.headers.items()))
        return StreamingResponse(self._relay(answer, replica, request.url.path), answer.status_code, headers=headers)

    async def _relay(self, answer: httpx2.Response, replica: _Replica, path: str) -> AsyncIterator[bytes]:
        """The body as it comes. Closing the answer early closes the replica's connection, and it aborts the request."""
        looks = path == "/v1/responses"
        try:
            async for part in answer.aiter_raw():
                if looks and (found := _RESPONSE_ID.search(part.decode("utf-8", "replace"))):
                    looks = False
                    self._responses[found[1]] = replica.index
                    while len(self._responses) > 100_000:
                        self._responses.popitem(last=False)
                yield part
        except httpx2.TransportError:
            replica.healthy = False
            logger.warning("Replica %d went away in the middle of an answer.", replica.index)
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                error = error_body("The replica that wrote this answer has ended.", type="server_error")
                yield b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n"
            else:
                raise
        finally:
            replica.in_flight -= 1
            await answer.aclose()

    def _choose(self, path: str, body: bytes, tried: set[int]) -> _Replica | None:
        loads = [None if replica.index in tried else replica.load for replica in self._replicas]
        text, earlier = _text_of(body) if body else ("", None)
        if path.startswith("/v1/responses/"):
            earlier = path.split("/")[3]
        if earlier is not None and earlier in self._responses:
            keeper = self._responses[earlier]
            return self._replicas[keeper] if loads[keeper] is not None else None
        index = self._routing.choose(text, loads)
        return None if index is None else self._replicas[index]

    async def _read(self, request: Request) -> bytes | Response:
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > self._max_body_bytes:
                return _refuse(
                    f"The body is larger than this server's limit of {self._max_body_bytes} bytes.", status=413
                )
        return b"".join(parts)

    async def _start(self, replica: _Replica) -> None:
        replica.process = await asyncio.to_thread(self._launch)
        replica.healthy = True
        self._routing.forget(replica.index)

    async def _watch(self, replica: _Replica) -> None:
        """Keeps `healthy` true to what the replica says, and starts it again when it has ended."""
        while True:
            await asyncio.sleep(_WATCH_S)
            process = replica.process
            if process is None or process.process.poll() is not None:
                replica.healthy, replica.process = False, None
                if process is not None:
                    code = await asyncio.to_thread(process.stop)
                    logger.error("Replica %d has ended with exit code %d; it is started again.", replica.index, code)
                try:
                    await self._start(replica)
                except ShardlineError as error:
                    logger.error("Replica %d does not start: %s", replica.index, error)
                    await asyncio.sleep(_RESTART_S)
                continue
            try:
                answer = await self._client.get(f"{process.url}/health", timeout=10.0)
                replica.healthy = answer.status_code == 200
            except httpx2.TransportError:
                replica.healthy = False


class _Joined(Collector):
    """The families of several expositions, each sample with its replica as a label."""

    def __init__(self, texts: dict[int, str]) -> None:
        self._texts = texts

    def collect(self) -> list[Any]:
        families: dict[str, Any] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                samples = [
                    sample._replace(labels={**sample.labels, "replica": str(replica)}) for sample in family.samples
                ]
                if family.name in families:
                    families[family.name].samples.extend(samples)
                else:
                    family.samples = samples
                    families[family.name] = family
        return list(families.values())


def _text_of(body: bytes) -> tuple[str, str | None]:
    """Returns what the reply will depend on, in its order, and the id of the response that it goes on from."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        return "", None  # the replica says what is wrong
    if not isinstance(values, dict):
        return "", None
    parts = [values.get("model") or "", values.get("tools") or ""]
    parts += [values.get(name) or "" for name in ("instructions", "messages", "prompt", "input")]
    text = "\x00".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts)
    earlier = values.get("previous_response_id")
    return text, earlier if isinstance(earlier, str) else None


def _passed_on(headers: Any) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]


def _refuse(message: str, *, status: int, code: str | None = None, retry: bool = False) -> Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    headers = {"retry-after": "1"} if retry else None
    return json_response(error_body(message, type=kind, code=code), status=status, headers=headers)
