"""The HTTP side: OpenAI's endpoints, health, metrics, and the chat page.

    app = make_app(engine, ServerConfig(model_name="my-model"))      # an ASGI application

Every error is an OpenAI error object with a real status: 400 for what the client can mend, 401, 404, 405, 413, 429
with Retry-After, 503 when the engine has stopped. Nothing that a client sends makes a 500.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from shardline import __version__
from shardline.serving.async_engine import AsyncEngine
from shardline.serving.completions import Completions
from shardline.serving.disconnect import ClientGoneError
from shardline.serving.engine import Engine
from shardline.serving.errors import (
    BodyTooLargeError,
    ModelNotFoundError,
    OverloadedError,
    RequestError,
    ServingError,
)
from shardline.serving.metrics import Metrics
from shardline.serving.openai_format import error_body
from shardline.serving.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    chat_messages,
    read_body,
)

__all__ = ["ServerConfig", "make_app"]

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # nobody reads it; nginx's number for "client closed request"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the HTTP side needs to know. `defaults` are sampling values for what a request leaves out."""

    model_name: str
    defaults: dict[str, Any] = field(default_factory=dict)
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    max_num_waiting: int = 512
    step_timeout_s: float = 300.0


def make_app(engine: Engine, config: ServerConfig) -> Starlette:
    """Returns the application; its lifespan runs the engine's thread."""
    server = _Server(engine, config)
    json_endpoints: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/v1/completions": server.completions,
        "/v1/chat/completions": server.chat_completions,
        "/tokenize": server.tokenize,
        "/detokenize": server.detokenize,
    }
    routes = [
        Route("/", server.page),
        Route("/health", server.health),
        Route("/ready", server.health),
        Route("/version", server.version),
        Route("/metrics", server.metrics),
        Route("/v1/models", server.models),
        Route("/v1/models/{model:path}", server.model),
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in json_endpoints.items()),
    ]
    middleware = [Middleware(_RequireKey, keys=config.api_keys)] if config.api_keys else []
    app = Starlette(
        routes=routes,
        middleware=middleware,
        lifespan=server.lifespan,
        exception_handlers={
            HTTPException: _http_error,
            ServingError: _serving_error,
            ClientGoneError: _client_gone,
            ClientDisconnect: _client_gone,
            Exception: _internal_error,
        },
    )
    app.state.async_engine = server.async_engine
    return app


class _Server:
    """The endpoints."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self._config = config
        self._engine = engine
        self._metrics = Metrics(config.model_name)
        self.async_engine = AsyncEngine(
            engine,
            metrics=self._metrics,
            max_num_waiting=config.max_num_waiting,
            step_timeout_s=config.step_timeout_s,
        )
        self._completions = Completions(self.async_engine, model_name=config.model_name, defaults=config.defaults)
        self._page = resources.files("shardline.serving").joinpath("chat.html").read_text(encoding="utf-8")
        self._card = {
            "id": config.model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "shardline",
            "root": config.model_name,
            "parent": None,
            "max_model_len": engine.max_model_len,
        }
        self._warned: set[str] = set()

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncGenerator[None]:
        self.async_engine.start()
        yield
        await self.async_engine.stop()

    async def completions(self, request: Request) -> Response:
        body, warnings = read_body(await self._read(request), CompletionBody)
        self._check_model(body.model)
        return await self._completions.complete(request, body, self._warning_header(warnings))

    async def chat_completions(self, request: Request) -> Response:
        body, warnings = read_body(await self._read(request), ChatBody)
        self._check_model(body.model)
        return await self._completions.chat(request, body, self._warning_header(warnings))

    async def tokenize(self, request: Request) -> Response:
        body, warnings = read_body(await self._read(request), TokenizeBody)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Send either prompt or messages.", param="prompt")
        if body.messages is not None:
            tokens = await self._completions.encode_chat(
                chat_messages(body.messages), add_generation_prompt=body.add_generation_prompt
            )
        elif body.add_special_tokens:
            tokens = await self._completions.encode_prompt(body.prompt or "")
        else:
            tokens = self._engine.tokenizer.encode(body.prompt or "")
        content = {"count": len(tokens), "max_model_len": self._engine.max_model_len, "tokens": tokens}
        return _json(content, headers=self._warning_header(warnings))

    async def detokenize(self, request: Request) -> Response:
        body, warnings = read_body(await self._read(request), DetokenizeBody)
        self._check_model(body.model)
        vocab_size = self._engine.decoder.config.vocab_size
        for token in body.tokens:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"tokens has the id {token}, but the vocabulary has ids 0 to {vocab_size - 1}.", param="tokens"
                )
        text = self._engine.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return _json({"prompt": text}, headers=self._warning_header(warnings))

    async def models(self, _request: Request) -> Response:
        return _json({"object": "list", "data": [self._card]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return _json(self._card)

    async def health(self, _request: Request) -> Response:
        reason = self.async_engine.health()
        if reason is None:
            return _json({"status": "ok"})
        return _json(error_body(reason, type="server_error", code="engine_unhealthy"), status=503)

    async def version(self, _request: Request) -> Response:
        return _json({"version": __version__})

    async def metrics(self, _request: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(self, _request: Request) -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return HTMLResponse(self._page, headers={"content-security-policy": policy})

    async def _read(self, request: Request) -> bytes:
        """Returns the body, reading no more than the limit."""
        limit = self._config.max_body_bytes
        announced = request.headers.get("content-length", "")
        chunks, size = [], 0
        if not (announced.isdecimal() and int(announced) > limit):
            async for chunk in request.stream():
                chunks.append(chunk)
                size += len(chunk)
                if size > limit:
                    break
            else:
                return b"".join(chunks)
        raise BodyTooLargeError(f"The body is larger than this server's limit of {limit} bytes.")

    def _check_model(self, name: str | None) -> None:
        if name in (None, "", self._config.model_name):
            return
        raise ModelNotFoundError(
            f"The model {str(name)[:100]!r} is not served here; this server has {self._config.model_name!r}.",
            param="model",
        )

    def _warning_header(self, warnings: list[str]) -> dict[str, str]:
        if not warnings:
            return {}
        for warning in warnings:
            if warning not in self._warned and len(self._warned) < 1000:
                self._warned.add(warning)
                logger.warning("A request was answered, but %s", warning)
        return {"x-shardline-warning": "; ".join(warnings)}


class _RequireKey:
    """Lets requests to the API through only with a known key; health, metrics and the page stay open."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(("/v1/", "/tokenize", "/detokenize")):
            given = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
            # All keys are compared, in constant time: how long it takes tells nothing.
            if sum(hmac.compare_digest(given, key) for key in self._keys) == 0:
                message = "The API key is missing or wrong; send the header 'Authorization: Bearer KEY'."
                error = error_body(message, type="invalid_request_error", code="invalid_api_key")
                await _json(error, status=401, headers={"www-authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _json(content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers=headers, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers what the router refuses: an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    message, code = {
        404: (f"There is nothing at {path}; the API is under /v1/.", "not_found"),
        405: (f"{path} does not take {request.method}.", "method_not_allowed"),
    }.get(error.status_code, (error.detail, None))
    body = error_body(message, type="invalid_request_error", code=code)
    return _json(body, status=error.status_code, headers=dict(error.headers or {}))


async def _serving_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    headers = {"retry-after": "1"} if isinstance(error, OverloadedError) else {}
    body = error_body(str(error), type=error.kind, param=error.param, code=error.code)
    return _json(body, status=error.status, headers=headers)


async def _client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _internal_error(_request: Request, _error: Exception) -> Response:
    """Answers; starlette raises the error again and uvicorn logs it."""
    message = "The server failed on this request; its log has the reason."
    return _json(error_body(message, type="server_error"), status=500)
