"""`shardline plan` for other devices, and over published runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardline.cli.main import main

TRUTH = Path(__file__).parents[1] / "planning" / "plan_truth.csv"
KEYS = {
    "fits",
    "verdict",
    "memory_gib",
    "step_s",
    "tokens_per_s_per_device",
    "mfu",
    "layout",
    "reasons",
    "alternatives",
}


def test_a_preset_on_eight_cards(capsys):
    assert main(["plan", "llama-3.1-8b", "--devices", "8xH100", "--sequence-length", "8192", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() >= KEYS
    assert answer["fits"] is True
    assert answer["memory_gib"]["low"] < answer["memory_gib"]["total"] < answer["memory_gib"]["high"]
    assert sum(answer["memory_gib"]["parts"].values()) == pytest.approx(answer["memory_gib"]["total"])
    assert answer["layout"].keys() >= {
        "data",
        "tensor",
        "pipeline",
        "zero",
        "micro_batch",
        "num_micro_batches",
        "schedule",
        "recompute",
        "offload",
    }
    assert answer["reasons"]
    assert answer["alternatives"]


def test_a_published_row_by_its_numbers(capsys):
    words = "plan --model-shape layers=40,hidden=5120,heads=40,ffn=20480,vocab=51200 --seq 2048 --micro-batch 1"
    words += " --global-batch 64 --precision fp16_mixed --layout tp=4,pp=2,zero=1 --recompute full --engine megatron"
    assert main([*words.split(), "--devices", "8xV100-32GB", "--json"]) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert (layout["tensor"], layout["pipeline"], layout["data"], layout["recompute"]) == (4, 2, 1, "full")
    assert layout["num_micro_batches"] == 64


def test_what_does_not_fit_exits_with_3_and_all_figures(capsys):
    words = ["plan", "--params", "70e9", "--devices", "2xRTX-4090"]
    assert main([*words, "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is False
    assert answer["verdict"] == "does not fit"
    assert answer["memory_gib"]["total"] > answer["memory_gib"]["capacity"]
    assert main(words) == 3
    assert "nothing fits" in capsys.readouterr().out


def test_a_model_folder_s_config_is_read(tmp_path, capsys):
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (str(tmp_path), str(tmp_path / "config.json")):
        assert main(["plan", model, "--devices", "a100-80gb", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["fits"]


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["llama-3.1-8b", "--devices", "8xH1000"], 2, "not in the catalogue"),
        (["llama-3.1-8b", "--devices", "0xH100"], 2, "0xH100"),
        (["llama-3.1-9b", "--devices", "8xH100"], 2, "llama-3.1-8b"),
        (["--devices", "8xH100"], 2, "needs one of MODEL, --model-shape and --params; there is none of them"),
        (["tiny", "--params", "1e9", "--devices", "8xH100"], 2, "there is MODEL and --params"),
        (["tiny", "--devices", "8xH100", "--micro-batch", "-1"], 2, "--micro-batch -1 must be from 1"),
        (["tiny", "--devices", "8xH100", "--engine", "megatro"], 2, "megatron"),
        (["tiny", "--devices", "8xH100", "--precision", "bf17"], 2, "bf17"),
        (["--params", "1e30", "--devices", "8xH100"], 2, "--params"),
        (["llama-3.1-8b", "--devices", "8xH100", "--layout", "tp=3"], 3, "does not make 8 devices"),
        (["--truth", "/absent.csv"], 2, "/absent.csv can't be read"),
    ],
    ids=str,
)
def test_wrong_words_are_one_sentence(words: list[str], code: int, sentence: str, capsys):
    assert main(["plan", *words]) == code
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


def test_published_runs_are_predicted_in_the_file_s_order(capsys):
    assert main(["plan", "--truth", str(TRUTH), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["row"] for row in answer["rows"]] == list(range(208))
    assert {"memory_gib", "tokens_per_s_per_device", "fits", "skipped"} <= answer["rows"][0].keys()
    assert answer["summary"]["num_rows"] == 208
    assert not answer["summary"]["wrongly_fits"]
