"""Llama 1-3 and SmolLM2 (`llama`), Mistral, Qwen2/2.5 and Qwen3: the decoder's own names, and their differences.

Sources: the families' config.json files, and the classes of transformers 5 that read them.
"""

from __future__ import annotations

from typing import Any

from shardline.config import UsageError
from shardline.models.config import DecoderConfig
from shardline.models.families.family import Family, TensorRule, take
from shardline.models.families.rope_keys import read_rope, write_rope

__all__ = ["FAMILIES"]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Present in some checkpoints, and each changes what the model computes: reading past one would serve a wrong model.
_FOREIGN = {
    "quantization_config": None,
    "num_experts": None,
    "num_local_experts": None,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "partial_rotary_factor": 1.0,
    "query_pre_attn_scalar": None,
}


def _read(raw: dict[str, Any]) -> DecoderConfig:
    model_type = raw["model_type"]
    _reject_foreign_mathematics(raw)
    hidden_size, num_heads, num_layers = (
        take(raw, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    head_dim = raw.get("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise UsageError(
                f"config.json: hidden_size = {hidden_size} is not a multiple of num_attention_heads = {num_heads}, "
                "and no head_dim is given."
            )
        head_dim = 128 if model_type == "qwen3" else hidden_size // num_heads
    attention_bias = bool(raw.get("attention_bias", False))
    return DecoderConfig(
        family=model_type,
        vocab_size=take(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=take(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=read_rope(raw, default_theta=10000.0),
        sliding_windows=_read_windows(raw, num_layers),
        qkv_bias=model_type == "qwen2" or attention_bias,
        o_bias=model_type != "qwen2" and attention_bias,
        mlp_bias=model_type == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        initializer_range=raw.get("initializer_range", 0.02),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_as_tuple(raw.get("eos_token_id")),
        pad_token_id=raw.get("pad_token_id"),
        raw=dict(raw),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _from_tuple(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
        **write_rope(config.rope),
    }
    if config.family in ("llama", "qwen3"):
        keys["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        keys["mlp_bias"] = config.mlp_bias
    keys.update(_write_windows(config))
    return keys


def _read_windows(raw: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Mistral: all layers or none. Qwen: `use_sliding_window`, from layer `max_window_layers` on, or `layer_types`."""
    model_type = raw["model_type"]
    window = raw.get("sliding_window", 4096 if model_type == "mistral" else None)  # transformers' default
    if model_type == "llama" or window is None:
        return (None,) * num_layers
    if model_type == "mistral":
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise UsageError(
            f"config.json: layer_types = {kinds} must say sliding_attention or full_attention for each of the "
            f"{num_layers} layers."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _write_windows(config: DecoderConfig) -> dict[str, Any]:
    if config.family == "llama":
        return {}
    windows = {window for window in config.sliding_windows if window is not None}
    assert len(windows) <= 1, "one window size a model in these families"
    window = next(iter(windows), None)
    if config.family == "mistral":
        return {"sliding_window": window}
    kinds = ["full_attention" if size is None else "sliding_attention" for size in config.sliding_windows]
    if window is None:  # then the other two say nothing, and stay as they were
        raw = {"sliding_window": None, "max_window_layers": config.num_layers, **config.raw}
        unused = {key: raw[key] for key in ("sliding_window", "max_window_layers")}
        return {"use_sliding_window": False, **unused, "layer_types": kinds}
    return {
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": kinds.index("sliding_attention"),
        "layer_types": kinds,
    }


def _reject_foreign_mathematics(raw: dict[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UsageError(f"config.json: hidden_act = {activation!r}; the {raw['model_type']} family computes silu.")
    for key, neutral in _FOREIGN.items():
        if raw.get(key) is not None and raw[key] != neutral:
            raise UsageError(
                f"config.json: {key} = {raw[key]!r} changes what the model computes and is not understood for "
                f"model_type {raw['model_type']!r}."
            )


def _as_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _from_tuple(ids: tuple[int, ...]) -> int | list[int] | None:
    return list(ids) if len(ids) > 1 else next(iter(ids), None)


def _rules(config: DecoderConfig) -> tuple[TensorRule, ...]:
    layer = "model.layers.{layer}."
    names = ["model.embed_tokens.weight"]
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        names.append(f"{layer}self_attn.{projection}.weight")
        if config.o_bias if projection == "o_proj" else config.qkv_bias:
            names.append(f"{layer}self_attn.{projection}.bias")
    if config.qk_norm:
        names += [f"{layer}self_attn.q_norm.weight", f"{layer}self_attn.k_norm.weight"]
    for projection in ("gate_proj", "up_proj", "down_proj"):
        names.append(f"{layer}mlp.{projection}.weight")
        if config.mlp_bias:
            names.append(f"{layer}mlp.{projection}.bias")
    names += [
        f"{layer}input_layernorm.weight",
        f"{layer}post_attention_layernorm.weight",
        "model.norm.weight",
    ]
    if not config.tie_word_embeddings:
        names.append("lm_head.weight")
    return tuple(TensorRule(ours=name, theirs=name) for name in names)


FAMILIES = tuple(Family(model_type=name, read=_read, write=_write, rules=_rules) for name in _ARCHITECTURES)
