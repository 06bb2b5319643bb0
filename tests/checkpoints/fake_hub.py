"""A hub on this machine for huggingface_hub's own client: the four requests that a download makes, over real HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class FakeHub:
    """`commits` maps ORG/NAME to {commit: folder}, the last one being `main`; `refused` maps it to an error code."""

    commits: dict[str, dict[str, Path]] = field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)
    broken_file: str | None = None
    url: str = ""

    def publish(self, name: str, folder: Path) -> str:
        """Makes `folder` the newest commit of `name` and returns the commit."""
        versions = self.commits.setdefault(name, {})
        commit = hashlib.sha1(f"{name}{len(versions)}".encode()).hexdigest()
        versions[commit] = folder
        return commit

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Returns (status, headers, body) of a GET."""
        words = unquote(urlsplit(path).path).strip("/").split("/")
        api = words[:2] == ["api", "models"]
        words = words[2:] if api else words
        name, (verb, revision, *rest) = "/".join(words[:2]), words[2:]
        if name in self.refused:
            status, code = self.refused[name]
            return status, {"X-Error-Code": code, "X-Error-Message": code}, b"{}"
        if name not in self.commits:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        versions = self.commits[name]
        commit = list(versions)[-1] if revision == "main" else revision
        if commit not in versions:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if verb == "revision":
            return 200, {}, json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": []}).encode()
        if verb == "tree":
            files = sorted(file for file in versions[commit].rglob("*") if file.is_file())
            return 200, {}, json.dumps([self._entry(file, versions[commit]) for file in files]).encode()
        file = "/".join(rest)
        body = (versions[commit] / file).read_bytes()
        if file == self.broken_file:
            return 403, {}, b""
        return 200, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": commit}, body

    @staticmethod
    def _entry(file: Path, folder: Path) -> dict[str, object]:
        body = file.read_bytes()
        name = str(file.relative_to(folder))
        return {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    """Yields a hub that answers at `url` until the block ends."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._reply(with_body=False)

        def do_GET(self) -> None:
            if "/resolve/" in self.path:
                hub.fetched.append(unquote(urlsplit(self.path).path).rpartition("/")[2])
            self._reply(with_body=True)

        def _reply(self, *, with_body: bool) -> None:
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
