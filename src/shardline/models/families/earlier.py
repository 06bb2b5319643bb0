"""Families before Llama's shape became the common one, with LayerNorm: GPT-2, OPT, BLOOM, Phi-1.5 and 2; and ChatGLM2
and 3, whose files have names of their own. Sources: their config.json files, the classes of transformers 5, and for
ChatGLM the published description of its modeling file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardline.config import UsageError
from shardline.models.config import Activation, DecoderConfig
from shardline.models.families.family import Family, Row, TensorRule, expand, take
from shardline.models.families.ops import GATE_UP, IDENTITY, QKV_BY_HEAD, QKV_PAIRS, TRANSPOSE, TRANSPOSED_QKV, Op
from shardline.models.families.rope_keys import read_rope

__all__ = ["EARLIER"]

_GELUS: dict[str, Activation] = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_PLAIN = {"norm": "layer", "gated": False, "mlp_bias": True, "qkv_bias": True, "o_bias": True}
_QKV_NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _rows(*lines: tuple[str, str], op: Op = IDENTITY, bias: bool = True) -> list[Row]:
    return [Row(theirs=theirs, ours=(ours,), op=op, bias=bias) for theirs, ours in lines]


def _stacked(
    config: DecoderConfig, *, layers: str, rows: Sequence[Row], first: Sequence[Row], last: Sequence[Row]
) -> Iterator[TensorRule]:
    """Yields the rules of a whole model; `layers` has {} where the layer's number stands."""
    yield from expand(first, ours="model.")
    for layer in range(config.num_layers):
        yield from expand(rows, theirs=layers.format(layer), ours=f"model.layers.{layer}.")
    yield from expand(last, ours="model.")
    if not config.tie_word_embeddings:
        yield from expand(_rows(("lm_head", "lm_head"), bias=config.head_bias))


def _square(hidden_key: str, heads_key: str) -> Callable[[dict[str, Any]], int]:
    """The head size of a family that only knows hidden / heads."""

    def head_dim(raw: dict[str, Any]) -> int:
        hidden, heads = take(raw, hidden_key), take(raw, heads_key)
        if hidden % heads:
            raise UsageError(f"config.json: {hidden_key} = {hidden} is not a multiple of {heads_key} = {heads}.")
        return hidden // heads

    return head_dim


def _read_gpt2(raw: dict[str, Any]) -> dict[str, Any]:
    return {"head_dim": _square("n_embd", "n_head")(raw), "num_kv_heads": take(raw, "n_head")}


def _gpt2_tensors(config: DecoderConfig) -> Iterator[TensorRule]:
    rows = [
        *_rows(("ln_1", "input_layernorm"), ("ln_2", "post_attention_layernorm")),
        Row(theirs="attn.c_attn", ours=_QKV_NAMES, op=TRANSPOSED_QKV, bias=True),
        *_rows(
            ("attn.c_proj", "self_attn.o_proj"),
            ("mlp.c_fc", "mlp.up_proj"),
            ("mlp.c_proj", "mlp.down_proj"),
            op=TRANSPOSE,
        ),
    ]
    first = _rows(("transformer.wte", "embed_tokens"), ("transformer.wpe", "embed_positions"), bias=False)
    return _stacked(
        config, layers="transformer.h.{}.", rows=rows, first=first, last=_rows(("transformer.ln_f", "norm"))
    )


def _read_opt(raw: dict[str, Any]) -> dict[str, Any]:
    hidden, before = take(raw, "hidden_size"), bool(raw.get("do_layer_norm_before", True))
    width = raw.get("word_embed_proj_dim") or hidden
    return {
        "head_dim": _square("hidden_size", "num_attention_heads")(raw),
        "num_kv_heads": take(raw, "num_attention_heads"),
        "block": "pre" if before else "post",
        "final_norm": before and not raw.get("_remove_final_layer_norm", False),
        "embedding_dim": None if width == hidden else width,
    }


def _write_opt(config: DecoderConfig) -> dict[str, Any]:
    return {
        "do_layer_norm_before": config.block == "pre",
        "_remove_final_layer_norm": config.block == "pre" and not config.final_norm,
        "word_embed_proj_dim": config.embedding_width,
    }


def _opt_tensors(config: DecoderConfig) -> Iterator[TensorRule]:
    trunk = "model.decoder."
    rows = _rows(
        *((name, name) for name in _QKV_NAMES),
        ("self_attn.out_proj", "self_attn.o_proj"),
        ("self_attn_layer_norm", "input_layernorm"),
        ("fc1", "mlp.up_proj"),
        ("fc2", "mlp.down_proj"),
        ("final_layer_norm", "post_attention_layernorm"),
    )
    names = ["embed_tokens", "embed_positions"]
    if config.embedding_width != config.hidden_size:
        names += ["project_in", "project_out"]
    first = _rows(*((f"{trunk}{name}", name) for name in names), bias=False)
    last = _rows((f"{trunk}final_layer_norm", "norm")) if config.final_norm else []
    return _stacked(config, layers=f"{trunk}layers.{{}}.", rows=rows, first=first, last=last)


def _read_bloom(raw: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = raw.get("hidden_size") or take(raw, "n_embed"), raw.get("n_head") or raw.get("num_attention_heads")
    sizes = {"hidden_size": hidden, "n_head": heads, "model_type": "bloom"}
    return {
        "hidden_size": hidden,
        "num_heads": take(sizes, "n_head"),
        "num_kv_heads": heads,
        "head_dim": _square("hidden_size", "n_head")(sizes),
        "intermediate_size": 4 * hidden,
        # Nothing in the file bounds it: ALiBi has no table of positions.
        "max_position_embeddings": raw.get("seq_length") or 2048,
    }


def _write_bloom(config: DecoderConfig) -> dict[str, Any]:
    return {"hidden_size": config.hidden_size, "n_head": config.num_heads}


def _bloom_tensors(config: DecoderConfig) -> Iterator[TensorRule]:
    rows = [
        Row(theirs="self_attention.query_key_value", ours=_QKV_NAMES, op=QKV_BY_HEAD, bias=True),
        *_rows(
            ("input_layernorm", "input_layernorm"),
            ("self_attention.dense", "self_attn.o_proj"),
            ("post_attention_layernorm", "post_attention_layernorm"),
            ("mlp.dense_h_to_4h", "mlp.up_proj"),
            ("mlp.dense_4h_to_h", "mlp.down_proj"),
        ),
    ]
    first = [
        *_rows(("transformer.word_embeddings", "embed_tokens"), bias=False),
        *_rows(("transformer.word_embeddings_layernorm", "embed_norm")),
    ]
    return _stacked(
        config, layers="transformer.h.{}.", rows=rows, first=first, last=_rows(("transformer.ln_f", "norm"))
    )


def _read_phi(raw: dict[str, Any]) -> dict[str, Any]:
    head_dim = _square("hidden_size", "num_attention_heads")(raw)
    return {"head_dim": head_dim, "head_bias": not raw.get("tie_word_embeddings", False)}


def _phi_tensors(config: DecoderConfig) -> Iterator[TensorRule]:
    rows = _rows(
        ("input_layernorm", "input_layernorm"),
        *((name, name) for name in _QKV_NAMES),
        ("self_attn.dense", "self_attn.o_proj"),
        ("mlp.fc1", "mlp.up_proj"),
        ("mlp.fc2", "mlp.down_proj"),
    )
    if config.qk_norm:
        rows += _rows(*((f"self_attn.{part}_layernorm", f"self_attn.{part}_norm") for part in "qk"))
    first = _rows(("model.embed_tokens", "embed_tokens"), bias=False)
    last = _rows(("model.final_layernorm", "norm"))
    return _stacked(config, layers="model.layers.{}.", rows=rows, first=first, last=last)


def _num_groups(raw: dict[str, Any]) -> int:
    grouped = raw.get("multi_query_attention", False)
    return raw.get("multi_query_group_num", 1) if grouped else take(raw, "num_attention_heads")


def _read_chatglm(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_kv_heads": _num_groups(raw),
        "vocab_size": raw.get("padded_vocab_size") or take(raw, "vocab_size"),
        "rope": read_rope({"rope_theta": 10000.0 * raw.get("rope_ratio", 1)}, partial=0.5),
    }


def _write_chatglm(config: DecoderConfig) -> dict[str, Any]:
    grouped = config.num_kv_heads != config.num_heads
    groups = {"multi_query_attention": grouped, "multi_query_group_num": config.num_kv_heads}
    if config.raw and _num_groups(config.raw) == config.num_kv_heads:
        groups = {}  # what was read says it already, in whichever of its ways
    ratio = config.raw.get("rope_ratio", config.rope.theta / 10000.0)
    return {**groups, "padded_vocab_size": config.vocab_size, "rope_ratio": ratio}


def _chatglm_tensors(config: DecoderConfig) -> Iterator[TensorRule]:
    rows = [
        Row(
            theirs="self_attention.query_key_value",
            ours=_QKV_NAMES,
            op=QKV_PAIRS,
            bias=config.qkv_bias,
        ),
        Row(theirs="mlp.dense_h_to_4h", ours=("mlp.gate_proj", "mlp.up_proj"), op=GATE_UP),
        *_rows(
            ("input_layernorm", "input_layernorm"),
            ("self_attention.dense", "self_attn.o_proj"),
            ("post_attention_layernorm", "post_attention_layernorm"),
            ("mlp.dense_4h_to_h", "mlp.down_proj"),
            bias=False,
        ),
    ]
    head = {"transformer.output_layer.weight": "lm_head.weight"}
    first = _rows(("transformer.embedding.word_embeddings", "embed_tokens"), bias=False)
    last = _rows(("transformer.encoder.final_layernorm", "norm"), bias=False)
    layers = "transformer.encoder.layers.{}."
    for rule in _stacked(config, layers=layers, rows=rows, first=first, last=last):
        theirs = next((name for name, ours in head.items() if rule.ours == (ours,)), rule.theirs)
        yield TensorRule(theirs=theirs, ours=rule.ours, op=rule.op)


_TIED = {"tie_word_embeddings": ("tie_word_embeddings", True)}
_GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "intermediate_size": ("n_inner", lambda raw: 4 * take(raw, "n_embd")),
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "max_position_embeddings": ("n_positions", 1024),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        **_TIED,
    },
    fixed={**_PLAIN, "position": "learned"},
    activations=_GELUS,
    activation_key="activation_function",
    required={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    read_rest=_read_gpt2,
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
        "max_position_embeddings": ("max_position_embeddings", 2048),
        **_TIED,
    },
    fixed={**_PLAIN, "position": "learned", "position_offset": 2},
    activations={"relu": "relu", **_GELUS},
    activation_key="activation_function",
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
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        **_TIED,
    },
    fixed={**_PLAIN, "position": "alibi", "embedding_norm": True, "activation": "gelu_tanh"},
    activation_key=None,
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
        "num_kv_heads": ("num_key_value_heads", lambda raw: take(raw, "num_attention_heads")),
        "max_position_embeddings": ("max_position_embeddings", 2048),
        "norm_eps": ("layer_norm_eps", 1e-5),
        "qk_norm": ("qk_layernorm", False),
        "tie_word_embeddings": ("tie_word_embeddings", False),
    },
    fixed={**_PLAIN, "block": "parallel"},
    activations=_GELUS,
    rope={"partial": 0.5},
    read_rest=_read_phi,
    tensors=_phi_tensors,
)
_CHATGLM = Family(
    model_type="chatglm",
    architecture="ChatGLMModel",
    keys={
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "num_layers": "num_layers",
        "num_heads": "num_attention_heads",
        "head_dim": ("kv_channels", _square("hidden_size", "num_attention_heads")),
        "max_position_embeddings": ("seq_length", 2048),
        "norm_eps": ("layernorm_epsilon", 1e-5),
        "qkv_bias": ("add_qkv_bias", False),
    },
    fixed={"rope_interleaved": True},
    activation_key=None,
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
