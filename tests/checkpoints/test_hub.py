"""hf:// names: huggingface_hub's own client against a hub on this machine, and a sentence for every way to fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from checkpoints.fake_hub import FakeHub, serve_hub
from serving.tiny_models import save_tiny_folder
from shardline.checkpoints.hub import CONFIG_FILES, TOKENIZER_FILES, hub_name, is_hub_name, pin, resolve
from shardline.checkpoints.huggingface import load_decoder
from shardline.checkpoints.native import find_model_folder
from shardline.cli.main import main
from shardline.config import ShardlineError, UsageError
from shardline.text.tokenizer import Tokenizer

# What hubs hold beside a model: code, pickles, other frameworks' copies, a second copy of the weights.
UNWANTED = (
    "modeling_tiny.py",
    "pytorch_model.bin",
    "training_args.bin",
    "README.md",
    "onnx/model.onnx",
    "onnx/config.json",
    "consolidated.safetensors",
)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    folder = save_tiny_folder(tmp_path_factory.mktemp("published"))
    for name in UNWANTED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not for us")
    return folder


@pytest.fixture
def hub(published, tmp_path, monkeypatch):
    with serve_hub() as hub:
        hub.publish("org/tiny", published)
        # Read from the environment when huggingface_hub is imported, so the environment comes too late here.
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
        yield hub


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_model_is_downloaded_once_without_code_and_pickles(hub: FakeHub, published):
    folder = resolve("hf://org/tiny")
    assert _files(folder) == _files(published) - set(UNWANTED)
    assert not set(hub.fetched) & set(UNWANTED)
    load_decoder(folder)
    assert Tokenizer.load(folder).has_chat_template
    hub.fetched.clear()
    assert find_model_folder("hf://org/tiny") == folder
    assert find_model_folder(Path("hf://org/tiny")) == folder
    assert hub.fetched == []


def test_only_what_is_needed_is_downloaded(hub: FakeHub):
    assert {Path(name).suffix for name in _files(resolve("hf://org/tiny", patterns=CONFIG_FILES))} == {".json"}
    Tokenizer.load(resolve("hf://org/tiny", patterns=TOKENIZER_FILES))
    assert "model.safetensors" not in hub.fetched
    assert main(["plan", "--model.path", "hf://org/tiny", "--data.sequence_length", "64", "--nproc", "1"]) == 0
    assert "model.safetensors" not in hub.fetched


def test_a_revision_and_a_pinned_name_keep_their_commit(hub: FakeHub, published, tmp_path):
    first = next(iter(hub.commits["org/tiny"]))
    pinned = pin("hf://org/tiny")
    assert pinned == f"hf://org/tiny@{first}"
    second = hub.publish("org/tiny", save_tiny_folder(tmp_path / "second", intermediate_size=64))
    assert resolve("hf://org/tiny").name == second
    assert resolve(pinned).name == resolve(f"hf://org/tiny@{first}").name == first
    assert pin("runs/local") == "runs/local"


def test_training_starts_from_a_hub_name_and_records_the_commit(hub: FakeHub, tmp_path, capsys, monkeypatch):
    (tmp_path / "text.txt").write_text("A line of text to learn from, number one.\n\n" * 200)
    words = ["train", "--model.path", "hf://org/tiny", "--data.source", str(tmp_path / "text.txt")]
    words += ["--data.sequence_length", "64", "--data.heldout_fraction", "0", "--train.global_batch", "2"]
    words += ["--run", str(tmp_path / "run"), "--json"]
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path / "cache"))
    assert main([*words, "--train.steps", "1"]) == 0
    (commit,) = hub.commits["org/tiny"]
    assert f"path: hf://org/tiny@{commit}" in (tmp_path / "run" / "config.yaml").read_text()
    assert main([*words, "--train.steps", "2", "--resume"]) == 0
    capsys.readouterr()
    hub.publish("org/tiny", save_tiny_folder(tmp_path / "second"))
    assert main([*words, "--train.steps", "3", "--resume"]) == 2
    assert f"hf://org/tiny@{commit}" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_verbs_take_a_hub_name(hub: FakeHub, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("A line of text to compare on. " * 4)
    assert main(["inspect", "hf://org/tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "llama"
    assert main(["chat", "hf://org/tiny", "--prompt", "Hi", "--max-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_tokens"] <= 2
    assert main(["verify", "hf://org/tiny", "--text", str(tmp_path / "text.txt"), "--num-tokens", "32"]) == 0


def test_a_server_is_called_by_the_hub_name(hub: FakeHub, tmp_path):
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardline", "serve", "hf://org/tiny@main", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as server:
        ready = json.loads(server.stdout.readline())
        server.terminate()
    assert ready["model"] == "org/tiny"


@pytest.mark.parametrize(
    ("status", "code", "error", "text"),
    [
        (403, "GatedRepo", ShardlineError, "is gated: ask for access at http"),
        (401, "RepoNotFound", UsageError, "does not exist on the hub, or is private"),
        (503, "", ShardlineError, "the hub did not give it"),
    ],
)
def test_refusals_say_what_to_do(hub: FakeHub, status, code, error, text):
    hub.refused["org/tiny"] = (status, code)
    with pytest.raises(error, match=text) as caught:
        resolve("hf://org/tiny")
    assert "org/tiny" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_unknown_repository_and_revision(hub: FakeHub):
    with pytest.raises(UsageError, match="check the spelling"):
        resolve("hf://org/tny")
    with pytest.raises(UsageError, match="no revision 'v9'"):
        resolve("hf://org/tiny@v9")


def test_a_download_that_breaks_off_is_finished_by_the_next(hub: FakeHub):
    hub.broken_file = "model.safetensors"
    with pytest.raises(ShardlineError, match=r"run it again \(what has arrived is kept\)"):
        resolve("hf://org/tiny")
    hub.broken_file = None
    load_decoder(resolve("hf://org/tiny"))


def test_a_full_disk_is_one_sentence(hub: FakeHub, monkeypatch):
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full_disk)
    with pytest.raises(ShardlineError, match=r"could not be downloaded \(OSError: .* No space left on device\)"):
        resolve("hf://org/tiny")


def test_offline_takes_the_cache_or_says_so(hub: FakeHub, monkeypatch):
    folder = resolve("hf://org/tiny", patterns=CONFIG_FILES)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("hf://org/tiny", patterns=CONFIG_FILES) == folder
    with pytest.raises(ShardlineError, match="HF_HUB_OFFLINE is set; unset it"):
        resolve("hf://org/tiny")
    with pytest.raises(ShardlineError, match="HF_HUB_OFFLINE is set; unset it"):
        resolve("hf://org/other")


def test_no_network_is_one_sentence(hub: FakeHub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ShardlineError, match=r"the hub did not give it \(.*\); check the network or HF_ENDPOINT"):
        resolve("hf://org/tiny")


def test_the_command_line_honours_hf_hub_offline(tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "shardline", "plan", "--model.path", "hf://org/tiny"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith("shardline plan: hf://org/tiny is not complete in the hub's cache and HF_HUB_OFFLINE")
    assert len(done.stderr.splitlines()) == 1


def test_weights_in_pickles_only_are_refused(hub: FakeHub, published, tmp_path):
    (tmp_path / "old").mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / "old" / name).write_bytes((published / name).read_bytes())
    hub.publish("org/old", tmp_path / "old")
    with pytest.raises(ShardlineError, match=r"has no \.safetensors weights; \.bin files are pickles"):
        resolve("hf://org/old")
    assert "pytorch_model.bin" not in hub.fetched


def test_a_model_that_needs_code_is_refused_from_the_hub_and_from_a_folder(hub: FakeHub, tmp_path):
    folder = save_tiny_folder(tmp_path / "foreign")
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"model_type": "novel", "auto_map": {"AutoModelForCausalLM": "modeling_novel.NovelModel"}}
    (folder / "config.json").write_text(json.dumps(raw))
    hub.publish("org/novel", folder)
    for place in ("hf://org/novel", folder):
        with pytest.raises(UsageError, match=r"needs code .*NovelModel.* one of .*llama"):
            find_model_folder(place)
    raw["model_type"] = "llama"  # then our own decoder is it, and the code stays unread
    (folder / "config.json").write_text(json.dumps(raw))
    assert resolve(folder) == folder


@pytest.mark.parametrize(
    "name", ["hf://tiny", "hf://org/", "hf://a/b/c", "hf://org/../x", "hf://org/a@", "hf://o/a@../b"]
)
def test_malformed_names(name):
    assert is_hub_name(name)
    with pytest.raises(UsageError, match="write hf://ORG/NAME"):
        resolve(name)


def test_names_are_taken_apart():
    assert hub_name("hf://Org/Name-1.5") == ("Org/Name-1.5", None)
    assert hub_name("hf://org/name@refs/pr/1") == ("org/name", "refs/pr/1")
    assert not is_hub_name("runs/hf")
