from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from shardline.checkpoints.huggingface import load_decoder
from shardline.config import ShardlineError, UsageError
from shardline.convert.gguf import convert_gguf
from shardline.models.attention import DenseAttention
from shardline.text.tokenizer import Tokenizer

from .gguf_files import SIZES, tiny_model, write_gguf

TOKENS = torch.tensor([[1, 5, 300, 17, 42, 258, 9, 77]])
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama_config(**other):
    from transformers import LlamaConfig

    return LlamaConfig(**{**SIZES, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 257, **other})


def assert_equal_logits(folder: Path, model) -> None:
    """transformers and our decoder both read the folder and give the source model's logits."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    positions = torch.arange(TOKENS.shape[1])[None]
    with torch.no_grad():
        expected = model(TOKENS).logits
        torch.testing.assert_close(theirs(TOKENS).logits, expected, rtol=0, atol=0)
        ours = load_decoder(folder)(TOKENS, positions_BT=positions, attention=DenseAttention())
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_logits_are_those_of_the_weights_in_the_file(tmp_path: Path, kind: Kind):
    model = tiny_model(llama_config())
    write_gguf(tmp_path / "m.gguf", model, kind=kind)
    seen: list[float] = []
    config = convert_gguf(tmp_path / "m.gguf", tmp_path / "folder", progress=seen.append)
    assert_equal_logits(tmp_path / "folder", model)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert (config.rope.theta, config.norm_eps, config.tie_word_embeddings) == (10000.0, 1e-5, True)
    assert (config.bos_token_id, config.eos_token_ids) == (257, (258,))


def test_untied_heads_biases_and_a_wide_head(tmp_path: Path):
    model = tiny_model(llama_config(tie_word_embeddings=False, attention_bias=True, mlp_bias=True, head_dim=32))
    write_gguf(tmp_path / "m.gguf", model)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "folder")
    assert_equal_logits(tmp_path / "folder", model)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_rows_are_not_reordered(tmp_path: Path, family: str):
    from transformers import AutoConfig

    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = AutoConfig.for_model(
        family, **SIZES, head_dim=16, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_parameters=rope
    )
    model = tiny_model(config)
    write_gguf(tmp_path / "m.gguf", model)
    assert convert_gguf(tmp_path / "m.gguf", tmp_path / "folder").rope.theta == 1e6
    assert_equal_logits(tmp_path / "folder", model)


def llama3_divisors(model) -> np.ndarray:
    default = 1 / (500000.0 ** (torch.arange(0, 16, 2) / 16))
    return (default / model.model.rotary_emb.inv_freq).numpy()


def test_llama3_rope_is_recovered_from_its_divisors(tmp_path: Path):
    model = tiny_model(llama_config(rope_parameters=LLAMA3))
    divisors = llama3_divisors(model)
    assert divisors.max() == pytest.approx(8.0)
    write_gguf(tmp_path / "m.gguf", model, fields={"tensors": {"rope_freqs.weight": divisors}})
    rope = convert_gguf(tmp_path / "m.gguf", tmp_path / "folder").rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("llama3", 8.0, 8192)
    assert_equal_logits(tmp_path / "folder", model)


def test_linear_and_yarn_rope(tmp_path: Path):
    model = tiny_model(llama_config())
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "linear.gguf", model, fields=scaling)
    rope = convert_gguf(tmp_path / "linear.gguf", tmp_path / "linear").rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)
    scaling |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 32}
    write_gguf(tmp_path / "yarn.gguf", model, fields=scaling)
    rope = convert_gguf(tmp_path / "yarn.gguf", tmp_path / "yarn").rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 32)


def test_the_folder_chats(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf", tiny_model(llama_config()), fields={"tokenizer.ggml.eot_token_id": 257})
    convert_gguf(tmp_path / "m.gguf", tmp_path / "folder")
    tokenizer = Tokenizer.load(tmp_path / "folder")
    assert tokenizer.encode("abba") == [256, 98, 97]
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}], add_generation_prompt=True) == [257, 97, 258]
    assert tokenizer.eos_token_ids == (258, 257), "both the end of a text and the end of a turn"
    assert tokenizer.vocab_size == 320, "padding included"
    assert json.loads((tmp_path / "folder" / "generation_config.json").read_text())["eos_token_id"] == [258, 257]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.architecture": None, "llama.expert_count": 8}, "is a mixture of 8 experts"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of a head's 16 dimensions"),
        ({"llama.attention.sliding_window": 64}, "has a sliding window of 64 tokens"),
        ({"llama.rope.scaling.type": "longrope"}, "scales its rotary embedding by 'longrope'"),
        ({"llama.block_count": None}, r"has no key llama\.block_count"),
        ({"llama.feed_forward_length": [96, 96]}, r"feed_forward_length = \[96, 96\], where one int for all layers"),
        ({"tensors": {"rope_freqs.weight": np.full(8, 3, dtype=np.float32)}}, "are not those of Llama 3's rope"),
        ({"tensors": {"blk.0.post_ffw_norm.weight": np.ones(64, dtype=np.float32)}}, "post_ffw_norm.*no llama model"),
        ({"tokenizer.ggml.model": "llama"}, "vocabulary is of the kind 'llama'"),
        ({"tokenizer.ggml.pre": "qwen"}, "pre-tokenizer 'qwen' is not known; did you mean 'qwen2'"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer 'default' is not known"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "a merge of other than two tokens"),
        ({"tokenizer.ggml.merges": None}, r"no list of strings under tokenizer\.ggml\.merges"),
        ({"tokenizer.ggml.eos_token_id": 999}, "eos_token has the id 999, but the vocabulary ends at 319"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(reversed(value)),
)
def test_a_file_that_would_become_a_wrong_model_is_refused(tmp_path: Path, fields: dict, message: str):
    write_gguf(tmp_path / "m.gguf", tiny_model(llama_config()), fields=fields)
    with pytest.raises(ShardlineError, match=message):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"], "nothing is left behind"


def test_a_foreign_architecture_is_named(tmp_path: Path):
    from transformers import GPT2Config

    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=259)
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", config.model_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UsageError, match="holds the architecture 'gpt2'; those that can be read from GGUF are llama, "):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "folder")


def test_truncated_at_any_place(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf", tiny_model(llama_config()))
    whole = (tmp_path / "m.gguf").read_bytes()
    cuts = [4, 8, 20, 24, 40, 100, 1000, 3000, 9000, len(whole) // 2, len(whole) - 1]
    for cut in cuts:
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:cut])
        with pytest.raises(ShardlineError, match=re.escape(str(path))):
            convert_gguf(path, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_not_a_gguf_file(tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ShardlineError, match="is not a GGUF file: it does not begin with the letters GGUF"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "folder")
    with pytest.raises(UsageError, match="There is no file"):
        convert_gguf(tmp_path / "nowhere.gguf", tmp_path / "folder")


def test_without_the_gguf_package_the_install_line_is_given(tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    code = (
        "import sys; sys.modules['gguf'] = None\n"
        "from shardline.convert.gguf import convert_gguf\n"
        "convert_gguf(sys.argv[1], sys.argv[1] + '-folder')\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "m.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Reading GGUF needs the gguf package: pip install 'shardline[gguf]'." in done.stderr


def test_a_damaged_file_does_not_replace_a_good_folder(tmp_path: Path):
    model = tiny_model(llama_config())
    write_gguf(tmp_path / "m.gguf", model)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "folder")
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole[:-5])
    with pytest.raises(ShardlineError):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "folder")
    assert_equal_logits(tmp_path / "folder", model)
