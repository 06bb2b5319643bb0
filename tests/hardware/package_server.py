"""A package index on this machine: PEP 691 in JSON, or HTML only, or slow, or one that asks for a password."""

from __future__ import annotations

import base64
import gzip
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def project(name: str, *files: tuple, status: str | None = None) -> dict:
    """An answer; a file is (filename, upload time or None) or (filename, upload time, yanked)."""
    rows = []
    for filename, uploaded, *yanked in files:
        row = {"filename": filename, "url": f"https://files.example/{filename}", "hashes": {}}
        if uploaded is not None:
            row["upload-time"] = uploaded
        row["yanked"] = yanked[0] if yanked else False
        rows.append(row)
    answer = {"meta": {"api-version": "1.1"}, "name": name, "files": rows, "versions": []}
    if status is not None:
        answer["project-status"] = {"status": status}
    return answer


class PackageServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, projects: dict[str, dict], *, html: bool, delay_s: float, password: str, code: int, drip: bool):
        super().__init__(("127.0.0.1", 0), Handler)
        self.projects, self.html, self.delay_s, self.password = projects, html, delay_s, password
        self.code, self.drip, self.asked = code, drip, []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple"


class Handler(BaseHTTPRequestHandler):
    server: PackageServer

    def do_GET(self):
        name = self.path.strip("/").rpartition("/")[2]
        self.server.asked.append((name, self.headers.get("Accept", "")))
        time.sleep(self.server.delay_s)
        expected = f"Basic {base64.b64encode(f'ada:{self.server.password}'.encode()).decode()}"
        if self.server.code != 200:
            return self.answer(self.server.code, "text/plain", b"no")
        if self.server.password and self.headers.get("Authorization") != expected:
            return self.answer(401, "text/plain", b"who are you?")
        if name not in self.server.projects:
            return self.answer(404, "text/plain", b"no such project")
        if self.server.html:
            return self.answer(200, "text/html", b"<!DOCTYPE html><a href='x.whl'>x.whl</a>")
        body = json.dumps(self.server.projects[name]).encode()
        return self.answer(200, "application/vnd.pypi.simple.v1+json", body)

    def answer(self, code: int, kind: str, body: bytes):
        self.send_response(code)
        self.send_header("Content-Type", kind)
        if "json" in kind and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            for start in range(0, len(body), 1 if self.server.drip else len(body)):
                self.wfile.write(body[start : start + 1] if self.server.drip else body)
                if self.server.drip:
                    time.sleep(0.05)
        except (BrokenPipeError, ConnectionResetError):
            return

    def log_message(self, *words):
        """Tests are quiet."""


@contextmanager
def package_server(
    *projects: dict, html: bool = False, delay_s: float = 0.0, password: str = "", code: int = 200, drip: bool = False
):
    named = {each["name"]: each for each in projects}
    server = PackageServer(named, html=html, delay_s=delay_s, password=password, code=code, drip=drip)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
