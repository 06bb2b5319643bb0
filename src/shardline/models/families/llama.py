"""Families in the shape of Llama: Llama 1-3 and SmolLM2, Mistral, Qwen2 and 3, Gemma 1-3, Phi-3, GLM-4, and the
mixtures of experts Mixtral and Qwen3-MoE. Sources: their config.json files and the classes of transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardline.config import UsageError
from shardline.models.config import Activation, DecoderConfig
from shardline.models.families.family import Family, TensorRule, read_activation, rule, take
from shardline.models.families.ops import GATE_UP, IDENTITY, QKV, RotaryPairs
from shardline.models.families.rope_keys import read_rope, write_rope

__all__ = ["LLAMA_LIKE"]

_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
}
_DEFAULTS = {"max_position_embeddings": 2048, "norm_eps": 1e-6, "tie_word_embeddings": False}
_SILU: dict[str, Activation] = {"silu": "silu", "swish": "silu"}
# Gemma's first files say "gelu" and mean, as transformers reads them, the tanh approximation.
_GEMMA_GELU: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"}


def _heads(raw: dict[str, Any], *, default_head_dim: int | None = None) -> dict[str, Any]:
    hidden, heads = take(raw, "hidden_size"), take(raw, "num_attention_heads")
    head_dim = raw.get("head_dim") or default_head_dim
    if head_dim is None:
        if hidden % heads:
            raise UsageError(
                f"config.json: hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}, and no "
                "head_dim is given."
            )
        head_dim = hidden // heads
    return {"head_dim": head_dim, "num_kv_heads": raw.get("num_key_value_heads") or heads}


def _write_heads(config: DecoderConfig) -> dict[str, Any]:
    plain = config.head_dim * config.num_heads == config.hidden_size
    as_it_was = plain and config.raw.get("head_dim", config.head_dim) is None
    return {"head_dim": None if as_it_was else config.head_dim, "num_key_value_heads": config.num_kv_heads}


def _layer_types(raw: dict[str, Any], window: int | None, default: list[str]) -> tuple[int | None, ...]:
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


def _read_llama(raw: dict[str, Any]) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias", False))
    return {
        **_heads(raw),
        "rope": read_rope(raw),
        "activation": read_activation(raw, "hidden_act", _SILU),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(raw.get("mlp_bias", False)),
    }


def _write_llama(config: DecoderConfig) -> dict[str, Any]:
    return {
        **_write_heads(config),
        **write_rope(config.rope),
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


def _read_mistral(raw: dict[str, Any]) -> dict[str, Any]:
    """What is missing has transformers' defaults, which differ between Mistral and Mixtral."""
    mixtral = raw["model_type"] == "mixtral"
    window = raw.get("sliding_window", None if mixtral else 4096)
    return {
        **_heads(raw),
        "rope": read_rope(raw, theta=1e6 if mixtral else 1e4),
        "activation": read_activation(raw, "hidden_act", _SILU),
        "sliding_windows": (window,) * take(raw, "num_hidden_layers"),
    }


def _write_mistral(config: DecoderConfig) -> dict[str, Any]:
    window = {"sliding_window": _window(config)}
    return {**_write_heads(config), **write_rope(config.rope), "hidden_act": "silu", **window}


def _read_qwen(raw: dict[str, Any]) -> dict[str, Any]:
    num_layers, window = take(raw, "num_hidden_layers"), raw.get("sliding_window")
    if window is None or not raw.get("use_sliding_window", False):
        windows: tuple[int | None, ...] = (None,) * num_layers
    else:
        first = raw.get("max_window_layers", 28)
        default = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
        windows = _layer_types(raw, window, default)
    qwen2 = raw["model_type"] == "qwen2"
    bias = bool(raw.get("attention_bias", False))
    return {
        **_heads(raw, default_head_dim=None if qwen2 else 128),
        "rope": read_rope(raw),
        "activation": read_activation(raw, "hidden_act", _SILU),
        "sliding_windows": windows,
        "qkv_bias": qwen2 or bias,
        "o_bias": not qwen2 and bias,
    }


def _write_qwen(config: DecoderConfig) -> dict[str, Any]:
    keys = {**_write_heads(config), **write_rope(config.rope), "hidden_act": "silu"}
    if config.family != "qwen2":
        keys["attention_bias"] = config.qkv_bias
    if config.family == "qwen3_moe":
        return keys | _write_qwen_window(config)
    return keys | _write_qwen_window(config) | {"layer_types": _kinds(config)}


def _write_qwen_window(config: DecoderConfig) -> dict[str, Any]:
    window = _window(config)
    if window is None:  # then the other two say nothing, and stay as they were
        raw = {"sliding_window": None, "max_window_layers": config.num_layers, **config.raw}
        return {
            "use_sliding_window": False,
            **{key: raw[key] for key in ("sliding_window", "max_window_layers") if key in raw},
        }
    first = _kinds(config).index("sliding_attention")
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": first}


def _read_gemma(raw: dict[str, Any]) -> dict[str, Any]:
    model_type, num_layers = raw["model_type"], take(raw, "num_hidden_layers")
    key = "hidden_act" if model_type == "gemma" and not raw.get("hidden_activation") else "hidden_activation"
    bias = bool(raw.get("attention_bias", False))
    values = {
        **_heads(raw, default_head_dim=256),
        "activation": read_activation(raw, key, _GEMMA_GELU),
        "embedding_scale": float(take(raw, "hidden_size")) ** 0.5,
        "qkv_bias": bias,
        "o_bias": bias,
    }
    if model_type == "gemma":
        return values | {"rope": read_rope(raw)}
    period = 2 if model_type == "gemma2" else raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6))
    default = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(num_layers)]
    values |= {
        "query_scale": raw.get("query_pre_attn_scalar", 256) ** -0.5,
        "sliding_windows": _layer_types(raw, raw.get("sliding_window", 4096), default),
        "attention_softcap": raw.get("attn_logit_softcapping", 50.0 if model_type == "gemma2" else None),
        "final_softcap": raw.get("final_logit_softcapping", 30.0 if model_type == "gemma2" else None),
    }
    if model_type == "gemma2":
        return values | {"rope": read_rope(raw)}
    nested = raw.get("rope_parameters") or {}
    if set(nested) & {"full_attention", "sliding_attention"}:
        whole = read_rope({"rope_parameters": nested.get("full_attention")}, theta=1e6)
        local = read_rope({"rope_parameters": nested.get("sliding_attention")})
        return values | {"rope": whole, "local_rope": local}
    local = read_rope({"rope_theta": raw.get("rope_local_base_freq", 10000.0)})
    return values | {"rope": read_rope(raw, theta=1e6), "local_rope": local}


def _write_gemma(config: DecoderConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {**_write_heads(config), "attention_bias": config.qkv_bias}
    act = "hidden_act" if config.family == "gemma" else "hidden_activation"
    keys[act] = config.raw.get(act) or "gelu_pytorch_tanh"
    if config.family == "gemma":
        return keys | write_rope(config.rope)
    assert config.query_scale is not None, "read_rest sets it"
    keys |= {
        "query_pre_attn_scalar": config.raw.get("query_pre_attn_scalar", round(config.query_scale**-2)),
        "sliding_window": _window(config) or config.raw.get("sliding_window"),
        "layer_types": _kinds(config),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
    }
    if config.family == "gemma2":
        return keys | write_rope(config.rope)
    assert config.local_rope is not None, "read_rest sets it"
    whole, local = write_rope(config.rope), write_rope(config.local_rope)
    return {
        **keys,
        **whole,
        "rope_parameters": {
            "full_attention": whole["rope_parameters"],
            "sliding_attention": local["rope_parameters"],
        },
        "rope_local_base_freq": config.local_rope.theta,
    }


def _read_phi3(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        **_heads(raw),
        "rope": read_rope(raw),
        "activation": read_activation(raw, "hidden_act", _SILU),
        "sliding_windows": (raw.get("sliding_window"),) * take(raw, "num_hidden_layers"),
    }


def _write_phi3(config: DecoderConfig) -> dict[str, Any]:
    keys = write_rope(config.rope)
    keys |= {"num_key_value_heads": config.num_kv_heads, "hidden_act": "silu"}
    keys["rope_parameters"]["partial_rotary_factor"] = config.rope.partial
    if config.rope.original_max_position_embeddings is not None:
        keys["original_max_position_embeddings"] = config.rope.original_max_position_embeddings
    return keys | {"sliding_window": _window(config)}


def _read_glm(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        **_heads(raw, default_head_dim=128),
        "rope": read_rope(raw, partial=0.5),
        "activation": read_activation(raw, "hidden_act", _SILU),
        "qkv_bias": bool(raw.get("attention_bias", raw["model_type"] == "glm")),
    }


def _write_glm(config: DecoderConfig) -> dict[str, Any]:
    rope = write_rope(config.rope)
    return {**_write_heads(config), **rope, "hidden_act": "silu", "attention_bias": config.qkv_bias}


def _read_mixtral(raw: dict[str, Any]) -> dict[str, Any]:
    experts = raw.get("num_local_experts", 8)
    return _read_mistral(raw) | {
        "num_experts": experts,
        "experts_per_token": raw.get("num_experts_per_tok", 2),
        "expert_size": take(raw, "intermediate_size"),
        "router_loss_coefficient": raw.get("router_aux_loss_coef", 0.001),
    }


def _write_mixtral(config: DecoderConfig) -> dict[str, Any]:
    return _write_mistral(config) | {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.router_loss_coefficient,
    }


def _read_qwen3_moe(raw: dict[str, Any]) -> dict[str, Any]:
    step, num_layers = raw.get("decoder_sparse_step", 1), take(raw, "num_hidden_layers")
    only = set(raw.get("mlp_only_layers") or ())
    experts = raw.get("num_experts", raw.get("num_local_experts", 128))
    return _read_qwen(raw) | {
        "num_experts": experts,
        "experts_per_token": raw.get("num_experts_per_tok", 8),
        "expert_size": raw.get("moe_intermediate_size", 768),
        "normalize_expert_weights": bool(raw.get("norm_topk_prob", False)),
        "dense_layers": tuple(i for i in range(num_layers) if i in only or (i + 1) % step),
        "router_loss_coefficient": raw.get("router_aux_loss_coef", 0.001),
    }


def _write_qwen3_moe(config: DecoderConfig) -> dict[str, Any]:
    keys = _write_qwen(config) | {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_size,
        "norm_topk_prob": config.normalize_expert_weights,
        "router_aux_loss_coef": config.router_loss_coefficient,
    }
    if not config.raw:
        keys |= {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}
    if "num_local_experts" in config.raw:
        keys["num_local_experts"] = config.num_experts
    return keys


def _tensors(config: DecoderConfig) -> Iterator[TensorRule]:
    """Names as in Llama but for the sandwich norms, the fused matrices and the experts."""
    fused, glm = config.family in ("phi3",), config.family in ("glm", "glm4")
    yield rule("model.embed_tokens.weight")
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        attn = f"{at}self_attn."
        if fused:
            yield rule(f"{attn}qkv_proj.weight", *(f"{attn}{part}_proj.weight" for part in "qkv"), op=QKV)
        for part in () if fused else "qkv":
            heads = "num_heads" if part == "q" else "num_kv_heads"
            op = RotaryPairs(heads) if config.rope_interleaved and part in "qk" else IDENTITY
            for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
                yield rule(f"{attn}{part}_proj.{kind}", op=op)
        for kind in ("weight", "bias") if config.o_bias else ("weight",):
            yield rule(f"{attn}o_proj.{kind}")
        for part in "qk" if config.qk_norm else ():
            yield rule(f"{attn}{part}_norm.weight")
        yield from _feedforward(config, layer, f"{at}mlp.", fused=fused or glm)
        yield rule(f"{at}input_layernorm.weight")
        before_mlp, after_attention, after_mlp = _NORMS.get(config.family, _LLAMA_NORMS)
        yield rule(f"{at}{before_mlp}.weight", f"{at}post_attention_layernorm.weight")
        if config.output_norms:
            yield rule(f"{at}{after_attention}.weight", f"{at}attention_output_norm.weight")
            yield rule(f"{at}{after_mlp}.weight", f"{at}mlp_output_norm.weight")
    yield rule("model.norm.weight")
    if not config.tie_word_embeddings:
        yield rule("lm_head.weight")


_LLAMA_NORMS = ("post_attention_layernorm", "", "")
_GEMMA_NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
_NORMS = {
    "gemma2": _GEMMA_NORMS,
    "gemma3_text": _GEMMA_NORMS,
    "glm4": ("post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
}


def _feedforward(config: DecoderConfig, layer: int, mlp: str, *, fused: bool) -> Iterator[TensorRule]:
    if config.routes(layer):
        mixtral = config.family == "mixtral"
        theirs = mlp.replace("mlp.", "block_sparse_moe.") if mixtral else mlp
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        yield rule(f"{theirs}gate.weight", f"{mlp}router.weight")
        for expert in range(config.num_experts):
            for name, ours in zip(names, ("gate_proj", "up_proj", "down_proj"), strict=True):
                yield rule(f"{theirs}experts.{expert}.{name}.weight", f"{mlp}experts.{expert}.{ours}.weight")
        return
    kinds = ("weight", "bias") if config.mlp_bias else ("weight",)
    for kind in kinds:
        if fused:
            yield rule(f"{mlp}gate_up_proj.{kind}", f"{mlp}gate_proj.{kind}", f"{mlp}up_proj.{kind}", op=GATE_UP)
        for part in () if fused else ("gate_proj", "up_proj"):
            yield rule(f"{mlp}{part}.{kind}")
        yield rule(f"{mlp}down_proj.{kind}")


_LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys=_KEYS,
    defaults=_DEFAULTS,
    understood=frozenset({"attention_bias", "mlp_bias"}),
    read_rest=_read_llama,
    write_rest=_write_llama,
    tensors=_tensors,
)
_MISTRAL = replace(
    _LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    understood=frozenset(),
    read_rest=_read_mistral,
    write_rest=_write_mistral,
)
_QWEN2 = replace(
    _LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    understood=frozenset(),
    read_rest=_read_qwen,
    write_rest=_write_qwen,
)
_QWEN3 = replace(
    _QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={"qk_norm": True},
    understood=frozenset({"attention_bias"}),
)
_GEMMA = replace(
    _LLAMA,
    model_type="gemma",
    architecture="GemmaForCausalLM",
    defaults={**_DEFAULTS, "max_position_embeddings": 8192, "tie_word_embeddings": True},
    fixed={"norm_offset": 1.0},
    understood=frozenset({"attention_bias"}),
    read_rest=_read_gemma,
    write_rest=_write_gemma,
)
_GEMMA2 = replace(
    _GEMMA,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fixed={"norm_offset": 1.0, "output_norms": True},
    understood=frozenset(
        {"attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"}
    ),
)
_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fixed={"norm_offset": 1.0, "output_norms": True, "qk_norm": True},
    defaults={**_DEFAULTS, "max_position_embeddings": 131072, "tie_word_embeddings": True},
)
_PHI3 = replace(
    _MISTRAL,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    read_rest=_read_phi3,
    write_rest=_write_phi3,
)
_GLM = replace(
    _LLAMA,
    model_type="glm",
    architecture="GlmForCausalLM",
    defaults={**_DEFAULTS, "norm_eps": 1.5625e-07, "max_position_embeddings": 131072},
    fixed={"rope_interleaved": True},
    understood=frozenset({"attention_bias"}),
    read_rest=_read_glm,
    write_rest=_write_glm,
)
_GLM4 = replace(
    _GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    fixed={"rope_interleaved": True, "output_norms": True},
)
_MIXTRAL = replace(
    _MISTRAL,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    understood=frozenset({"num_local_experts"}),
    defaults={**_DEFAULTS, "norm_eps": 1e-5},
    read_rest=_read_mixtral,
    write_rest=_write_mixtral,
)
_QWEN3_MOE = replace(
    _QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    understood=frozenset({"attention_bias", "num_experts", "num_local_experts"}),
    read_rest=_read_qwen3_moe,
    write_rest=_write_qwen3_moe,
)

LLAMA_LIKE = (
    _LLAMA,
    _MISTRAL,
    _QWEN2,
    _QWEN3,
    _GEMMA,
    _GEMMA2,
    _GEMMA3,
    _PHI3,
    _GLM,
    _GLM4,
    _MIXTRAL,
    _QWEN3_MOE,
)
