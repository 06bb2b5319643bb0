"""Work that ends when its client goes away.

uvicorn tells of a closed connection only to someone who waits for the next message. `while_connected` waits beside
the work, whether or not anything is being sent, so a client that leaves while its request is still queued is noticed
as surely as one that leaves in mid-stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

__all__ = ["ClientGoneError", "while_connected"]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection before the work was done."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns what `work` returns, or cancels it and raises `ClientGoneError`."""
    watcher = asyncio.create_task(_disconnected(receive))
    worker = asyncio.create_task(work)
    try:
        await asyncio.wait({watcher, worker}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGoneError
        return worker.result()
    finally:
        for task in (watcher, worker):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
