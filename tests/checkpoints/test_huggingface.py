"""Hugging Face folders: bit-exact both ways, readable by transformers, and clear about what is broken."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from models.oracle import CONFIGS, save_oracle
from shardline.checkpoints.huggingface import (
    load_decoder,
    load_tensors,
    read_config,
    read_generation_config,
    save_folder,
)
from shardline.config import ShardlineError, UsageError
from shardline.models.families import read_model_config


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    save_oracle(request.param, path)
    return path


@pytest.fixture
def llama(tmp_path):
    save_oracle("llama", tmp_path / "llama")
    return tmp_path / "llama"


def test_transformers_opens_what_we_save_and_computes_the_same(folder, tmp_path):
    save_folder(tmp_path, config=read_config(folder), tensors=load_tensors(folder))
    tokens = torch.arange(3, 23).unsqueeze(0)
    with torch.no_grad():
        before = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")(tokens).logits
        after = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")(tokens).logits
    assert torch.equal(before, after)


def test_loaded_and_saved_again_is_bit_exact(folder, tmp_path):
    save_folder(tmp_path / "one", config=read_config(folder), tensors=load_tensors(folder))
    save_folder(tmp_path / "two", config=read_config(tmp_path / "one"), tensors=load_tensors(tmp_path / "one"))
    original, one = load_file(folder / "model.safetensors"), load_file(tmp_path / "one" / "model.safetensors")
    assert original.keys() == one.keys()
    assert all(torch.equal(original[name], one[name]) for name in original)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_every_key_of_config_json_is_carried_through(folder, tmp_path):
    save_folder(tmp_path, config=read_config(folder), tensors=load_tensors(folder))
    before = json.loads((folder / "config.json").read_text())
    after = json.loads((tmp_path / "config.json").read_text())
    rope = before.pop("rope_parameters", {})
    assert {key: after[key] for key in before} == before
    assert _part_of(rope, after.get("rope_parameters", {}))


def _part_of(small, large):
    """Whether every key of nested dicts has the same value in the larger one."""
    if not isinstance(small, dict):
        return small == large
    return all(key in large and _part_of(value, large[key]) for key, value in small.items())


def test_old_and_new_keys_are_read_the_same(folder, tmp_path):
    save_folder(tmp_path, config=read_config(folder), tensors=load_tensors(folder))
    both = json.loads((tmp_path / "config.json").read_text())
    old = {key: value for key, value in both.items() if key not in ("rope_parameters", "dtype")}
    new = {key: value for key, value in both.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    assert both["dtype"] == both["torch_dtype"] == "float32"
    assert read_model_config(old) == read_model_config(new) == read_model_config(both) == read_config(folder)


def test_sharded_folder_round_trip(llama, tmp_path):
    tensors = load_tensors(llama)
    save_folder(tmp_path, config=read_config(llama), tensors=tensors, max_shard_bytes=60_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert set(index["weight_map"]) == set(tensors)
    again = load_tensors(tmp_path)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_bf16_files_keep_their_bits_and_load_as_fp32(llama, tmp_path):
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_tensors(llama).items()}
    save_folder(tmp_path, config=read_config(llama), tensors=tensors)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_tensors(tmp_path).items())
    decoder = load_decoder(tmp_path)
    assert torch.equal(decoder.model.norm.weight, tensors["model.norm.weight"].float())


def test_generation_config_is_carried_through(llama, tmp_path):
    source = {"eos_token_id": [2, 5], "temperature": 0.6}
    save_folder(tmp_path, config=read_config(llama), tensors=load_tensors(llama), generation_config=source)
    assert read_generation_config(tmp_path)["eos_token_id"] == [2, 5]
    assert read_generation_config(tmp_path)["temperature"] == 0.6


def _edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _drop_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def _add_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.extra.weight": torch.zeros(2)}, folder / "model.safetensors")


def _escape_folder(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))


def _index_promises_too_much(folder):
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys([*names, "model.ghost"], "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


BROKEN = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "can't be read as JSON"),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]"), "holds a list"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no model.safetensors"),
    "truncated weights": (_truncate, "truncated or damaged"),
    "empty weights": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "truncated or damaged"),
    "tensor missing": (_drop_tensor, "model.layers.1.mlp.up_proj.weight"),
    "tensor too many": (_add_tensor, "model.layers.0.extra.weight"),
    "head missing": (
        lambda folder: (_edit_config(folder, tie_word_embeddings=False), _drop_head(folder)),
        "no lm_head.weight",
    ),
    "wrong shape": (lambda folder: _edit_config(folder, intermediate_size=64), "config.json asks for"),
    "unknown family": (lambda folder: _edit_config(folder, model_type="lama"), "did you mean 'llama'?"),
    "foreign mathematics": (
        lambda folder: _edit_config(folder, final_logit_softcapping=30.0),
        "final_logit_softcapping = 30.0",
    ),
    "quantized": (
        lambda folder: _edit_config(folder, quantization_config={"bits": 4}),
        "quantization_config",
    ),
    "unknown activation": (lambda folder: _edit_config(folder, hidden_act="relu"), "hidden_act = 'relu'"),
    "unknown rope": (
        lambda folder: _edit_config(folder, rope_parameters={"rope_type": "spiral", "rope_theta": 1.0}),
        "'spiral' is not supported",
    ),
    "rope told twice": (lambda folder: _edit_config(folder, rope_theta=77.0), "describes the rope twice"),
    "absurd number": (lambda folder: _edit_config(folder, num_hidden_layers=-1), "num_layers = -1"),
    "index leaves the folder": (_escape_folder, "not inside the folder"),
    "index promises too much": (_index_promises_too_much, "model.ghost"),
}


def _drop_head(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("fault", sorted(BROKEN))
def test_broken_folders_say_what_is_wrong(fault, llama):
    breaks, message = BROKEN[fault]
    breaks(llama)
    with pytest.raises(ShardlineError) as error:
        load_decoder(llama)
    assert message in str(error.value)


def test_missing_folder_and_missing_tensors(llama, tmp_path):
    with pytest.raises(UsageError, match="no model folder"):
        read_config(tmp_path / "nowhere")
    tensors = load_tensors(llama)
    del tensors["model.norm.weight"]
    with pytest.raises(ShardlineError, match=r"1 tensors are missing, the first is model\.norm\.weight"):
        save_folder(tmp_path / "out", config=read_config(llama), tensors=tensors)


def test_a_tied_folder_may_hold_the_same_head_and_no_other(tmp_path):
    save_oracle("llama-tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    assert "lm_head.weight" not in load_tensors(tmp_path)
    head[3, 5] += 1
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(ShardlineError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_decoder(tmp_path)


def test_shard_file_missing(llama, tmp_path):
    save_folder(tmp_path / "s", config=read_config(llama), tensors=load_tensors(llama), max_shard_bytes=60_000)
    shutil.copytree(tmp_path / "s", tmp_path / "t")
    next((tmp_path / "t").glob("model-00002*")).unlink()
    with pytest.raises(ShardlineError, match="is missing; the folder is incomplete"):
        load_decoder(tmp_path / "t")
