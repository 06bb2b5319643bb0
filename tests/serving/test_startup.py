"""Opening a folder for serving: what is reported, and where sampling defaults come from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from serving.tiny_models import make_request, save_tiny_folder
from shardline.config import ShardlineError, UsageError
from shardline.hardware.memory import rss_bytes
from shardline.kernels import invariance
from shardline.serving.engine import EngineConfig, load_engine
from shardline.serving.server import bind
from shardline.serving.startup import open_engine

LIMITS = EngineConfig(max_model_len=128, max_num_seqs=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_folder(tmp_path / "model")


def test_the_folders_sampling_values_are_applied_loudly_unless_told_not_to(folder: Path):
    path = folder / "generation_config.json"
    values = {**json.loads(path.read_text()), "temperature": 0.6, "top_k": 20, "do_sample": True}
    path.write_text(json.dumps(values))
    opened = open_engine(folder, LIMITS)
    assert opened.defaults == {"temperature": 0.6, "top_k": 20}
    report = "\n".join(opened.lines())
    assert "GENERATION_CONFIG.JSON IS APPLIED" in report
    assert "temperature = 0.6, top_k = 20" in report
    plain = open_engine(folder, LIMITS, generation_config="none")
    assert plain.defaults == {}
    assert "leaves out temperature = 0.6, top_k = 20" in "\n".join(plain.lines())


def test_a_folder_with_values_that_no_request_could_use_is_refused(folder: Path):
    (folder / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(UsageError, match="top_p = 7"):
        open_engine(folder, LIMITS)


def test_the_report_has_the_budget_and_the_phases(folder: Path):
    report = "\n".join(open_engine(folder, LIMITS).lines())
    for words in ("tokenizer", "weights", "warm-up", "256 tokens", "2 requests of full length", "as asked"):
        assert words in report


@pytest.mark.parametrize("sizes", [None, (1,)], ids=["as this machine is", "none proven"])
def test_batch_invariant_start_proves_itself_and_says_so(
    folder: Path, sizes: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
):
    if sizes is not None:
        monkeypatch.setattr(invariance, "_sizes", {})
        monkeypatch.setattr(invariance, "_prove", lambda sample, product: sizes)
    opened = open_engine(folder, dataclasses.replace(LIMITS, batch_invariant=True))
    [line] = [line for line in opened.lines() if line.startswith("invariant")]
    assert "proof" in opened.phases_s
    assert "SLOW: rows go one by one" in line if sizes else "tiles of up to" in line
    with pytest.raises(UsageError, match="--tensor-parallel-size 1"):
        open_engine(folder, dataclasses.replace(LIMITS, batch_invariant=True, tensor_parallel_size=2))


def test_a_truncated_folder_is_one_sentence(folder: Path):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ShardlineError, match=r"model.safetensors is truncated or damaged"):
        open_engine(folder, LIMITS)


def test_bf16_serves_and_scores_close_to_fp32(folder: Path):
    request = make_request("a", "some prompt", max_tokens=0, prompt_logprobs=0)
    [exact] = load_engine(folder, LIMITS).generate([request])
    engine = load_engine(folder, EngineConfig(max_model_len=128, max_num_seqs=2, dtype="bf16"))
    [rounded] = engine.generate([request])
    assert engine.budget.bytes_per_token * 2 == load_engine(folder, LIMITS).budget.bytes_per_token
    differences = [abs(a - b) for a, b in zip(exact.prompt_logprobs[1:], rounded.prompt_logprobs[1:], strict=True)]
    assert 0 < max(differences) < 0.5


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", 70000, "--port 70000 must be between"),
        ("no.such.host.invalid", 0, "is not an address of this machine"),
        ("192.0.2.1", 0, "192.0.2.1"),
    ],
)
def test_an_address_that_can_not_be_had_is_one_sentence(host: str, port: int, words: str):
    with pytest.raises(ShardlineError, match=words):
        bind(host=host, port=port)


def test_running_replies_must_fit_in_a_step(folder: Path):
    with pytest.raises(UsageError, match="--max-num-batched-tokens 4 is less than --max-num-seqs 8"):
        load_engine(folder, EngineConfig(max_num_batched_tokens=4, max_num_seqs=8))


def test_two_servers_that_are_still_loading_can_not_have_the_same_port():
    with bind(host="127.0.0.1", port=0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ShardlineError, match=f"Port {port} on 127.0.0.1 is in use"):
            bind(host="127.0.0.1", port=port)


def test_a_large_kv_cache_takes_no_memory_before_it_is_used(folder: Path):
    before = rss_bytes()
    engine = load_engine(folder, EngineConfig(max_num_seqs=2, kv_cache_bytes=2**30))
    assert engine.budget.num_tokens * engine.budget.bytes_per_token > 0.9 * 2**30
    [output] = engine.generate([make_request("a", "some prompt", max_tokens=4)])
    assert output.finished
    assert rss_bytes() - before < 2**28
