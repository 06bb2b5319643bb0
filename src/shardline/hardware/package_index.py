"""When a package was last released, as the user's own package index tells: the simple API of PEP 691 and PEP 700.

    index = find_index()                       # what pip is configured to use; None where it uses none
    released = index.last_release("torch")     # a Release; raises IndexSilentError

pip's settings are honoured: the index, `no-index`, its certificate file, a user and password in the address or in
~/.netrc; and the proxies of the environment. Yanked files and pre-releases do not count; files for all platforms do,
because a package may be alive on another one. Answers are kept for a day.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import gzip
import hashlib
import importlib.util
import json
import netrc
import os
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from shardline.config.cache import cache_dir

__all__ = ["Index", "IndexSilentError", "Release", "find_index", "parse_pip_config", "read_release"]

ACCEPT = "application/vnd.pypi.simple.v1+json"
KEPT_S = 24 * 3600.0
_LARGEST_ANSWER = 64 << 20


class IndexSilentError(Exception):
    """The index did not say when the package was released; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """The last release that counts. `status` is the index's own word on the project (PEP 792), often empty."""

    version: str
    date: datetime.date
    status: str = ""


@dataclass(frozen=True, kw_only=True)
class Index:
    """One index. `timeout_s` is for a whole answer."""

    url: str
    certificates: str | None = None
    proxy: str | None = None
    trusted: bool = False  # pip's `trusted-host`: the certificate is not checked
    timeout_s: float = 4.0

    def last_release(self, package: str) -> Release:
        """Asks for `package`, or returns what was answered within the last day."""
        path = self._cache_path(package)
        kept: dict[str, Any] | None = _read_kept(path)
        if kept is None:
            kept = {"asked": time.time(), **self._ask(package)}
            with contextlib.suppress(OSError):  # a full disk or a read-only home is no reason not to answer
                path.parent.mkdir(parents=True, exist_ok=True)
                scratch = path.with_name(f".{path.name}.{os.getpid()}")
                scratch.write_text(json.dumps(kept), encoding="utf-8")
                os.replace(scratch, path)
        if "silent" in kept:
            raise IndexSilentError(kept["silent"])
        return Release(
            version=kept["version"], date=datetime.date.fromisoformat(kept["date"]), status=kept.get("status", "")
        )

    def _ask(self, package: str) -> dict[str, Any]:
        """Returns what is kept: a release, or why there is none. A connection that fails is not kept, and raises."""
        try:
            kind, body = self._fetch(f"{self.url.rstrip('/')}/{package}/")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return {"silent": f"the package index has no {package}"}
            raise IndexSilentError(f"the package index answered {error.code}") from None
        except (OSError, ValueError, EOFError) as error:  # names, connections, certificates, broken answers
            reason = getattr(error, "reason", error)
            raise IndexSilentError(f"the package index can't be reached ({reason})") from None
        if "json" not in kind:
            return {"silent": "the package index speaks HTML only, without dates"}
        try:
            release = read_release(json.loads(body))
        except (ValueError, TypeError, AttributeError):
            raise IndexSilentError("the package index's answer is not what PEP 691 says") from None
        if release is None:
            return {"silent": f"the package index gives no upload times for {package}"}
        return {"version": release.version, "date": release.date.isoformat(), "status": release.status}

    def _fetch(self, url: str) -> tuple[str, bytes]:
        plain, headers = _authorise(url)
        if urllib.parse.urlsplit(plain).scheme not in ("http", "https"):
            raise ValueError("it is a folder, which has no upload times")
        handlers: list[Any] = []
        if plain.startswith("https"):
            handlers.append(urllib.request.HTTPSHandler(context=_tls(self.certificates, trusted=self.trusted)))
        if self.proxy:
            handlers.append(urllib.request.ProxyHandler({"http": self.proxy, "https": self.proxy}))
        opener = urllib.request.build_opener(*handlers)
        deadline = time.monotonic() + self.timeout_s
        headers |= {"Accept": f"{ACCEPT}, text/html;q=0.1", "Accept-Encoding": "gzip"}
        request = urllib.request.Request(plain, headers=headers)
        with opener.open(request, timeout=self.timeout_s) as answer:
            parts, size = [], 0
            while chunk := answer.read1(1 << 16):
                parts.append(chunk)
                size += len(chunk)
                if time.monotonic() > deadline or size > _LARGEST_ANSWER:
                    raise TimeoutError(f"no whole answer within {self.timeout_s:g} s")
            body = b"".join(parts)
            kind = answer.headers.get("Content-Type", "")
            packed = answer.headers.get("Content-Encoding") == "gzip"
        return kind, gzip.decompress(body) if packed else body

    def _cache_path(self, package: str) -> Path:
        name = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        return cache_dir() / "package-index" / name / f"{package}.json"


def find_index(*, python: str = sys.executable, timeout_s: float = 4.0) -> Index | None:
    """Returns the index that this Python's pip installs from; None where it has none. Where there is no pip to ask
    (uv's environments, Debian's own Python) the environment's variables for it count."""
    text = _run([python, "-m", "pip", "config", "list"])
    if text is None and (bundled := _bundled_pip()):  # an environment that uv made has no pip
        text = _run([python, f"{bundled}/pip", "config", "list"])
    settings = parse_pip_config(text) if text is not None else _environment_of_pip()
    if text is None and "index-url" not in settings:
        return None
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        return None
    url = settings.get("index-url") or settings.get("pypi-url") or _default_of_pip()
    if not url or url.startswith("file:"):
        return None
    return Index(
        url=url,
        certificates=settings.get("cert"),
        proxy=settings.get("proxy"),
        trusted=urllib.parse.urlsplit(url).hostname in settings.get("trusted-host", "").split(),
        timeout_s=timeout_s,
    )


def _environment_of_pip() -> dict[str, str]:
    names = ("index-url", "no-index", "cert", "proxy", "trusted-host")
    values = {name: os.environ.get(f"PIP_{name.upper().replace('-', '_')}") for name in names}
    return {name: value for name, value in values.items() if value}


def parse_pip_config(text: str) -> dict[str, str]:
    """Returns {setting: value} of what `pip config list` prints: the environment over [install] over [global]."""
    found: dict[str, tuple[int, str]] = {}
    ranks = {"global": 0, "install": 1, ":env:": 2}
    for line in text.splitlines():
        key, separator, value = line.partition("=")
        section, _, name = key.strip().rpartition(".")
        if not separator or section not in ranks or not value:
            continue
        plain = value.strip().strip("'\"")
        if name not in found or ranks[section] >= found[name][0]:
            found[name] = ranks[section], plain
    return {name: value for name, (_, value) in found.items()}


def read_release(answer: Mapping[str, Any]) -> Release | None:
    """Returns the last release of a project's answer (PEP 691 with the times of PEP 700); None without times."""
    found: list[tuple[datetime.datetime, str]] = []
    for file in answer["files"]:
        version = _version(str(file["filename"]))
        if file.get("yanked") or not file.get("upload-time") or version is None or version.is_prerelease:
            continue
        found.append((datetime.datetime.fromisoformat(file["upload-time"].replace("Z", "+00:00")), str(version)))
    if not found:
        return None
    uploaded, version = max(found)
    status = (answer.get("project-status") or {}).get("status") or ""
    return Release(version=version, date=uploaded.date(), status="" if status == "active" else status)


def _version(filename: str) -> Version | None:
    try:
        if filename.endswith(".whl"):
            return parse_wheel_filename(filename)[1]
        return parse_sdist_filename(filename)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):  # eggs, installers, names of before the rules
        return None


def _authorise(url: str) -> tuple[str, dict[str, str]]:
    """Returns the address without a password in it, and the header that carries it; netrc as pip does it."""
    parts = urllib.parse.urlsplit(url)
    user, password = parts.username, parts.password
    if user is None and parts.hostname:
        try:
            known = netrc.netrc(os.environ.get("NETRC")).authenticators(parts.hostname)
        except (OSError, netrc.NetrcParseError):
            known = None
        if known:
            user, password = known[0], known[2]
    host = (parts.hostname or "") + (f":{parts.port}" if parts.port else "")
    plain = urllib.parse.urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
    if user is None:
        return plain, {}
    pair = f"{urllib.parse.unquote(user)}:{urllib.parse.unquote(password or '')}"
    return plain, {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


def _default_of_pip() -> str | None:
    """The address that is built into pip."""
    bundled = _bundled_pip()
    places = sys.path + ([bundled] if bundled else [])
    code = f"import sys; sys.path[:] = {places!r}; from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    return (_run([sys.executable, "-c", code]) or "").strip() or None  # an inside of pip, which may move


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _bundled_pip() -> str | None:
    """The wheel of pip that lies in Python's own library, for environments to start with; it runs from where it is."""
    spec = importlib.util.find_spec("ensurepip")  # which Debian leaves out
    if spec is None or spec.origin is None:
        return None
    found = sorted(Path(spec.origin).parent.glob("_bundled/pip-*.whl"))
    return str(found[-1]) if found else None


def _tls(certificates: str | None, *, trusted: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificates)
    if trusted:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _read_kept(path: Path) -> dict[str, Any] | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return kept if 0 <= time.time() - kept["asked"] < KEPT_S else None
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not ours
        return None
