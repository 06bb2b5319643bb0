"""Runs the application on a socket until it is told to stop.

    listener = bind(host="127.0.0.1", port=0)          # fails before the model is loaded, not after
    serve(app, listener, on_ready=lambda url: print(url))

On SIGTERM or Ctrl-C no new connection is accepted, running requests get `drain_timeout_s` to finish, then they are
cut. A second Ctrl-C does not wait.
"""

from __future__ import annotations

import errno
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from shardline.config.errors import ShardlineError, UsageError

__all__ = ["bind", "serve", "url_of"]

KEEP_ALIVE_S = 75  # longer than the 60 s that proxies and client pools usually keep a connection


def bind(*, host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 takes a free one. `ShardlineError` says why it can't be had.

    Who connects before the model is loaded is answered after it.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port} must be between 0 and 65535.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host!r} is not an address of this machine; try 127.0.0.1 or 0.0.0.0.") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen()  # at once: of two servers that are still loading, the second must be told now
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from None
    return listener


def url_of(listener: socket.socket, *, host: str) -> str:
    """Returns the URL to reach the socket from this machine."""
    port = listener.getsockname()[1]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"


def serve(
    app: ASGIApp,
    listener: socket.socket,
    *,
    host: str = "127.0.0.1",
    on_ready: Callable[[str], None] = lambda url: None,
    drain_timeout_s: int = 30,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains. `on_ready` gets the URL once connections are accepted."""
    url = url_of(listener, host=host)
    config = uvicorn.Config(
        app,
        lifespan="on",
        ws="none",
        access_log=False,
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=drain_timeout_s,
    )
    server = _Server(config, lambda: on_ready(url))
    # uvicorn raises the signal again once it has drained; by then it is dealt with.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        return
    except OSError as error:
        raise _bind_error(host, listener.getsockname()[1], error) from None


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_started()


def _bind_error(host: str, port: int, error: OSError) -> ShardlineError:
    if error.errno == errno.EADDRINUSE:
        return ShardlineError(
            f"Port {port} on {host} is in use; stop what listens there, or pass another --port (0 takes a free one)."
        )
    if error.errno == errno.EACCES:
        return ShardlineError(f"Port {port} on {host} needs special rights; pass a --port of 1024 or more.")
    return UsageError(f"Can't listen on --host {host} --port {port}: {error.strerror or error}.")
