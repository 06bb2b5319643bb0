"""What files may look like: bf16, several shards, names without their first part, buffers that hold no parameter."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from models.oracle import CONFIGS, SIZES, make_oracle, save_oracle
from models.test_chatglm import save_chatglm
from shardline.checkpoints.huggingface import load_decoder, load_tensors, read_config, save_folder
from shardline.config import ShardlineError
from shardline.models.attention import DenseAttention

TOLERANCE = 1e-5
# Two runs in bf16 round in different places. Ours may be no further from fp32 than transformers' is (root mean square,
# with a tenth for chance), and no logit may be apart by more than a twentieth of the largest one.
BF16_ERROR, BF16_TOLERANCE = 1.1, 0.05


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, SIZES["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(7))
    return tokens, torch.arange(40).expand(2, 40)


def open_theirs(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def bf16_folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_oracle(request.param).to(torch.bfloat16).save_pretrained(folder)
    return folder


@torch.no_grad()
def test_logits_and_last_hidden_states_of_bf16_files(bf16_folder, record_property):
    tokens, positions = rows()
    theirs, ours = open_theirs(bf16_folder, torch.float32), load_decoder(bf16_folder)
    hidden = ours.hidden_states(tokens, positions_BT=positions, attention=DenseAttention())
    expected = theirs.base_model(tokens).last_hidden_state
    difference = (ours.head(hidden) - theirs(tokens).logits).abs().max().item()
    record_property("fp32_logits", difference)
    assert (hidden - expected).abs().max() <= TOLERANCE
    assert difference <= TOLERANCE


@torch.no_grad()
def test_bf16_is_as_near_to_fp32_as_transformers(bf16_folder, record_property):
    tokens, positions = rows()
    exact = open_theirs(bf16_folder, torch.float32)(tokens).logits
    theirs = open_theirs(bf16_folder, torch.bfloat16)(tokens).logits.float()
    decoder = load_decoder(bf16_folder, dtype=torch.bfloat16)
    logits = decoder(tokens, positions_BT=positions, attention=DenseAttention())
    assert logits.dtype == torch.bfloat16
    ours, scale = logits.float(), exact.abs().max()
    apart = ((ours - theirs).abs().max() / scale).item()
    record_property("bf16_logits", apart)
    assert apart <= BF16_TOLERANCE
    assert (ours - exact).square().mean().sqrt() <= BF16_ERROR * (theirs - exact).square().mean().sqrt()
    # Where the best word leads by more than both can be off, all three choose it; elsewhere nearly always.
    best = exact.topk(2, dim=-1).values
    clear = (best[..., 0] - best[..., 1]) > 2 * BF16_TOLERANCE * scale
    assert clear.float().mean() > 0.2
    assert torch.equal(ours.argmax(-1)[clear], exact.argmax(-1)[clear])
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() >= 0.9


def test_bf16_files_are_saved_with_their_bits(bf16_folder, tmp_path):
    save_folder(tmp_path, config=read_config(bf16_folder), tensors=load_tensors(bf16_folder))
    before, after = load_file(bf16_folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype == torch.bfloat16
        assert torch.equal(after[name].view(torch.int16), tensor.view(torch.int16)), name
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"


FUSED = ["phi3", "glm4", "gpt2", "bloom", "mixtral", "chatglm"]


def save_any(name, folder):
    return save_chatglm(folder) if name == "chatglm" else save_oracle(name, folder)


@pytest.mark.parametrize("name", FUSED)
def test_shards_of_a_family_with_tensors_of_its_own(name, tmp_path):
    """Their whole file -> our shards -> the same tensors; and their own shards, where transformers can write them."""
    model = save_any(name, tmp_path / "whole")
    whole = load_tensors(tmp_path / "whole")
    save_folder(tmp_path / "ours", config=read_config(tmp_path / "whole"), tensors=whole, max_shard_bytes=50_000)
    folders = [tmp_path / "ours"]
    if name != "chatglm":
        model.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
        folders.append(tmp_path / "theirs")
    for folder in folders:
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert len(set(index.values())) > 2
        held = {}
        for file in set(index.values()):
            with safe_open(folder / file, framework="pt") as archive:
                held |= dict.fromkeys(archive.keys(), file)
        assert held == index
        again = load_tensors(folder)
        assert again.keys() == whole.keys()
        assert all(torch.equal(again[key], tensor) for key, tensor in whole.items())


@pytest.mark.parametrize("name", ["gpt2", "opt", "opt-350m", "bloom", "llama-tied", "gemma3"])
def test_names_without_their_first_part(name, tmp_path):
    """What a model without its head saves: `h.0.ln_1.weight`, as in the first published GPT-2 and BLOOM files."""
    model = save_oracle(name, tmp_path / "whole")
    model.base_model.save_pretrained(tmp_path / "base")
    whole, base = (
        load_file(tmp_path / "whole" / "model.safetensors"),
        load_file(tmp_path / "base" / "model.safetensors"),
    )
    assert not whole.keys() & base.keys()
    expected, actual = load_tensors(tmp_path / "whole"), load_tensors(tmp_path / "base")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[key], tensor) for key, tensor in expected.items())
    load_decoder(tmp_path / "base")


def test_a_model_without_its_untied_head_is_refused(tmp_path):
    make_oracle("llama").base_model.save_pretrained(tmp_path)
    with pytest.raises(ShardlineError, match=r"there is no lm_head\.weight"):
        load_tensors(tmp_path)


BUFFERS = {
    "gpt2": ["transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias", "h.{}.attn.bias"],
    "llama": ["model.layers.{}.self_attn.rotary_emb.inv_freq"],
    "phi": ["model.layers.{}.self_attn.rotary_emb.inv_freq"],
    "chatglm": ["transformer.rotary_pos_emb.inv_freq"],
    "opt": ["lm_head.weight"],  # a copy of the tied head
    "bloom": ["lm_head.weight"],
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_of_old_exporters_are_no_parameters(name, tmp_path):
    save_any(name, tmp_path)
    path = tmp_path / "model.safetensors"
    plain, expected = load_file(path), load_tensors(tmp_path)
    head = expected["model.embed_tokens.weight"]
    extra = {
        template.format(layer): head.clone() if "lm_head" in template else torch.ones(4)
        for template in BUFFERS[name]
        for layer in range(3)
    }
    save_file({**plain, **extra}, path)
    actual = load_tensors(tmp_path)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[key], tensor) for key, tensor in expected.items())
