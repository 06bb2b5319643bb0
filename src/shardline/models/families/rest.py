"""What tables can't say of a config.json: a window for each layer, two ropes, keys that hang together.

read, write = REST["gemma3"]
read(raw, fields)   # fields of ours, for a config.json and the fields that the tables gave
write(config)       # keys of config.json
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardline.config import UsageError
from shardline.models.config import DecoderConfig
from shardline.models.families.rope_keys import read_rope, write_rope

__all__ = ["REST"]

Values = Mapping[str, Any]


def _windows(raw: Values, fields: Values, window: Any, slides: Callable[[int], bool]) -> dict[str, Any]:
    """Gives the window to those layers that `layer_types` names, or `slides` where that is missing."""
    num_layers = fields["num_layers"]
    usual = ["sliding_attention" if slides(layer) else "full_attention" for layer in range(num_layers)]
    kinds = raw.get("layer_types") or usual
    if len(kinds) != num_layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise UsageError(
            f"config.json: layer_types = {kinds} must say sliding_attention or full_attention for each of "
            f"the {num_layers} layers."
        )
    return {"sliding_windows": tuple(window if kind == "sliding_attention" else None for kind in kinds)}


def _kinds(config: DecoderConfig) -> list[str]:
    return ["full_attention" if window is None else "sliding_attention" for window in config.sliding_windows]


def _window(config: DecoderConfig) -> int | None:
    windows = {window for window in config.sliding_windows if window is not None}
    assert len(windows) <= 1, "one window size a model in these families"
    return next(iter(windows), None)


def _read_mistral(raw: Values, fields: Values) -> dict[str, Any]:
    usual = 4096 if raw["model_type"] == "mistral" else None  # as transformers fills it in
    return {"sliding_windows": (raw.get("sliding_window", usual),) * fields["num_layers"]}


def _read_qwen(raw: Values, fields: Values) -> dict[str, Any]:
    window = raw.get("sliding_window") if raw.get("use_sliding_window", False) else None
    first = raw.get("max_window_layers", 28)
    return {} if window is None else _windows(raw, fields, window, lambda layer: layer >= first)


def _write_qwen(config: DecoderConfig) -> dict[str, Any]:
    kinds, window = _kinds(config), _window(config)
    keys: dict[str, Any] = {"use_sliding_window": window is not None}
    if window is None:  # then these two say nothing, and stay as they were
        keys["sliding_window"] = config.raw.get("sliding_window")
        keys["max_window_layers"] = config.raw.get("max_window_layers", config.num_layers)
    else:
        keys["sliding_window"] = window
        keys["max_window_layers"] = kinds.index("sliding_attention")
    return keys if config.num_experts else {**keys, "layer_types": kinds}


def _read_qwen3_moe(raw: Values, fields: Values) -> dict[str, Any]:
    step, only = raw.get("decoder_sparse_step", 1), set(raw.get("mlp_only_layers") or ())
    dense = tuple(layer for layer in range(fields["num_layers"]) if layer in only or (layer + 1) % step)
    return _read_qwen(raw, fields) | {"dense_layers": dense}


def _write_qwen3_moe(config: DecoderConfig) -> dict[str, Any]:
    keys = _write_qwen(config)
    if not config.raw:
        keys |= {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}
    if "num_local_experts" in config.raw:
        keys["num_local_experts"] = config.num_experts
    return keys


def _read_gemma2(raw: Values, fields: Values) -> dict[str, Any]:
    usual = 2 if raw["model_type"] == "gemma2" else raw.get("_sliding_window_pattern", 6)
    period, window = raw.get("sliding_window_pattern", usual), raw.get("sliding_window", 4096)
    windows = _windows(raw, fields, window, lambda layer: (layer + 1) % period != 0)
    return windows | {"query_scale": raw.get("query_pre_attn_scalar", 256) ** -0.5}


def _write_gemma2(config: DecoderConfig) -> dict[str, Any]:
    scale = config.query_scale or config.head_dim**-0.5
    return {
        "query_pre_attn_scalar": config.raw.get("query_pre_attn_scalar", round(scale**-2)),
        "sliding_window": _window(config) or config.raw.get("sliding_window"),
        "layer_types": _kinds(config),
    }


def _read_gemma3(raw: Values, fields: Values) -> dict[str, Any]:
    """Two ropes, nested by layer type in the new spelling, in keys of their own in the old one."""
    new = raw.get("rope_parameters") or {}
    nested = new if set(new) & {"full_attention", "sliding_attention"} else {"full_attention": new}
    whole = read_rope({**raw, "rope_parameters": nested.get("full_attention")}, theta=1e6)
    theta = raw.get("rope_local_base_freq")
    local = read_rope({"rope_parameters": nested.get("sliding_attention"), "rope_theta": theta})
    return _read_gemma2(raw, fields) | {"rope": whole, "local_rope": local}


def _write_gemma3(config: DecoderConfig) -> dict[str, Any]:
    whole, local = write_rope(config.rope), write_rope(config.local_rope or config.rope)
    nested = {"full_attention": whole["rope_parameters"], "sliding_attention": local["rope_parameters"]}
    theta = {"rope_local_base_freq": local["rope_theta"]}
    return {**_write_gemma2(config), **whole, "rope_parameters": nested, **theta}


def _write_phi3(config: DecoderConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {"sliding_window": _window(config), **write_rope(config.rope)}
    keys["rope_parameters"]["partial_rotary_factor"] = config.rope.partial
    if config.rope.original_max_position_embeddings is not None:
        keys["original_max_position_embeddings"] = config.rope.original_max_position_embeddings
    return keys


def _read_opt(raw: Values, fields: Values) -> dict[str, Any]:
    before = bool(raw.get("do_layer_norm_before", True))
    width = raw.get("word_embed_proj_dim") or fields["hidden_size"]
    return {
        "block": "pre" if before else "post",
        "final_norm": before and not raw.get("_remove_final_layer_norm", False),
        "embedding_dim": None if width == fields["hidden_size"] else width,
    }


def _write_opt(config: DecoderConfig) -> dict[str, Any]:
    return {
        "do_layer_norm_before": config.block == "pre",
        "_remove_final_layer_norm": config.block == "pre" and not config.final_norm,
        "word_embed_proj_dim": config.embedding_width,
    }


def _read_chatglm(raw: Values, fields: Values) -> dict[str, Any]:
    rope = read_rope({"rope_theta": 10000.0 * raw.get("rope_ratio", 1)}, partial=0.5)
    grouped = raw.get("multi_query_attention", False)
    num_groups = raw.get("multi_query_group_num", 1) if grouped else fields["num_heads"]
    return {"num_kv_heads": num_groups, "rope": rope}


def _write_chatglm(config: DecoderConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {"rope_ratio": config.raw.get("rope_ratio", config.rope.theta / 10000.0)}
    # What was read may say the groups already, in whichever of its ways.
    if not config.raw or _read_chatglm(config.raw, vars(config))["num_kv_heads"] != config.num_kv_heads:
        grouped = config.num_kv_heads != config.num_heads
        keys |= {"multi_query_attention": grouped, "multi_query_group_num": config.num_kv_heads}
    return keys


REST = {
    "nothing": (lambda raw, fields: {}, lambda config: {}),
    "mistral": (_read_mistral, lambda config: {"sliding_window": _window(config)}),
    "qwen": (_read_qwen, _write_qwen),
    "qwen3_moe": (_read_qwen3_moe, _write_qwen3_moe),
    "gemma2": (_read_gemma2, _write_gemma2),
    "gemma3": (_read_gemma3, _write_gemma3),
    "phi3": (_read_mistral, _write_phi3),
    "opt": (_read_opt, _write_opt),
    "chatglm": (_read_chatglm, _write_chatglm),
}
