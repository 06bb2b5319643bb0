"""What the doctor says of model folders: a sound one, and one for each heading that is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from serving.tiny_models import bos_tokenizer, save_tiny_folder
from shardline.checkpoints import portability
from shardline.checkpoints.diagnosis import LINE_OF, examine_folder
from shardline.checkpoints.huggingface import load_tensors, read_config, save_folder
from shardline.cli.main import main
from shardline.config import UsageError
from shardline.text.tokenizer import CHATML_TEMPLATE

LINES = ["files", "config", "head", "dtype", "tokenizer", "template", "bos", "eos", "safety"]


@pytest.fixture(autouse=True)
def _files_for_all():
    earlier = os.umask(0o022)
    yield
    os.umask(earlier)


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_tiny_folder(tmp_path / "tiny")


def faults(folder: Path) -> dict[str, tuple[str, str]]:
    """Returns {rule: (line, verdict)} of what is said beside the facts."""
    return {check.rule: (check.name, check.verdict) for check in examine_folder(folder)[1] if check.rule}


def edit(path: Path, **changes: Any) -> None:
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def test_a_sound_folder_is_ok_in_every_line(folder):
    path, checks = examine_folder(folder)
    assert path == folder
    assert [check.name for check in checks] == LINES
    assert {check.verdict for check in checks} == {"ok"}
    assert all(check.facts and not check.reason for check in checks)


def test_every_finding_has_its_heading():
    source = Path(portability.__file__).read_text()
    written = {kind for kind in LINE_OF if f'"{kind}"' in source}
    assert written == LINE_OF.keys()


def test_a_missing_shard_fails(folder):
    config, tensors = read_config(folder), load_tensors(folder)
    (folder / "model.safetensors").unlink()
    save_folder(folder, config=config, tensors=tensors, max_shard_bytes=120_000)
    assert [check.name for check in examine_folder(folder)[1]] == ["files", "index", *LINES[1:]]
    next(folder.glob("model-00002*")).unlink()
    assert faults(folder)["weight-file-missing"] == ("files", "fail")
    (check,) = (check for check in examine_folder(folder)[1] if check.rule == "weight-file-missing")
    assert check.fix == "Download it again."


def test_a_damaged_file_and_an_unknown_family_are_told_beside_the_rest(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    assert faults(folder) == {"unreadable": ("files", "fail")}
    edit(folder / "config.json", model_type="perceiver", architectures=["PerceiverModel"])
    checks = [check for check in examine_folder(folder)[1] if check.verdict == "fail"]
    assert [check.name for check in checks] == ["config"]
    assert "perceiver" in checks[0].reason


def test_old_keys_and_new_keys(folder):
    edit(
        folder / "config.json",
        rope_theta=None,
        rope_scaling=None,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    edit(folder / "config.json", torch_dtype=None, dtype="bfloat16")
    found = faults(folder)
    assert found["rope-in-new-keys-only"] == ("config", "warn")
    assert found["dtype-in-one-key-only"] == ("dtype", "warn")
    assert found["dtype-differs"] == ("dtype", "warn")


def test_heads(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    assert faults(folder) == {"tied-head-differs": ("head", "warn")}
    untied = save_tiny_folder(tmp_path / "untied")
    edit(untied / "config.json", tie_word_embeddings=False)
    assert faults(untied)["untied-without-head"] == ("head", "fail")


def test_a_double_bos(folder, tmp_path):
    tokenizer = bos_tokenizer(chat_template="{{ bos_token }}" + CHATML_TEMPLATE)
    config, tensors = read_config(folder), load_tensors(folder)
    save_folder(tmp_path / "bos", config=config, tensors=tensors, tokenizer=tokenizer)
    assert faults(tmp_path / "bos") == {"double-bos": ("bos", "warn")}


def test_templates(folder):
    broken = "{% for message in messages %}{{ message['content'] }"
    (folder / "chat_template.jinja").write_text(broken)
    edit(folder / "tokenizer_config.json", chat_template=broken)
    assert faults(folder)["template-fails"] == ("template", "fail")
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template=None)
    assert faults(folder) == {"template-missing": ("template", "ok")}


def test_ends_of_a_reply(folder):
    edit(folder / "generation_config.json", eos_token_id=256)
    edit(folder / "config.json", eos_token_id=256)
    assert faults(folder) == {"end-of-turn-is-no-eos": ("eos", "warn")}


def test_pickles_and_code_are_named_and_never_opened(folder):
    os.mkfifo(folder / "optimizer.pt")  # to open it would wait for ever
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/opened'\ntR.")
    (folder / "modeling_tiny.py").write_text("raise SystemExit('run')\n")
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_tiny.Tiny"})
    assert faults(folder) == {"pickle": ("safety", "warn"), "own-code": ("safety", "warn")}
    (folder / "model.safetensors").unlink()
    found = {check.rule: check for check in examine_folder(folder)[1] if check.rule}
    assert found["pickle"].verdict == "fail"
    assert "pytorch_model.bin" in found["pickle"].reason
    assert found["unreadable"].name == "files"


def test_a_folder_without_a_config_is_still_looked_at(tmp_path):
    (tmp_path / "model.ckpt").write_bytes(b"anything")
    assert {"pickle", "unreadable"} <= faults(tmp_path).keys()
    with pytest.raises(UsageError, match="There is no"):
        examine_folder(tmp_path / "absent")
    (tmp_path / "model.ckpt").unlink()
    with pytest.raises(UsageError, match="neither a model folder"):
        examine_folder(tmp_path)
    with pytest.raises(UsageError, match=r"hf://.*ORG/NAME"):
        examine_folder("hf://only-a-name")


def test_the_verb(folder, capsys, monkeypatch):
    assert main(["doctor", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == LINES
    (folder / "tokenizer.json").unlink()
    assert main(["doctor", str(folder), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] == "fail"
    assert {check["name"] for check in result["checks"] if check["verdict"] == "fail"} == {"tokenizer"}
    monkeypatch.setenv("HOME", str(folder.parent))
    main(["doctor", str(folder), "--json", "--redact"])
    assert json.loads(capsys.readouterr().out)["folder"] == "~/tiny"
