"""A file of requests in OpenAI's batch format, answered by an engine in this process.

    report = run_batch(app, Path("in.jsonl"), Path("out.jsonl"), num_at_once=64)

Each line goes through the server's own application, without a socket, so an answer is what the server would have sent:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
    {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "body": {...}, ...}, "error": null}

Answers are written as they come, whatever the order of the lines. A line that fails has the server's status and error
object in `response`; one that is no request at all has `error` and no response. What the output file holds already is
skipped, so a run that was cut short goes on when it is started again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from starlette.applications import Starlette
from starlette.types import Message

from shardline.config.errors import ShardlineError, UsageError, nearest

__all__ = ["URLS", "BatchReport", "run_batch"]

logger = logging.getLogger(__name__)

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


@dataclass(kw_only=True)
class BatchReport:
    """What a run did. `num_skipped` lines were answered before it."""

    num_lines: int = 0
    num_succeeded: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    wall_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    custom_id: str | None
    url: str
    body: bytes
    error: dict[str, str] | None = None

    @property
    def id(self) -> str:
        return f"batch_req_{self.number}"


def run_batch(
    app: Starlette,
    source: Path,
    target: Path,
    *,
    num_at_once: int,
    on_line: Callable[[BatchReport], None] = lambda report: None,
) -> BatchReport:
    """Answers the lines of `source` that `target` has no answer to, `num_at_once` of them together.

    Raises `ShardlineError` where a file can't be used, or when the engine stops: what was answered is in `target`.
    """
    if source.resolve() == target.resolve():
        raise UsageError(f"{source} can't be input and output both; name another output file.")
    if not source.is_file():
        raise UsageError(f"There is no file {source}; pass a file with one JSON request a line.")
    answered = _read_answered(target)
    report = BatchReport()
    started_s = time.monotonic()
    try:
        with target.open("a", encoding="utf-8") as output:
            asyncio.run(_Run(app, output, report, on_line).all(_read_lines(source), answered, num_at_once))
    except OSError as error:
        raise ShardlineError(f"Can't write {target}: {error.strerror or error}.") from error
    finally:
        report.wall_s = round(time.monotonic() - started_s, 3)
    return report


class _Run:
    """One run over a file."""

    def __init__(
        self, app: Starlette, output: IO[str], report: BatchReport, on_line: Callable[[BatchReport], None]
    ) -> None:
        self._app = app
        self._output = output
        self._report = report
        self._on_line = on_line

    async def all(self, lines: Iterator[_Line], answered: set[str], num_at_once: int) -> None:
        seen: set[str] = set()
        async with self._app.router.lifespan_context(self._app):
            running: set[asyncio.Task[None]] = set()
            for line in lines:
                self._report.num_lines += 1
                if line.id in answered or (line.custom_id is not None and f"custom {line.custom_id}" in answered):
                    self._report.num_skipped += 1
                    continue
                if line.custom_id in seen:
                    message = f"custom_id {line.custom_id!r} is on an earlier line too; give each line its own."
                    line = _wrong(line.number, message, custom_id=line.custom_id)
                elif line.custom_id is not None:
                    seen.add(line.custom_id)
                if len(running) >= num_at_once:
                    running = await _first_of(running)
                running.add(asyncio.create_task(self._one(line)))
            while running:
                running = await _first_of(running)

    async def _one(self, line: _Line) -> None:
        response = None
        if line.error is None:
            status, request_id, body = await self._ask(line)
            if status == 503:
                raise ShardlineError(f"{body['error']['message']} What was answered is kept; run it again to go on.")
            response = {"status_code": status, "request_id": request_id, "body": body}
            usage = body.get("usage") or {}
            self._report.prompt_tokens += usage.get("prompt_tokens", 0)
            self._report.completion_tokens += usage.get("completion_tokens", 0)
        succeeded = response is not None and response["status_code"] == 200
        self._report.num_succeeded += succeeded
        self._report.num_failed += not succeeded
        answer = {"id": line.id, "custom_id": line.custom_id, "response": response, "error": line.error}
        self._output.write(json.dumps(answer, ensure_ascii=False) + "\n")
        self._output.flush()
        self._on_line(self._report)

    async def _ask(self, line: _Line) -> tuple[int, str, dict[str, Any]]:
        """Sends a line through the application; returns the status, the request's id and the body."""
        incoming: list[Message] = [{"type": "http.request", "body": line.body, "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            if not incoming:
                await asyncio.Event().wait()  # this client never hangs up
            return incoming.pop()

        async def send(message: Message) -> None:
            sent.append(message)

        path = line.url.encode()
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": line.url,
            "raw_path": path,
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(line.body)).encode())],
            "server": None,
            "client": None,
        }
        try:
            await self._app(scope, receive, send)
        except Exception:  # the application has answered 500 by now, and raises for the server's log
            if not sent:
                raise
            logger.exception("Line %d failed.", line.number)
        start, *parts = sent
        headers = dict(start["headers"])
        body = json.loads(b"".join(part.get("body", b"") for part in parts))
        return start["status"], headers.get(b"x-request-id", b"").decode(), body


async def _first_of(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Waits until a task is done, raises its error, and returns the others."""
    done, others = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    errors = [error for task in done if (error := task.exception()) is not None]
    if errors:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        raise errors[0]
    return others


def _read_lines(path: Path) -> Iterator[_Line]:
    with path.open("rb") as file:
        for number, data in enumerate(file, start=1):
            if data.strip():
                yield _read_line(number, data)


def _read_line(number: int, data: bytes) -> _Line:
    try:
        line = json.loads(data)
    except (ValueError, RecursionError) as error:
        return _wrong(number, f"Line {number} is not valid JSON: {error}.")
    if not isinstance(line, dict):
        return _wrong(number, f"Line {number} is not a JSON object.")
    custom_id, url, body = line.get("custom_id"), line.get("url"), line.get("body")
    if not isinstance(custom_id, str):
        return _wrong(number, f"Line {number} has no custom_id, which must be a text.")
    if line.get("method", "POST") != "POST":
        return _wrong(number, f"method {line['method']!r} must be 'POST'.", custom_id=custom_id)
    if url not in URLS:
        return _wrong(number, f"url {url!r} is not one for batches{nearest(str(url), URLS)}", custom_id=custom_id)
    if not isinstance(body, dict):
        return _wrong(number, "body must be a JSON object.", custom_id=custom_id)
    if body.get("stream"):
        return _wrong(number, "stream is not for batches; leave it out.", custom_id=custom_id)
    return _Line(number, custom_id, url, json.dumps(body).encode())


def _wrong(number: int, message: str, *, custom_id: str | None = None) -> _Line:
    return _Line(number, custom_id, "", b"", error={"code": "invalid_line", "message": message})


def _read_answered(target: Path) -> set[str]:
    """Returns the ids of what the output file answers; cuts off a last line that was not written to its end."""
    answered: set[str] = set()
    if not target.exists():
        return answered
    end = 0
    with target.open("rb+") as file:
        for data in file:
            if not data.endswith(b"\n"):
                break
            try:
                line = json.loads(data)
                answered.add(line["id"] if line["custom_id"] is None else f"custom {line['custom_id']}")
            except (ValueError, TypeError, KeyError):
                raise UsageError(f"{target} holds something else than a batch's answers; name another file.") from None
            end += len(data)
        file.truncate(end)
    return answered
