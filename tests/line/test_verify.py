"""verify finds agreement where there is some, and disagreement where a part has been made wrong."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from models.oracle import save_oracle
from shardline.checkpoints.huggingface import load_decoder, save_folder
from shardline.checkpoints.native import find_model_folder
from shardline.cli.main import main
from shardline.config import UsageError
from shardline.line.quality import measure_quality
from shardline.line.verify import verify
from shardline.models.decoder import Decoder
from shardline.models.presets import preset
from shardline.serving.engine_config import EngineConfig
from shardline.serving.paged import PagedAttention
from shardline.text.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny architecture with random weights large enough for sharp distributions."""
    path = tmp_path_factory.mktemp("model")
    decoder = Decoder(preset("tiny"))
    decoder.initialize(seed=0)
    tensors = {name: tensor * (3.0 if tensor.ndim == 2 else 1.0) for name, tensor in decoder.state_dict().items()}
    save_folder(path, config=decoder.config, tensors=tensors, tokenizer=byte_tokenizer())
    return path


@pytest.fixture(scope="module")
def documents():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (150, 2, 37, 101, 16, 17)]


def test_the_three_agree(folder, documents):
    report = verify(folder, documents=documents)
    assert report.agrees
    assert report.hf_max_abs_logit <= 1e-4
    assert report.hf_argmax_agreement == 1.0
    assert report.train_serve_max_abs_logprob <= 1e-5
    assert 0 < report.train_serve_mean_abs_logprob <= report.train_serve_max_abs_logprob
    assert report.num_tokens == sum(map(len, documents)) - len(documents) + 4 * 8


def test_in_batch_invariant_mode_nothing_differs(folder, documents, capsys, tmp_path):
    report = verify(folder, documents=documents, in_batch_invariant_mode=True)
    assert report.agrees
    assert report.train_serve_max_abs_logprob == report.train_serve_mean_abs_logprob == 0.0
    assert report.hf_argmax_agreement == 1.0
    assert verify(folder, documents=documents).train_serve_max_abs_logprob > 0, "the ordinary mode differs a little"
    (tmp_path / "text").write_text("some words to compare on, " * 9)
    words = ["verify", str(folder), "--text", str(tmp_path / "text")]
    assert main([*words, "--batch-invariant"]) == 0
    assert "difference| 0.00e+00 (must be 0)" in capsys.readouterr().out


def test_what_smaller_forms_cost_is_measured(folder, documents, capsys, tmp_path):
    qualities = {
        (weights, kv): measure_quality(
            folder, documents=documents, config=EngineConfig(quantization=weights, kv_cache_dtype=kv)
        )
        for weights, kv in (("none", "auto"), ("int8", "auto"), ("int4", "auto"), ("none", "bf16"), ("none", "int8"))
    }
    exact = qualities["none", "auto"]
    assert exact.kl_max < 1e-6
    assert exact.num_flips == 0
    assert exact.num_positions == sum(map(len, documents)) - len(documents)
    eight, four = qualities["int8", "auto"], qualities["int4", "auto"]
    assert 0 < 5 * eight.kl_mean < four.kl_mean
    assert 0 < eight.num_flips <= four.num_flips
    assert four.weights_bytes_served < eight.weights_bytes_served < exact.weights_bytes_served / 3
    for kv in ("bf16", "int8"):
        assert exact.kl_mean < qualities["none", kv].kl_mean < four.kl_mean
        assert qualities["none", kv].kv_bytes_per_token_served < exact.kv_bytes_per_token_served
    small = tmp_path / "small"
    assert main(["quantize", str(folder), str(small), "--quantization", "int4"]) == 0
    (tmp_path / "text").write_text("some words to compare on, " * 9)
    words = ["verify", str(small), "--text", str(tmp_path / "text"), "--json"]
    assert main(words) == 2
    assert "--against FOLDER" in capsys.readouterr().err
    assert main([*words, "--against", str(folder)]) == 0
    saved = json.loads(capsys.readouterr().out)
    assert saved["kl_mean"] > 0
    at_load = [*words, "--quantization", "int4"]
    at_load[1] = str(folder)
    assert main(at_load) == 0
    assert json.loads(capsys.readouterr().out) == saved


def test_families_of_every_kind_agree(documents, tmp_path):
    families = ["qwen2-window", "qwen3", "mistral-window", "llama-llama3", "gemma3", "glm4", "bloom", "qwen3-moe"]
    for name in families:
        save_oracle(name, tmp_path / name, vocab_size=320, max_position_embeddings=256)
        byte_tokenizer().save(tmp_path / name)
        report = verify(tmp_path / name, documents=documents[1:])
        assert report.agrees, (name, report)
        assert report.hf_max_abs_logit <= 1e-4, (name, report)
        assert report.train_serve_max_abs_logprob <= 1e-5, (name, report)


def test_ropes_that_depend_on_the_length_are_told_the_document_not_the_row(tmp_path):
    """Documents on both sides of the switch in one packed row; none crosses it while it is being continued."""
    save_oracle("phi3-longrope-short", tmp_path, vocab_size=320)
    byte_tokenizer().save(tmp_path)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (55, 20, 60, 9)]
    assert verify(tmp_path, documents=documents).agrees


def test_a_wrong_trainer_shows_against_transformers_and_the_server(folder, documents, monkeypatch):
    """Packed documents that see one another: the classic silent bug."""
    from shardline.line import verify as module

    monkeypatch.setattr(module, "DenseAttention", lambda documents_BT: module_attention())
    report = verify(folder, documents=documents)
    assert not report.agrees
    assert report.hf_max_abs_logit > 1e-2
    assert report.train_serve_max_abs_logprob > 1e-2
    assert report.worst.document > 0, "the first document has nothing before it to see"


def module_attention():
    from shardline.models.attention import DenseAttention

    return DenseAttention()


def test_a_wrong_server_shows_where_it_is_worst(folder, documents, monkeypatch):
    """A paged attention with a wrong scale: only the served side moves."""
    original = PagedAttention.__call__

    def wrong(self, *args, spec):
        return original(self, *args, spec=dataclasses.replace(spec, scale=spec.scale * 1.05))

    monkeypatch.setattr(PagedAttention, "__call__", wrong)
    report = verify(folder, documents=documents)
    assert report.hf_max_abs_logit <= 1e-4
    assert report.train_serve_max_abs_logprob > 1e-3
    assert not report.agrees
    difference = abs(report.worst.trainer_logprob - report.worst.served_logprob)
    assert difference == pytest.approx(report.train_serve_max_abs_logprob)


def test_nan_weights_never_agree(folder, documents, tmp_path):
    decoder = load_decoder(folder)
    tensors = {name: tensor.detach().clone() for name, tensor in decoder.state_dict().items()}
    tensors["model.norm.weight"][3] = float("nan")
    save_folder(tmp_path, config=decoder.config, tensors=tensors, tokenizer=byte_tokenizer())
    with pytest.raises(ValueError, match="not finite"):
        verify(tmp_path, documents=documents)


def test_the_verb(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path))
    text = tmp_path / "text.txt"
    text.write_text("Some words to compare on. " * 20)
    assert main(["verify", str(folder), "--text", str(text), "--num-tokens", "200", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {
        "hf_max_abs_logit",
        "hf_argmax_agreement",
        "train_serve_max_abs_logprob",
        "train_serve_mean_abs_logprob",
        "num_tokens",
        "worst",
        "batch_invariant",
    }
    assert main(["verify", str(folder), "--text", str(tmp_path / "absent")]) == 2
    assert "Can't read" in capsys.readouterr().err
    text.write_text("")
    assert main(["verify", str(folder), "--text", str(text)]) == 2
    assert "no text of two tokens" in capsys.readouterr().err


def test_what_a_path_means(folder, tmp_path):
    assert find_model_folder(folder) == folder
    with pytest.raises(UsageError, match="neither a model folder"):
        find_model_folder(tmp_path)
    run = tmp_path / "run"
    for step in (3, 12):
        (run / "checkpoints" / f"step-{step}" / "model").mkdir(parents=True)
        (run / "checkpoints" / f"step-{step}" / "model" / "config.json").write_text("{}")
    assert find_model_folder(run) == run / "checkpoints" / "step-12" / "model"
    assert find_model_folder(run / "checkpoints" / "step-3") == run / "checkpoints" / "step-3" / "model"
