"""Families in the shape of Llama: Llama 1-3 and SmolLM2, Mistral, Qwen2 and 3, Gemma 1-3, Phi-3, GLM-4, and the
mixtures of experts Mixtral and Qwen3-MoE. Sources: their config.json files and the classes of transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardline.config import UsageError
from shardline.models.config import DecoderConfig
from shardline.models.families.family import Family, Row, TensorRule, expand, take
from shardline.models.families.ops import GATE_UP, IDENTITY, QKV, RotaryPairs
from shardline.models.families.rope_keys import read_rope, write_rope

__all__ = ["LLAMA_LIKE"]


def _head_dim(raw: dict[str, Any]) -> int:
    hidden, heads = take(raw, "hidden_size"), take(raw, "num_attention_heads")
    if hidden % heads:
        raise UsageError(
            f"config.json: hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}, and no head_dim "
            "is given."
        )
    return hidden // heads


_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": ("num_key_value_heads", lambda raw: take(raw, "num_attention_heads")),
    "head_dim": ("head_dim", _head_dim),
    "max_position_embeddings": ("max_position_embeddings", 2048),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tie_word_embeddings": ("tie_word_embeddings", False),
}
_BIASES = {"qkv_bias": ("attention_bias", False), "o_bias": ("attention_bias", False)}


def _windows(raw: dict[str, Any], window: int | None, default: list[str]) -> tuple[int | None, ...]:
    """Returns the windows that `layer_types` (or `default`, where it is missing) gives each layer."""
    kinds, num_layers = raw.get("layer_types") or default, take(raw, "num_hidden_layers")
    if len(kinds) != num_layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise UsageError(
            f"config.json: layer_types = {kinds} must say sliding_attention or full_attention for each of the "
            f"{num_layers} layers."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _kinds(config: DecoderConfig) -> list[str]:
    return ["full_attention" if window is None else "sliding_attention" for window in config.sliding_windows]


def _window(config: DecoderConfig) -> int | None:
    windows = {window for window in config.sliding_windows if window is not None}
    assert len(windows) <= 1, "one window size a model in these families"
    return next(iter(windows), None)


def _read_mistral(raw: dict[str, Any]) -> dict[str, Any]:
    window = raw.get("sliding_window", 4096 if raw["model_type"] == "mistral" else None)  # transformers' default
    return {"sliding_windows": (window,) * take(raw, "num_hidden_layers")}


def _write_mistral(config: DecoderConfig) -> dict[str, Any]:
    return {"sliding_window": _window(config)}


def _read_qwen(raw: dict[str, Any]) -> dict[str, Any]:
    num_layers, first = take(raw, "num_hidden_layers"), raw.get("max_window_layers", 28)
    window = raw.get("sliding_window") if raw.get("use_sliding_window", False) else None
    default = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    return {"sliding_windows": (None,) * num_layers if window is None else _windows(raw, window, default)}


def _write_qwen(config: DecoderConfig) -> dict[str, Any]:
    kinds = {} if config.num_experts else {"layer_types": _kinds(config)}
    window = _window(config)
    if window is None:  # then the other two say nothing, and stay as they were
        raw = {"sliding_window": None, "max_window_layers": config.num_layers, **config.raw}
        return {"use_sliding_window": False, **kinds, **{k: raw[k] for k in ("sliding_window", "max_window_layers")}}
    first = _kinds(config).index("sliding_attention")
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": first, **kinds}


def _read_qwen3_moe(raw: dict[str, Any]) -> dict[str, Any]:
    step, only = raw.get("decoder_sparse_step", 1), set(raw.get("mlp_only_layers") or ())
    layers = range(take(raw, "num_hidden_layers"))
    dense = tuple(layer for layer in layers if layer in only or (layer + 1) % step)
    return _read_qwen(raw) | {"dense_layers": dense}


def _write_qwen3_moe(config: DecoderConfig) -> dict[str, Any]:
    keys = _write_qwen(config)
    if not config.raw:
        keys |= {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}
    if "num_local_experts" in config.raw:
        keys["num_local_experts"] = config.num_experts
    return keys


def _read_gemma(raw: dict[str, Any]) -> dict[str, Any]:
    return {"embedding_scale": float(take(raw, "hidden_size")) ** 0.5}


def _read_gemma2(raw: dict[str, Any]) -> dict[str, Any]:
    pattern = 2 if raw["model_type"] == "gemma2" else raw.get("_sliding_window_pattern", 6)
    period, layers = raw.get("sliding_window_pattern", pattern), range(take(raw, "num_hidden_layers"))
    default = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in layers]
    return _read_gemma(raw) | {
        "query_scale": raw.get("query_pre_attn_scalar", 256) ** -0.5,
        "sliding_windows": _windows(raw, raw.get("sliding_window", 4096), default),
    }


def _write_gemma2(config: DecoderConfig) -> dict[str, Any]:
    assert config.query_scale is not None, "read_rest sets it"
    return {
        "query_pre_attn_scalar": config.raw.get("query_pre_attn_scalar", round(config.query_scale**-2)),
        "sliding_window": _window(config) or config.raw.get("sliding_window"),
        "layer_types": _kinds(config),
    }


def _read_gemma3(raw: dict[str, Any]) -> dict[str, Any]:
    """Two ropes, nested by layer type in the new spelling, in keys of their own in the old one."""
    new = raw.get("rope_parameters") or {}
    nested = new if set(new) & {"full_attention", "sliding_attention"} else {"full_attention": new}
    whole = read_rope({**raw, "rope_parameters": nested.get("full_attention")}, theta=1e6)
    theta = raw.get("rope_local_base_freq")
    local = read_rope({"rope_parameters": nested.get("sliding_attention"), "rope_theta": theta})
    return _read_gemma2(raw) | {"rope": whole, "local_rope": local}


def _write_gemma3(config: DecoderConfig) -> dict[str, Any]:
    assert config.local_rope is not None, "read_rest sets it"
    whole, local = write_rope(config.rope), write_rope(config.local_rope)
    nested = {"full_attention": whole["rope_parameters"], "sliding_attention": local["rope_parameters"]}
    theta = {"rope_local_base_freq": config.local_rope.theta}
    return {**_write_gemma2(config), **whole, "rope_parameters": nested, **theta}


def _write_phi3(config: DecoderConfig) -> dict[str, Any]:
    keys = write_rope(config.rope)
    keys["rope_parameters"]["partial_rotary_factor"] = config.rope.partial
    if config.rope.original_max_position_embeddings is not None:
        keys["original_max_position_embeddings"] = config.rope.original_max_position_embeddings
    return keys | {"sliding_window": _window(config)}


_GEMMA_NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
_NORMS = {  # before the feed-forward, after attention, after the feed-forward
    "gemma2": _GEMMA_NORMS,
    "gemma3_text": _GEMMA_NORMS,
    "glm4": ("post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
}


def _tensors(config: DecoderConfig) -> Iterator[TensorRule]:
    """Names as in Llama but for the sandwich norms, the fused matrices and the experts."""
    yield from expand([Row(theirs="model.embed_tokens", ours=("model.embed_tokens",))])
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        yield from expand([*_attention(config), *_feedforward(config, layer), *_norms(config)], theirs=at, ours=at)
    yield from expand([Row(theirs="model.norm", ours=("model.norm",))])
    if not config.tie_word_embeddings:
        yield from expand([Row(theirs="lm_head", ours=("lm_head",))])


def _attention(config: DecoderConfig) -> Iterator[Row]:
    q, k, v, o = (f"self_attn.{part}_proj" for part in "qkvo")
    if config.family == "phi3":
        yield Row(theirs="self_attn.qkv_proj", ours=(q, k, v), op=QKV)
    else:
        pairs = config.rope_interleaved
        yield Row(theirs=q, ours=(q,), op=RotaryPairs("num_heads") if pairs else IDENTITY, bias=config.qkv_bias)
        yield Row(theirs=k, ours=(k,), op=RotaryPairs("num_kv_heads") if pairs else IDENTITY, bias=config.qkv_bias)
        yield Row(theirs=v, ours=(v,), bias=config.qkv_bias)
    yield Row(theirs=o, ours=(o,), bias=config.o_bias)
    for name in ("self_attn.q_norm", "self_attn.k_norm") if config.qk_norm else ():
        yield Row(theirs=name, ours=(name,))


def _feedforward(config: DecoderConfig, layer: int) -> Iterator[Row]:
    parts = ("gate_proj", "up_proj", "down_proj")
    if config.routes(layer):
        block, names = ("block_sparse_moe", ("w1", "w3", "w2")) if config.family == "mixtral" else ("mlp", parts)
        yield Row(theirs=f"{block}.gate", ours=("mlp.router",))
        for expert in range(config.num_experts):
            for theirs, ours in zip(names, parts, strict=True):
                yield Row(theirs=f"{block}.experts.{expert}.{theirs}", ours=(f"mlp.experts.{expert}.{ours}",))
        return
    gate, up, down = (f"mlp.{part}" for part in parts)
    if config.family in ("phi3", "glm", "glm4"):
        yield Row(theirs="mlp.gate_up_proj", ours=(gate, up), op=GATE_UP)
    else:
        yield Row(theirs=gate, ours=(gate,), bias=config.mlp_bias)
        yield Row(theirs=up, ours=(up,), bias=config.mlp_bias)
    yield Row(theirs=down, ours=(down,), bias=config.mlp_bias)


def _norms(config: DecoderConfig) -> Iterator[Row]:
    before, attention, mlp = _NORMS.get(config.family, ("post_attention_layernorm", "", ""))
    yield Row(theirs="input_layernorm", ours=("input_layernorm",))
    yield Row(theirs=before, ours=("post_attention_layernorm",))
    if config.output_norms:
        yield Row(theirs=attention, ours=("attention_output_norm",))
        yield Row(theirs=mlp, ours=("mlp_output_norm",))


_LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys={**_KEYS, **_BIASES, "mlp_bias": ("mlp_bias", False)},
    activations={"silu": "silu", "swish": "silu"},
    rope={},
    tensors=_tensors,
)
_MISTRAL = replace(
    _LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    keys=_KEYS,
    read_rest=_read_mistral,
    write_rest=_write_mistral,
)
_QWEN2 = replace(
    _MISTRAL,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fixed={"qkv_bias": True},
    read_rest=_read_qwen,
    write_rest=_write_qwen,
)
_QWEN3 = replace(
    _QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys={**_KEYS, **_BIASES, "head_dim": ("head_dim", lambda raw: 128)},
    fixed={"qk_norm": True},
)
_QWEN3_MOE = replace(
    _QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys={
        **_QWEN3.keys,
        "num_experts": ("num_experts", lambda raw: raw.get("num_local_experts", 128)),
        "experts_per_token": ("num_experts_per_tok", 8),
        "expert_size": ("moe_intermediate_size", 768),
        "normalize_expert_weights": ("norm_topk_prob", False),
        "router_loss_coefficient": ("router_aux_loss_coef", 0.001),
    },
    understood=frozenset({"num_local_experts"}),
    read_rest=_read_qwen3_moe,
    write_rest=_write_qwen3_moe,
)
_MIXTRAL = replace(
    _MISTRAL,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    keys={
        **_KEYS,
        "norm_eps": ("rms_norm_eps", 1e-5),
        "num_experts": ("num_local_experts", 8),
        "experts_per_token": ("num_experts_per_tok", 2),
        "expert_size": "intermediate_size",
        "router_loss_coefficient": ("router_aux_loss_coef", 0.001),
    },
    rope={"theta": 1e6},
)
_GEMMA = replace(
    _LLAMA,
    model_type="gemma",
    architecture="GemmaForCausalLM",
    keys={
        **_KEYS,
        **_BIASES,
        "head_dim": ("head_dim", lambda raw: 256),
        "max_position_embeddings": ("max_position_embeddings", 8192),
        "tie_word_embeddings": ("tie_word_embeddings", True),
    },
    fixed={"norm_offset": 1.0},
    # The first files say "gelu" and mean, as transformers reads them, the tanh approximation.
    activations={"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"},
    read_rest=_read_gemma,
)
_GEMMA2 = replace(
    _GEMMA,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    keys={
        **_GEMMA.keys,
        "attention_softcap": ("attn_logit_softcapping", 50.0),
        "final_softcap": ("final_logit_softcapping", 30.0),
    },
    fixed={"norm_offset": 1.0, "output_norms": True},
    activation_key="hidden_activation",
    understood=frozenset({"query_pre_attn_scalar"}),
    read_rest=_read_gemma2,
    write_rest=_write_gemma2,
)
_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    keys={
        **_GEMMA.keys,
        "max_position_embeddings": ("max_position_embeddings", 131072),
        "attention_softcap": ("attn_logit_softcapping", None),
        "final_softcap": ("final_logit_softcapping", None),
    },
    fixed={"norm_offset": 1.0, "output_norms": True, "qk_norm": True},
    rope=None,
    read_rest=_read_gemma3,
    write_rest=_write_gemma3,
)
_PHI3 = replace(
    _MISTRAL,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    keys={**_KEYS, "norm_eps": ("rms_norm_eps", 1e-5)},
    write_rest=_write_phi3,
)
_GLM = replace(
    _LLAMA,
    model_type="glm",
    architecture="GlmForCausalLM",
    keys={
        **_KEYS,
        "norm_eps": ("rms_norm_eps", 1.5625e-07),
        "head_dim": ("head_dim", lambda raw: 128),
        "max_position_embeddings": ("max_position_embeddings", 131072),
        "qkv_bias": ("attention_bias", True),
    },
    fixed={"rope_interleaved": True},
    rope={"partial": 0.5},
)
_GLM4 = replace(
    _GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    fixed={"rope_interleaved": True, "output_norms": True},
)

LLAMA_LIKE = (
    _LLAMA,
    _MISTRAL,
    _QWEN2,
    _QWEN3,
    _QWEN3_MOE,
    _MIXTRAL,
    _GEMMA,
    _GEMMA2,
    _GEMMA3,
    _PHI3,
    _GLM,
    _GLM4,
)
