"""Keys: requests under some paths pass only with one of the known ones, the rest stays open."""

from __future__ import annotations

import hmac
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from shardline.serving.openai_format import error_body

__all__ = ["RequireKey", "json_response"]


class RequireKey:
    """Middleware. `name` is what an error calls the key."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], prefixes: tuple[str, ...], name: str) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._prefixes = prefixes
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(self._prefixes):
            given = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
            # All keys are compared, in constant time: how long it takes tells nothing.
            if sum(hmac.compare_digest(given, key) for key in self._keys) == 0:
                message = f"The {self._name} is missing or wrong; send the header 'Authorization: Bearer KEY'."
                error = error_body(message, type="invalid_request_error", code="invalid_api_key")
                refusal = json_response(error, status=401, headers={"www-authenticate": "Bearer"})
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def json_response(content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers=headers, media_type="application/json")
