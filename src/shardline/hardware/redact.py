"""Takes out of a report what names a person or a machine, so that it can be shown to others.

    redactor = Redactor.of_this_process(hosts=["node7"], serials=["1560120012345"])
    redactor.text("node7: /home/ada/run")            # "<host-1>: ~/run"
    redactor.values(result)                          # the same in every string of a JSON value

Host names, user names and home folders, UUIDs of devices, serial numbers, PCI and network addresses. The same name
becomes the same word everywhere, so that ranks and machines can still be told apart. Versions stay, though some of
them look like addresses.
"""

from __future__ import annotations

import getpass
import ipaddress
import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["Redactor"]

_UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")
_HOME = re.compile(r"(?<![\w.])(?:/home|/Users)/([^/\s:'\",]+)")
_MAC = re.compile(r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b")
_PCI = re.compile(r"\b[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]\b")
_IPV4 = re.compile(r"(?<![\d.\w+-])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)")
_IPV6 = re.compile(r"(?<![\w:])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?![\w:])")
_COMMON = {"root", "user", "ubuntu", "localhost", "admin", "nobody", "ec2-user", ""}


class Redactor:
    """Replaces names; `versions` are kept though they look like addresses."""

    def __init__(
        self,
        *,
        hosts: Iterable[str] = (),
        users: Iterable[str] = (),
        homes: Iterable[str] = (),
        serials: Iterable[str] = (),
        versions: Iterable[str] = (),
    ) -> None:
        self._words: dict[str, str] = {}
        whole = [host for host in dict.fromkeys(hosts) if host not in _COMMON]
        for number, host in enumerate(whole, start=1):
            self._words[host] = f"<host-{number}>"
            self._words.setdefault(host.partition(".")[0], f"<host-{number}>")
        self._words |= {user: "<user>" for user in users if user not in _COMMON}
        self._words |= {serial: "<serial>" for serial in serials if serial}
        self._homes = [home.rstrip("/") for home in homes if len(home.rstrip("/")) > 1]
        self._versions = set(versions)

    @classmethod
    def of_this_process(
        cls, *, hosts: Iterable[str] = (), serials: Iterable[str] = (), versions: Iterable[str] = ()
    ) -> Redactor:
        """Knows this machine's name, and this user's with the home folder."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user without a name
            user = ""
        home = os.environ.get("HOME") or str(Path("~").expanduser())
        return cls(hosts=[socket.gethostname(), *hosts], users=[user], homes=[home], serials=serials, versions=versions)

    def text(self, text: str) -> str:
        """Returns `text` without names."""
        for home in self._homes:
            text = re.sub(rf"(?<![\w/.]){re.escape(home)}(?![\w-])", "~", text)
        text = _HOME.sub("~", text)
        text = _UUID.sub(lambda match: match[0][:4] + "<uuid>" if match[0][:4] in ("GPU-", "MIG-") else "<uuid>", text)
        text = _MAC.sub("<mac>", text)
        text = _PCI.sub("<pci>", text)
        text = _IPV6.sub(lambda match: "<ip>" if _is_ipv6(match[0]) else match[0], text)
        text = _IPV4.sub(lambda match: match[0] if self._is_version(match[0]) else "<ip>", text)
        for word in sorted(self._words, key=len, reverse=True):
            text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", self._words[word], text)
        return text

    def values(self, value: Any) -> Any:
        """Returns a JSON value with `text` applied to every string in it, keys excepted."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self.values(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.values(inner) for inner in value]
        return value

    def _is_version(self, text: str) -> bool:
        parts = [int(part) for part in text.split(".")]
        return text in self._versions or max(parts) > 255


def _is_ipv6(text: str) -> bool:
    """Whether it is an address; a time of day has colons too."""
    try:
        return len(text) > 2 and bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False
