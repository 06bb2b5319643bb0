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
        (["--devices", "8xH100"], 2, "needs one of MODEL, --preset, --model-shape and --params; there is none of them"),
        (["tiny", "--params", "1e9", "--devices", "8xH100"], 2, "there is MODEL and --params"),
        (["tiny", "--devices", "8xH100", "--micro-batch", "-1"], 2, "--micro-batch -1 must be from 1"),
        (["tiny", "--devices", "8xH100", "--engine", "megatro"], 2, "megatron"),
        (["tiny", "--devices", "8xH100", "--precision", "bf17"], 2, "bf17"),
        (["--params", "1e30", "--devices", "8xH100"], 2, "--params"),
        (["llama-3.1-8b", "--devices", "8xH100", "--layout", "tp=3"], 3, "does not make 8 devices"),
        (["llama-3.1-8b"], 2, "llama-3.1-8b is a model, and a run's config is wanted: add --devices this"),
        (["--for", "serve", "--seq", "512"], 2, "--for, --sequence-length: for a plan on other devices; add --devices"),
        (["--truth", "/absent.csv"], 2, "/absent.csv can't be read"),
        (["tiny", "--devices", "8xH100", "--global-batch", "64", "--micro-batch", "3"], 2, "is not a multiple of"),
        (
            ["tiny", "--devices=8xH100", "--micro-batch=2", "--micro-batches=2", "--global-batch=64", "--layout=dp=8"],
            2,
            "--global-batch 64 is not micro-batch 2 x micro-batches 2 x data 8 = 32; leave one of them out",
        ),
        (
            ["tiny", "--devices", "8xH100", "--micro-batch", "2", "--micro-batches", "2"],
            2,
            "give the data ranks (--layout dp=...) or --global-batch",
        ),
        (["tiny", "--devices", "8xH100", "--optimizer", "adam"], 2, "adamw"),
        (["tiny", "--devices", "8xH100", "--train.seed", "2"], 2, "--train.seed changes a run's config, but none is"),
        (["tiny", "--devices", "8xH100", "--price", "2"], 2, "give --tokens too"),
        (["tiny", "--devices", "8xH100", "--tokens", "-1"], 2, "--tokens -1 must be from"),
        (["tiny", "--devices", "8xH100", "--layout", "schedule=1f2b"], 2, "1f1b"),
        (["tiny", "--devices", "8xH100", "--offload", "gradients"], 2, "optimizer"),
        (["tiny", "--devices", "8xH100", "--for", "serve", "--weights", "int9"], 2, "--weights int9: shardline serves"),
        (["tiny", "--devices", "8xH100", "--for", "serve", "--runtime", "vlm"], 2, "vllm"),
        (["tiny", "--devices", "8xH100", "--for", "serve", "--layout", "pp=2"], 2, "not pipeline"),
        (["tiny", "--devices", "8xH100", "--for", "serve", "--layout", "tp=3"], 3, "4 heads are not a multiple"),
        (["tiny", "--devices", "8xH100", "--for", "serve", "--prompt-tokens", "0"], 2, "--prompt-tokens 0 must be"),
        (["tiny", "--devices", "8xH100", "--for", "serve", "--request-rate", "nan"], 2, "--request-rate nan must be"),
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


def answer_of(words: str, capsys, code: int = 0) -> dict:
    assert main(["plan", *words.split(), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_third_of_the_batch_numbers_is_derived(capsys):
    words = "tiny --devices 8xH100 --micro-batch 2 --layout dp=8"
    layout = answer_of(f"{words} --micro-batches 4", capsys)["layout"]
    assert (layout["micro_batch"], layout["num_micro_batches"], layout["data"]) == (2, 4, 8)
    layout = answer_of(f"{words} --global-batch 32", capsys)["layout"]
    assert layout["num_micro_batches"] == 2


def test_16_bits_are_those_that_the_device_has(capsys):
    words = "llama-3.2-1b --layout zero=3 --devices"
    main(["plan", *f"{words} 8xV100-32GB".split()])
    assert "TFLOP/s in fp16" in capsys.readouterr().out
    main(["plan", *f"{words} 8xA100-40GB".split()])
    assert "TFLOP/s in bf16" in capsys.readouterr().out


def test_a_run_s_config_on_other_devices(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {preset: llama-3.1-8b}\ndata: {sequence_length: 4096}\n"
        "train: {global_batch: 64, micro_batch: 2, precision: bf16}\n"
        "parallel: {zero: 1, tensor: 4, activation_checkpointing: full}\n"
    )
    answer = answer_of(f"{path} --devices 16xA100-80GB", capsys)
    layout = answer["layout"]
    assert (layout["tensor"], layout["data"], layout["zero"], layout["micro_batch"]) == (4, 4, 1, 2)
    assert layout["recompute"] == "full"
    assert layout["num_micro_batches"] == 8
    changed = answer_of(f"{path} --devices 16xA100-80GB --layout tp=2 --parallel.zero 2", capsys)["layout"]
    assert changed["tensor"] == 2


def test_serving(capsys):
    words = "llama-3.1-8b --devices 8xL4 --for serve"
    answer = answer_of(words, capsys)
    assert answer.keys() >= KEYS
    assert answer["fits"] is True
    assert sum(answer["memory_gib"]["parts"].values()) == pytest.approx(answer["memory_gib"]["total"])
    assert answer["layout"]["tensor"] * answer["layout"]["replicas"] <= 8
    rate = answer_of(f"{words} --request-rate 4 --ttft-limit 2", capsys)
    assert rate["serving"]["ttft_s"] < 2
    assert rate["layout"]["num_devices"] <= 8
    none = answer_of(f"{words} --request-rate 4000", capsys, code=3)
    assert none["verdict"] == "too few devices"
    assert main(["plan", *words.split()]) == 0
    said = capsys.readouterr().out
    assert "Serving llama-3.1-8b" in said
    assert "With weights in int8" in said


def test_a_page_is_written_beside_the_answer(tmp_path, capsys):
    path = tmp_path / "plan.html"
    answer_of(f"llama-3.1-8b --devices 8xH100 --html {path}", capsys)
    assert "llama-3.1-8b" in path.read_text()
    words = "llama-3.1-8b --devices 8xL4 --for serve --request-rate 4 --ttft-limit 2"
    answer = answer_of(f"{words} --html {path}", capsys)
    assert "Shardline plan: serving" in path.read_text()
    assert answer["reasons"][0] in path.read_text()
    assert f"shardline plan {words} --html" in path.read_text()
    answer_of(f"deepseek-v3 --devices 8xH100 --for serve --html {path}", capsys, code=3)
    assert "Nothing works" in path.read_text()
    assert main(["plan", "tiny", "--devices", "8xH100", "--html", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_family_that_the_decoder_lacks_is_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 768, "num_layers": 24}))
    assert main(["plan", str(tmp_path), "--devices", "8xH100"]) == 2
    error = capsys.readouterr().err
    assert "model_type" in error
    assert "mamba" in error


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_answer_s_memory_is_counted_too(capsys):
    words = "smollm2-135m --devices 8xH100 --sequence-length 1024 --exact"
    exact = answer_of(f"{words} --layout zero=3,tp=1", capsys)["exact"]
    assert 0.95 * exact["counted_gib"] < exact["calculated_gib"] < 1.15 * exact["counted_gib"]
    refused = answer_of(f"{words} --layout zero=1,tp=1,pp=1", capsys)
    assert refused["fits"]
    assert refused["exact"]["text"].startswith("Not counted: parallel.zero = 1 over 8 data ranks is DDP")
    assert main(["plan", *["mpt-7b", "--devices", "8xH100", "--exact"]]) == 2
    assert "it takes a model that Shardline trains" in capsys.readouterr().err


def test_advice_takes_what_the_user_measured(tmp_path, capsys):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"results": [{"framework": "torch", "tokens_per_s": 50.0}]}))
    answer = answer_of(f"--goal cheapest --offline --measured {path}", capsys)
    assert answer["goal"] == "cheapest"
    assert answer["train"]["chosen"]["name"]
    assert any("50" in json.dumps(each) for each in answer["measured"])
    assert main(["plan", "--goal", "cheapest", "--offline", "--measured", str(tmp_path / "absent.json")]) == 2
    assert "absent.json can't be read" in capsys.readouterr().err
