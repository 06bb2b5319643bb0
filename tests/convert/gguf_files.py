"""Writes small GGUF files from random transformers models, as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 320,
}


def tiny_model(config: Any) -> Any:
    """A random model of a transformers config, with norms and biases that are not all ones and zeros."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


def write_gguf(path: Path, model: Any, *, kind: Kind = Kind.F32, fields: dict[str, Any] | None = None) -> None:
    """Writes the model and the vocabulary; `fields` are added to the keys or replace them (None leaves one out).

    With a quantised `kind`, the model's own matrices are replaced by what the file now holds.
    """
    config, fields = model.config, dict(fields or {})
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    keys = {
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **vocabulary_fields(config.vocab_size),
    }
    if getattr(config, "head_dim", None):
        keys[f"{architecture}.attention.key_length"] = config.head_dim
    extra_tensors = fields.pop("tensors", {})
    for key, value in {**keys, **fields}.items():
        _add(writer, key, value)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        _add_tensor(writer, name, parameter, config, kind)
    for name, array in extra_tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vocabulary_fields(size: int) -> dict[str, Any]:
    """Bytes, one merge ("a" + "b"), two control tokens (the last is the EOS), padded to `size`."""
    from shardline.text.decoding import BYTE_OF_CHARACTER

    tokens = [*BYTE_OF_CHARACTER, "ab", "<|im_start|>", "<|im_end|>"]
    kinds = [1] * 257 + [3, 3]
    padding = [f"[PAD{n}]" for n in range(len(tokens), size)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.token_type": kinds + [5] * len(padding),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        adders[type(value)](key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, parameter: torch.Tensor, config: Any, kind: Kind) -> None:
    stem, _, ending = name.rpartition(".")
    array = parameter.numpy()
    if array.ndim == 2 and kind != Kind.F32:
        packed = gguf.quants.quantize(array, kind)
        parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind).copy()))
    if config.model_type == "llama" and stem.endswith(("q_proj", "k_proj")):
        heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
        array = _llama_cpp_order(array, heads)
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        theirs = f"blk.{layer}.{NAMES[part]}.{ending}"
    else:
        theirs = f"{NAMES[stem]}.{ending}"
    array = np.ascontiguousarray(array, dtype=np.float32)
    if array.ndim == 2 and kind != Kind.F32:
        writer.add_tensor(theirs, gguf.quants.quantize(array, kind), raw_dtype=kind)
    else:
        writer.add_tensor(theirs, array)


def _llama_cpp_order(array: np.ndarray, heads: int) -> np.ndarray:
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)
