from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest

from shardline.config.cache import cache_dir, scratch_folder


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SHARDLINE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "shardline"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "shardline", "the XDG rule: a relative path is ignored"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "shardline"
    monkeypatch.setenv("SHARDLINE_CACHE", "~/mine")
    assert cache_dir() == tmp_path / "mine"


def test_a_scratch_folder_becomes_its_place_or_goes_away(tmp_path: Path):
    place = tmp_path / "cache" / "entry"
    with scratch_folder(place) as scratch:
        (scratch / "file").write_text("x")
        scratch.rename(place)
    assert [path.name for path in place.parent.iterdir()] == ["entry"]
    with pytest.raises(RuntimeError, match="stop"), scratch_folder(place):
        raise RuntimeError("stop")
    assert [path.name for path in place.parent.iterdir()] == ["entry"]


def test_remains_of_dead_processes_are_removed_and_those_of_others_are_not(tmp_path: Path):
    dead = next(pid for pid in range(400_000, 500_000) if not psutil.pid_exists(pid))
    host = socket.gethostname()
    names = {"dead": f".entry.{host}.{dead}.a", "alive": f".entry.{host}.1.a", "elsewhere": f".entry.other.{dead}.a"}
    for name in names.values():
        (tmp_path / name).mkdir()
    with scratch_folder(tmp_path / "entry"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {names["alive"], names["elsewhere"]}
