"""A server as a child process, for a demo, a script or a test.

    with start_server("path/to/model") as server:
        stream_chat(server.url, [{"role": "user", "content": "Hello"}])

Needs no torch in the calling process. A server that was started so ends with the process that started it, however that
one ends: it waits for its standard input to close.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from shardline.config.errors import ShardlineError

__all__ = ["ServerProcess", "start_server"]

LOG_TAIL = 2000  # characters of the server's log in an error


class ServerProcess:
    """A running server: its `url`, the served `model` name, and `ready`, all of what it said when it was ready."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str], ready: dict[str, Any]) -> None:
        self.process = process
        self.ready = ready
        self.url: str = ready["url"]
        self.model: str = ready["model"]
        self._log = log

    def log(self) -> str:
        """Returns what the server has written to standard error so far."""
        return _read_log(self._log)

    def stop(self, *, timeout_s: float = 40.0) -> int:
        """Asks the server to drain and end; kills it when it does not. Returns its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        if not self._log.closed:
            self._log.close()
        return self.process.returncode

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_server(
    folder: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 300.0,
) -> ServerProcess:
    """Runs `shardline serve FOLDER` and returns once it answers; `arguments` are more flags, `environment` more
    variables.

    Raises `ShardlineError` with the server's own words when it ends or does not come up in time.
    """
    command = [sys.executable, "-m", "shardline", "serve", str(folder), "--json", "--host", host, "--port", str(port)]
    log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 the server owns it
    variables = {**os.environ, **(environment or {})}
    process = subprocess.Popen(
        [*command, "--end-with-stdin", *arguments],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,  # Ctrl-C is for whoever started it, who then stops it
    )
    late = threading.Timer(timeout_s, process.kill)
    late.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        late.cancel()
    try:
        ready = json.loads(line)
    except ValueError:
        ready = {}
    if "url" in ready:
        return ServerProcess(process, log, ready)
    process.kill()
    process.wait()
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.close()
    said = _read_log(log)
    log.close()
    raise ShardlineError(f"The server for {folder} did not start within {timeout_s:g} s. It said: {said or 'nothing'}")


def _read_log(log: IO[str]) -> str:
    if log.closed:
        return ""
    log.seek(0)
    return log.read().strip()[-LOG_TAIL:]
