"""Families before Llama's shape became the common one, with LayerNorm: GPT-2, OPT, BLOOM, Phi-1.5 and 2; and ChatGLM2
and 3, whose files have names of their own. Sources: their config.json files, the classes of transformers 5, and for
ChatGLM the published description of its modeling file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardline.config import UsageError
from shardline.models.config import Activation, DecoderConfig
from shardline.models.families.family import Family, TensorRule, read_activation, rule, take
from shardline.models.families.ops import GATE_UP, QKV_BY_HEAD, QKV_PAIRS, TRANSPOSE, TRANSPOSED_QKV
from shardline.models.families.rope_keys import read_rope, write_rope

__all__ = ["EARLIER"]

_BOTH = ("weight", "bias")
_GELUS: dict[str, Activation] = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_RELU_FIRST: dict[str, Activation] = {"relu": "relu", **_GELUS}
_PLAIN = {"norm": "layer", "gated": False, "mlp_bias": True, "qkv_bias": True, "o_bias": True}


def _square_heads(hidden: int, heads: int) -> dict[str, Any]:
    if hidden % heads:
        raise UsageError(f"config.json: the hidden size {hidden} is not a multiple of the {heads} heads.")
    return {"head_dim": hidden // heads, "num_kv_heads": heads}


def _name_of(activation: Activation, names: dict[str, Activation], raw_name: str | None) -> str:
    return raw_name or next(name for name, ours in names.items() if ours == activation)


def _read_gpt2(raw: dict[str, Any]) -> dict[str, Any]:
    hidden = take(raw, "n_embd")
    return {
        **_square_heads(hidden, take(raw, "n_head")),
        "intermediate_size": raw.get("n_inner") or 4 * hidden,
        "activation": read_activation(raw, "activation_function", _GELUS),
    }


def _write_gpt2(config: DecoderConfig) -> dict[str, Any]:
    name = _name_of(config.activation, _GELUS, config.raw.get("activation_function"))
    inner = None if config.intermediate_size == 4 * config.hidden_size else config.intermediate_size
    return {"n_inner": config.raw.get("n_inner", inner), "activation_function": name}


def _gpt2_tensors(config: DecoderConfig) -> Iterator[TensorRule]:
    yield rule("transformer.wte.weight", "model.embed_tokens.weight")
    yield rule("transformer.wpe.weight", "model.embed_positions.weight")
    for layer in range(config.num_layers):
        theirs, ours = f"transformer.h.{layer}.", f"model.layers.{layer}."
        for kind in _BOTH:
            op = TRANSPOSE if kind == "weight" else None
            options = {} if op is None else {"op": op}
            yield rule(f"{theirs}ln_1.{kind}", f"{ours}input_layernorm.{kind}")
            names = [f"{ours}self_attn.{part}_proj.{kind}" for part in "qkv"]
            yield rule(f"{theirs}attn.c_attn.{kind}", *names, op=TRANSPOSED_QKV)
            yield rule(f"{theirs}attn.c_proj.{kind}", f"{ours}self_attn.o_proj.{kind}", **options)
            yield rule(f"{theirs}ln_2.{kind}", f"{ours}post_attention_layernorm.{kind}")
            yield rule(f"{theirs}mlp.c_fc.{kind}", f"{ours}mlp.up_proj.{kind}", **options)
            yield rule(f"{theirs}mlp.c_proj.{kind}", f"{ours}mlp.down_proj.{kind}", **options)
    for kind in _BOTH:
        yield rule(f"transformer.ln_f.{kind}", f"model.norm.{kind}")
    if not config.tie_word_embeddings:
        yield rule("lm_head.weight")


def _read_opt(raw: dict[str, Any]) -> dict[str, Any]:
    hidden, before = take(raw, "hidden_size"), bool(raw.get("do_layer_norm_before", True))
    width = raw.get("word_embed_proj_dim") or hidden
    return {
        **_square_heads(hidden, take(raw, "num_attention_heads")),
        "activation": read_activation(raw, "activation_function", _RELU_FIRST),
        "block": "pre" if before else "post",
        "final_norm": before and not raw.get("_remove_final_layer_norm", False),
        "embedding_dim": None if width == hidden else width,
    }


def _write_opt(config: DecoderConfig) -> dict[str, Any]:
    return {
        "activation_function": _name_of(config.activation, _RELU_FIRST, config.raw.get("activation_function")),
        "do_layer_norm_before": config.block == "pre",
        "_remove_final_layer_norm": config.block == "pre" and not config.final_norm,
        "word_embed_proj_dim": config.embedding_width,
    }


def _opt_tensors(config: DecoderConfig) -> Iterator[TensorRule]:
    trunk = "model.decoder."
    yield rule(f"{trunk}embed_tokens.weight", "model.embed_tokens.weight")
    yield rule(f"{trunk}embed_positions.weight", "model.embed_positions.weight")
    if config.embedding_width != config.hidden_size:
        yield rule(f"{trunk}project_in.weight", "model.project_in.weight")
        yield rule(f"{trunk}project_out.weight", "model.project_out.weight")
    for layer in range(config.num_layers):
        theirs, ours = f"{trunk}layers.{layer}.", f"model.layers.{layer}."
        for kind in _BOTH:
            for part in "qkv":
                yield rule(f"{theirs}self_attn.{part}_proj.{kind}", f"{ours}self_attn.{part}_proj.{kind}")
            yield rule(f"{theirs}self_attn.out_proj.{kind}", f"{ours}self_attn.o_proj.{kind}")
            yield rule(f"{theirs}self_attn_layer_norm.{kind}", f"{ours}input_layernorm.{kind}")
            yield rule(f"{theirs}fc1.{kind}", f"{ours}mlp.up_proj.{kind}")
            yield rule(f"{theirs}fc2.{kind}", f"{ours}mlp.down_proj.{kind}")
            yield rule(f"{theirs}final_layer_norm.{kind}", f"{ours}post_attention_layernorm.{kind}")
    for kind in _BOTH if config.final_norm else ():
        yield rule(f"{trunk}final_layer_norm.{kind}", f"model.norm.{kind}")
    if not config.tie_word_embeddings:
        yield rule("lm_head.weight")


def _read_bloom(raw: dict[str, Any]) -> dict[str, Any]:
    hidden = raw.get("hidden_size") or take(raw, "n_embed")
    return {
        **_square_heads(hidden, raw.get("n_head") or take(raw, "num_attention_heads")),
        "hidden_size": hidden,
        "num_heads": raw.get("n_head") or raw["num_attention_heads"],
        "intermediate_size": 4 * hidden,
        # Nothing in the file bounds it: ALiBi has no table of positions.
        "max_position_embeddings": raw.get("seq_length") or 2048,
    }


def _write_bloom(config: DecoderConfig) -> dict[str, Any]:
    return {"hidden_size": config.hidden_size, "n_head": config.num_heads}


def _bloom_tensors(config: DecoderConfig) -> Iterator[TensorRule]:
    yield rule("transformer.word_embeddings.weight", "model.embed_tokens.weight")
    for kind in _BOTH:
        yield rule(f"transformer.word_embeddings_layernorm.{kind}", f"model.embed_norm.{kind}")
    for layer in range(config.num_layers):
        theirs, ours = f"transformer.h.{layer}.", f"model.layers.{layer}."
        for kind in _BOTH:
            yield rule(f"{theirs}input_layernorm.{kind}", f"{ours}input_layernorm.{kind}")
            names = [f"{ours}self_attn.{part}_proj.{kind}" for part in "qkv"]
            yield rule(f"{theirs}self_attention.query_key_value.{kind}", *names, op=QKV_BY_HEAD)
            yield rule(f"{theirs}self_attention.dense.{kind}", f"{ours}self_attn.o_proj.{kind}")
            yield rule(f"{theirs}post_attention_layernorm.{kind}", f"{ours}post_attention_layernorm.{kind}")
            yield rule(f"{theirs}mlp.dense_h_to_4h.{kind}", f"{ours}mlp.up_proj.{kind}")
            yield rule(f"{theirs}mlp.dense_4h_to_h.{kind}", f"{ours}mlp.down_proj.{kind}")
    for kind in _BOTH:
        yield rule(f"transformer.ln_f.{kind}", f"model.norm.{kind}")
    if not config.tie_word_embeddings:
        yield rule("lm_head.weight")


def _read_phi(raw: dict[str, Any]) -> dict[str, Any]:
    heads = take(raw, "num_attention_heads")
    return {
        **_square_heads(take(raw, "hidden_size"), heads),
        "num_kv_heads": raw.get("num_key_value_heads") or heads,
        "rope": read_rope(raw, partial=0.5),
        "activation": read_activation(raw, "hidden_act", _GELUS),
        "qk_norm": bool(raw.get("qk_layernorm", False)),
        "head_bias": not raw.get("tie_word_embeddings", False),
    }


def _write_phi(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_rope(config.rope),
        "num_key_value_heads": config.num_kv_heads,
        "hidden_act": _name_of(config.activation, _GELUS, config.raw.get("hidden_act")),
        "qk_layernorm": config.qk_norm,
    }


def _phi_tensors(config: DecoderConfig) -> Iterator[TensorRule]:
    yield rule("model.embed_tokens.weight")
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        for kind in _BOTH:
            for part in "qkv":
                yield rule(f"{at}self_attn.{part}_proj.{kind}")
            for part in "qk" if config.qk_norm else ():
                yield rule(f"{at}self_attn.{part}_layernorm.{kind}", f"{at}self_attn.{part}_norm.{kind}")
            yield rule(f"{at}self_attn.dense.{kind}", f"{at}self_attn.o_proj.{kind}")
            yield rule(f"{at}mlp.fc1.{kind}", f"{at}mlp.up_proj.{kind}")
            yield rule(f"{at}mlp.fc2.{kind}", f"{at}mlp.down_proj.{kind}")
            yield rule(f"{at}input_layernorm.{kind}")
    for kind in _BOTH:
        yield rule(f"model.final_layernorm.{kind}", f"model.norm.{kind}")
    for kind in () if config.tie_word_embeddings else _BOTH:
        yield rule(f"lm_head.{kind}")


def _num_groups(raw: dict[str, Any]) -> int:
    grouped = raw.get("multi_query_attention", False)
    return raw.get("multi_query_group_num", 1) if grouped else take(raw, "num_attention_heads")


def _read_chatglm(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        "head_dim": raw.get("kv_channels") or take(raw, "hidden_size") // take(raw, "num_attention_heads"),
        "num_kv_heads": _num_groups(raw),
        "vocab_size": raw.get("padded_vocab_size") or take(raw, "vocab_size"),
        "rope": read_rope({"rope_theta": 10000.0 * raw.get("rope_ratio", 1)}, partial=0.5),
        "qkv_bias": bool(raw.get("add_qkv_bias", False) or raw.get("add_bias_linear", False)),
    }


def _write_chatglm(config: DecoderConfig) -> dict[str, Any]:
    grouped = config.num_kv_heads != config.num_heads
    groups = {"multi_query_attention": grouped, "multi_query_group_num": config.num_kv_heads}
    if config.raw and _num_groups(config.raw) == config.num_kv_heads:
        groups = {}  # what was read says it already, in whichever of its ways
    return {
        **groups,
        "padded_vocab_size": config.vocab_size,
        "kv_channels": config.head_dim,
        "rope_ratio": config.raw.get("rope_ratio", config.rope.theta / 10000.0),
        "add_qkv_bias": config.qkv_bias,
    }


def _chatglm_tensors(config: DecoderConfig) -> Iterator[TensorRule]:
    yield rule("transformer.embedding.word_embeddings.weight", "model.embed_tokens.weight")
    for layer in range(config.num_layers):
        theirs, ours = f"transformer.encoder.layers.{layer}.", f"model.layers.{layer}."
        yield rule(f"{theirs}input_layernorm.weight", f"{ours}input_layernorm.weight")
        for kind in _BOTH if config.qkv_bias else ("weight",):
            names = [f"{ours}self_attn.{part}_proj.{kind}" for part in "qkv"]
            yield rule(f"{theirs}self_attention.query_key_value.{kind}", *names, op=QKV_PAIRS)
        yield rule(f"{theirs}self_attention.dense.weight", f"{ours}self_attn.o_proj.weight")
        yield rule(f"{theirs}post_attention_layernorm.weight", f"{ours}post_attention_layernorm.weight")
        halves = [f"{ours}mlp.{part}_proj.weight" for part in ("gate", "up")]
        yield rule(f"{theirs}mlp.dense_h_to_4h.weight", *halves, op=GATE_UP)
        yield rule(f"{theirs}mlp.dense_4h_to_h.weight", f"{ours}mlp.down_proj.weight")
    yield rule("transformer.encoder.final_layernorm.weight", "model.norm.weight")
    yield rule("transformer.output_layer.weight", "lm_head.weight")


_GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "tie_word_embeddings": "tie_word_embeddings",
    },
    defaults={"max_position_embeddings": 1024, "norm_eps": 1e-5, "tie_word_embeddings": True},
    fixed={**_PLAIN, "position": "learned"},
    required={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    read_rest=_read_gpt2,
    write_rest=_write_gpt2,
    tensors=_gpt2_tensors,
    skipped=("attn.bias", "attn.masked_bias"),
)
_OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_dim",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
        "tie_word_embeddings": "tie_word_embeddings",
    },
    defaults={"max_position_embeddings": 2048, "tie_word_embeddings": True},
    fixed={**_PLAIN, "position": "learned", "position_offset": 2},
    required={"enable_bias": True, "layer_norm_elementwise_affine": True},
    read_rest=_read_opt,
    write_rest=_write_opt,
    tensors=_opt_tensors,
)
_BLOOM = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    keys={
        "vocab_size": "vocab_size",
        "num_layers": "n_layer",
        "norm_eps": "layer_norm_epsilon",
        "tie_word_embeddings": "tie_word_embeddings",
    },
    defaults={"norm_eps": 1e-5, "tie_word_embeddings": True},
    fixed={**_PLAIN, "position": "alibi", "embedding_norm": True, "activation": "gelu_tanh"},
    required={"apply_residual_connection_post_layernorm": False},
    read_rest=_read_bloom,
    write_rest=_write_bloom,
    tensors=_bloom_tensors,
)
_PHI = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
        "norm_eps": "layer_norm_eps",
        "tie_word_embeddings": "tie_word_embeddings",
    },
    defaults={"max_position_embeddings": 2048, "norm_eps": 1e-5, "tie_word_embeddings": False},
    fixed={**_PLAIN, "block": "parallel"},
    understood=frozenset({"qk_layernorm"}),
    read_rest=_read_phi,
    write_rest=_write_phi,
    tensors=_phi_tensors,
)
_CHATGLM = replace(
    _PHI,
    model_type="chatglm",
    architecture="ChatGLMModel",
    keys={
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "num_layers": "num_layers",
        "num_heads": "num_attention_heads",
        "max_position_embeddings": "seq_length",
        "norm_eps": "layernorm_epsilon",
    },
    defaults={"max_position_embeddings": 2048, "norm_eps": 1e-5},
    fixed={"rope_interleaved": True},
    understood=frozenset(),
    required={
        "rmsnorm": True,
        "original_rope": True,
        "post_layer_norm": True,
        "add_bias_linear": False,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": False,
        "pre_seq_len": None,  # a learned prefix before the text, in a file of its own
        "quantization_bit": 0,
    },
    read_rest=_read_chatglm,
    write_rest=_write_chatglm,
    tensors=_chatglm_tensors,
    skipped=("rotary_pos_emb.inv_freq",),
)

EARLIER = (_GPT2, _OPT, _BLOOM, _PHI, _CHATGLM)
