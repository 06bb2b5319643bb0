"""One folder, one server process and one in-process server for all serving tests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn

from serving.tiny_models import make_engine, save_tiny_folder
from shardline.serving.async_engine import AsyncEngine
from shardline.serving.engine import Engine
from shardline.serving.http import ServerConfig, make_app
from shardline.serving.launch import ServerProcess, start_server
from shardline.serving.server import bind, url_of


class LocalServer:
    """The real application on a real socket, in this process: its engine can be looked at."""

    def __init__(self, engine: Engine, async_engine: AsyncEngine, url: str) -> None:
        self.engine = engine
        self.async_engine = async_engine
        self.url = url

    def wait_until_idle(self, *, timeout_s: float = 20.0) -> None:
        """Returns when nothing runs and every block is free; fails when that does not come."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            idle = not self.engine.has_unfinished and self.async_engine.num_in_flight == 0
            if idle and self.engine.blocks.num_free == self.engine.blocks.num_blocks:
                return
            time.sleep(0.01)
        raise AssertionError(f"still busy: {self.engine.scheduler.running} {self.engine.scheduler.waiting}")


@contextmanager
def local_server(engine: Engine, **config: object) -> Iterator[LocalServer]:
    app = make_app(engine, ServerConfig(**{"model_name": "tiny", **config}))  # type: ignore[arg-type]
    listener = bind(host="127.0.0.1", port=0)
    url = url_of(listener, host="127.0.0.1")
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=[listener]),))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server ended before it started"
            time.sleep(0.005)
        yield LocalServer(engine, app.state.async_engine, url)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
        listener.close()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def server_process(tiny_folder: Path) -> Iterator[ServerProcess]:
    with start_server(tiny_folder, arguments=["--max-model-len", "256", "--max-num-seqs", "4"]) as server:
        yield server


@pytest.fixture(scope="module")
def local() -> Iterator[LocalServer]:
    with local_server(make_engine(max_num_seqs=2)) as server:
        yield server
