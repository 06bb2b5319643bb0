"""The HTTP side: OpenAI's endpoints, health, metrics, administration, and the chat page.

    app = make_app(engine, ServerConfig(model_name="my-model"))      # an ASGI application

Every error is an OpenAI error object with a real status: 400 for what the client can mend, 401, 404, 405, 413, 429
and 503 with Retry-After, 504. Nothing that a client sends makes a 500. Large bodies are decoded off the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from shardline import __version__
from shardline.serving.admin import Admin, ReloadBody, SleepBody, WakeBody
from shardline.serving.async_engine import AsyncEngine
from shardline.serving.completions import Completions
from shardline.serving.disconnect import ClientGoneError
from shardline.serving.embeddings import EmbeddingBody, Embeddings
from shardline.serving.engine import Engine
from shardline.serving.errors import BodyTooLargeError, ModelNotFoundError, RequestError, ServingError
from shardline.serving.keys import RequireKey, json_response
from shardline.serving.metrics import Metrics
from shardline.serving.openai_format import error_body
from shardline.serving.openapi import openapi_document
from shardline.serving.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    chat_messages,
    read_body,
)
from shardline.serving.responses import ResponseBody, Responses

__all__ = ["ServerConfig", "make_app"]

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # nobody reads it; nginx's number for "client closed request"
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
LARGE_BODY_BYTES = 64 * 2**10  # decoding more than this takes longer than the event loop should be away

Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the HTTP side needs to know.

    folder             where the weights came from: for sleep that gives them back too
    defaults           sampling values for what a request leaves out
    tool_call_parser   how the model writes calls; auto: as its chat template says
    admin_key          without it there are no /admin/ endpoints
    allow_origins      web pages of these origins may call the API; none by default
    request_timeout_s  a reply that takes longer fails with 504
    """

    model_name: str
    folder: str | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    tool_call_parser: str = "auto"
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    allow_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    max_num_waiting: int = 512
    max_stored_responses: int = 1000
    step_timeout_s: float = 300.0
    request_timeout_s: float | None = None


def make_app(engine: Engine, config: ServerConfig) -> Starlette:
    """Returns the application; its lifespan runs the engine's thread."""
    server = _Server(engine, config)
    posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/v1/completions": server.completions,
        "/v1/chat/completions": server.chat_completions,
        "/v1/embeddings": server.embeddings,
        "/v1/responses": server.responses,
        "/tokenize": server.tokenize,
        "/detokenize": server.detokenize,
    }
    if config.admin_key is not None:
        posts |= {
            "/admin/reload": server.admin_reload,
            "/admin/sleep": server.admin_sleep,
            "/admin/wake": server.admin_wake,
        }
    routes = [
        Route("/", server.page),
        Route("/health", server.health),
        Route("/ready", server.ready),
        Route("/version", server.version),
        Route("/metrics", server.metrics),
        Route("/openapi.json", server.openapi),
        Route("/v1/models", server.models),
        Route("/v1/models/{model:path}", server.model),
        Route("/v1/responses/{response_id}", server.stored_response, methods=["GET", "DELETE"]),
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
    ]
    middleware = []
    if config.allow_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allow_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "x-shardline-warning", "x-shardline-logprobs-mode", "retry-after"],
            )
        )
    if config.api_keys:
        protected = ("/v1/", "/tokenize", "/detokenize")
        middleware.append(Middleware(RequireKey, keys=config.api_keys, prefixes=protected, name="API key"))
    if config.admin_key is not None:
        middleware.append(Middleware(RequireKey, keys=(config.admin_key,), prefixes=("/admin/",), name="admin key"))
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
            request_timeout_s=config.request_timeout_s,
        )
        self._completions = Completions(
            self.async_engine,
            model_name=config.model_name,
            defaults=config.defaults,
            tool_call_parser=config.tool_call_parser,
        )
        self._embeddings = Embeddings(self.async_engine, self._completions, model_name=config.model_name)
        self._responses = Responses(
            self.async_engine,
            self._completions,
            model_name=config.model_name,
            defaults=config.defaults,
            max_stored=config.max_stored_responses,
        )
        self._admin = Admin(self.async_engine, folder=config.folder, metrics=self._metrics)
        self._page = resources.files("shardline.serving").joinpath("chat.html").read_text(encoding="utf-8")
        created = int(time.time())
        self._cards = [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "shardline",
                "root": root,
                "parent": None if name == config.model_name else config.model_name,
                "max_model_len": engine.max_model_len,
            }
            for name, root in ((config.model_name, config.model_name), *engine.config.adapters)
        ]
        document = openapi_document(
            model_names=[card["id"] for card in self._cards],
            vocab_size=engine.decoder.config.vocab_size,
            max_model_len=engine.max_model_len,
            admin=config.admin_key is not None,
        )
        self._openapi = msgspec.json.encode(document)
        self._warned: set[str] = set()

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncGenerator[None]:
        self.async_engine.start()
        try:
            yield
        finally:
            await self.async_engine.stop()

    async def completions(self, request: Request) -> Response:
        body, headers = await self._body(request, CompletionBody)
        self._check_model(body.model)
        self._metrics.observe_params(num_choices=body.num_choices, max_tokens=body.max_tokens)
        return await self._completions.complete(request, body, headers)

    async def chat_completions(self, request: Request) -> Response:
        body, headers = await self._body(request, ChatBody)
        self._check_model(body.model)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        self._metrics.observe_params(num_choices=body.num_choices, max_tokens=max_tokens)
        return await self._completions.chat(request, body, headers)

    async def embeddings(self, request: Request) -> Response:
        body, headers = await self._body(request, EmbeddingBody)
        self._check_model(body.model)
        return await self._embeddings.embed(request, body, headers)

    async def responses(self, request: Request) -> Response:
        body, headers = await self._body(request, ResponseBody)
        self._check_model(body.model)
        self._metrics.observe_params(num_choices=1, max_tokens=body.max_output_tokens)
        return await self._responses.create(request, body, headers)

    async def stored_response(self, request: Request) -> Response:
        name = request.path_params["response_id"]
        if request.method == "DELETE":
            return json_response(self._responses.delete(name))
        return json_response(self._responses.get(name))

    async def tokenize(self, request: Request) -> Response:
        body, headers = await self._body(request, TokenizeBody)
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
            tokens = await asyncio.to_thread(self._engine.tokenizer.encode, body.prompt or "")
        content = {"count": len(tokens), "max_model_len": self._engine.max_model_len, "tokens": tokens}
        return json_response(content, headers=headers)

    async def detokenize(self, request: Request) -> Response:
        body, headers = await self._body(request, DetokenizeBody)
        self._check_model(body.model)
        vocab_size = self._engine.decoder.config.vocab_size
        for token in body.tokens:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"tokens has the id {token}, but the vocabulary has ids 0 to {vocab_size - 1}.", param="tokens"
                )
        text = await asyncio.to_thread(self._engine.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response({"prompt": text}, headers=headers)

    async def admin_reload(self, request: Request) -> Response:
        body, headers = await self._body(request, ReloadBody)
        return json_response(await self._admin.reload(body), headers=headers)

    async def admin_sleep(self, request: Request) -> Response:
        body, headers = await self._body(request, SleepBody)
        return json_response(await self._admin.sleep(body), headers=headers)

    async def admin_wake(self, request: Request) -> Response:
        body, headers = await self._body(request, WakeBody)
        return json_response(await self._admin.wake(body), headers=headers)

    async def models(self, _request: Request) -> Response:
        return json_response({"object": "list", "data": self._cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._check_model(name)
        return json_response(next(card for card in self._cards if card["id"] == name))

    async def health(self, _request: Request) -> Response:
        return _state(self.async_engine.health(), code="engine_unhealthy")

    async def ready(self, _request: Request) -> Response:
        return _state(self.async_engine.ready(), code="not_ready")

    async def version(self, _request: Request) -> Response:
        return json_response({"version": __version__, "weights_version": self._admin.weights_version})

    async def metrics(self, _request: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, _request: Request) -> Response:
        return Response(self._openapi, media_type="application/json")

    async def page(self, _request: Request) -> Response:
        return HTMLResponse(self._page, headers={"content-security-policy": PAGE_POLICY})

    async def _body(self, request: Request, kind: type[Body]) -> tuple[Body, dict[str, str]]:
        """Returns the typed body and the headers that warn of what was ignored in it."""
        data = await self._read(request)
        if len(data) > LARGE_BODY_BYTES:
            body, warnings = await asyncio.to_thread(read_body, data, kind)
        else:
            body, warnings = read_body(data, kind)
        return body, self._warning_header(warnings)

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
        if name in (None, "", self._config.model_name) or self._engine.adapter_of(name) is not None:
            return
        served = ", ".join(repr(card["id"]) for card in self._cards)
        raise ModelNotFoundError(
            f"The model {str(name)[:100]!r} is not served here; this server has {served}.",
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


def _state(reason: str | None, *, code: str) -> Response:
    if reason is None:
        return json_response({"status": "ok"})
    return json_response(error_body(reason, type="server_error", code=code), status=503)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers what the router refuses: an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    missing = f"There is nothing at {path}; the API is under /v1/."
    if path.startswith("/admin/"):
        missing = f"There is nothing at {path}; /admin/reload, /admin/sleep and /admin/wake need --admin-key."
    message, code = {
        404: (missing, "not_found"),
        405: (f"{path} does not take {request.method}.", "method_not_allowed"),
    }.get(error.status_code, (error.detail, None))
    body = error_body(message, type="invalid_request_error", code=code)
    return json_response(body, status=error.status_code, headers=dict(error.headers or {}))


async def _serving_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    body = error_body(str(error), type=error.kind, param=error.param, code=error.code)
    return json_response(body, status=error.status, headers=headers)


async def _client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _internal_error(_request: Request, _error: Exception) -> Response:
    """Answers; starlette raises the error again and uvicorn logs it."""
    message = "The server failed on this request; its log has the reason."
    return json_response(error_body(message, type="server_error"), status=500)
