"""config.json as transformers 4 and 5 write it: read alike, missing keys as transformers fills them in, and an error
for every key that changes the mathematics and is not understood.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from models.oracle import CONFIGS, SIZES
from models.test_chatglm import CONFIG as CHATGLM
from shardline.config import UsageError
from shardline.models.config import DecoderConfig, RopeConfig
from shardline.models.families import FAMILIES, read_model_config, write_model_config

FAMILY_EXAMPLES = {config_class.model_type: name for name, (config_class, _) in reversed(CONFIGS.items())}


def new_style(name: str) -> dict[str, Any]:
    """config.json as transformers 5 writes it."""
    if name == "chatglm":
        return dict(CHATGLM)
    config_class, extra = CONFIGS[name]
    return json.loads(config_class(**{**SIZES, **extra, "dtype": "float32"}).to_json_string(use_diff=False))


def old_style(new: dict[str, Any], *, rope_name: str = "rope_type") -> dict[str, Any]:
    """The same model as transformers 4 wrote it, by its own rules and not by our writer."""
    old = {
        key: value
        for key, value in new.items()
        if key
        not in ("rope_parameters", "layer_types", "dtype", "use_bidirectional_attention", "_sliding_window_pattern")
    }
    old["torch_dtype"] = new.get("dtype", "float32")
    rope = dict(new.get("rope_parameters") or {})
    if "full_attention" in rope:  # Gemma 3: one theta beside the other, and only the global one is stretched
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        old["sliding_window_pattern"] = new["layer_types"].index("full_attention") + 1
        rope = dict(rope["full_attention"])
    if not rope:
        return old
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else {rope_name: kind, **rope}
    if new["model_type"] == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    return old


@pytest.mark.parametrize("rope_name", ["rope_type", "type"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_both_styles_are_read_alike(name, rope_name):
    new = new_style(name)
    old = old_style(new, rope_name=rope_name)
    assert read_model_config(old) == read_model_config(new)
    if read_model_config(new).position == "rope":
        assert "rope_theta" in old
        assert "rope_parameters" in new


@pytest.mark.parametrize("name", [*sorted(CONFIGS), "chatglm"])
def test_both_styles_are_written_whichever_was_read(name):
    """What is written can be read by either: without the new keys, and without the old ones."""
    new = new_style(name)
    for read in (new, old_style(new)):
        config = read_model_config(read)
        both = json.loads(json.dumps(write_model_config(config, dtype="bfloat16")))
        assert both["dtype"] == both["torch_dtype"] == "bfloat16"
        only_new = {key: value for key, value in both.items() if key not in ("rope_theta", "rope_scaling")}
        assert read_model_config(both) == read_model_config(only_new) == config
        assert read_model_config({key: value for key, value in both.items() if key != "rope_parameters"}) == config


# What these say shows in the tensors' shapes, so that a wrong guess can't be loaded.
SHAPES = {"vocab_size", "num_key_value_heads", "head_dim", "max_position_embeddings", "moe_intermediate_size"}
SHAPES |= {"num_local_experts", "n_inner", "word_embed_proj_dim", "n_positions"}
# Ids change no logit, and every published file has those that its tokenizer uses.
TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id"}


@pytest.mark.parametrize("model_type", sorted(FAMILY_EXAMPLES))
def test_a_missing_key_is_what_transformers_makes_of_it(model_type):
    """Each key is left out in turn, in both styles; transformers' class fills it in, and we do the same, or refuse."""
    config_class, _ = CONFIGS[FAMILY_EXAMPLES[model_type]]
    new = new_style(FAMILY_EXAMPLES[model_type])
    compared, different = 0, {}
    for style in (new, old_style(new)):
        for key in set(style) - SHAPES - TOKENS - {"model_type"}:
            less = {name: value for name, value in style.items() if name != key}
            try:
                ours = read_model_config(dict(less))
            except UsageError:
                continue
            theirs = read_model_config(json.loads(config_class(**less).to_json_string(use_diff=False)))
            if ours != theirs:
                different[key] = [
                    (a.name, getattr(ours, a.name), getattr(theirs, a.name))
                    for a in dataclasses.fields(DecoderConfig)
                    if a.compare and getattr(ours, a.name) != getattr(theirs, a.name)
                ]
            compared += 1
    assert not different
    assert compared > 20


NOT_UNDERSTOOD: dict[str, dict[str, Any]] = {
    "llama": {"quantization_config": {"bits": 4}, "final_logit_softcapping": 30.0, "num_local_experts": 8},
    "mistral": {"attention_bias": True, "quantization_config": {"bits": 4}},
    "qwen2": {"num_experts": 60, "qk_layernorm": True},
    "qwen3": {"n_routed_experts": 64, "attn_logit_softcapping": 50.0},
    "gemma": {"use_bidirectional_attention": True, "final_logit_softcapping": 30.0},
    "gemma2": {"use_bidirectional_attention": True, "quantization_config": {"bits": 4}},
    "gemma3_text": {"use_bidirectional_attention": True, "num_experts": 8},
    "phi": {"quantization_config": {"bits": 8}, "attention_bias": True},
    "phi3": {"quantization_config": {"bits": 4}, "mlp_bias": True},
    "glm": {"n_routed_experts": 128, "logit_scale": 0.5},
    "glm4": {"qk_layernorm": True, "quantization_config": {"bits": 4}},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "add_cross_attention": True},
    "opt": {"enable_bias": False, "layer_norm_elementwise_affine": False},
    "bloom": {"apply_residual_connection_post_layernorm": True, "attn_logit_softcapping": 5.0},
    "chatglm": {"post_layer_norm": False, "rmsnorm": False, "add_bias_linear": True},
    "mixtral": {"router_jitter_noise": 0.1, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"shared_expert_intermediate_size": 64, "kv_lora_rank": 512},
}


def test_every_family_refuses_something():
    assert set(NOT_UNDERSTOOD) == set(FAMILIES)
    assert all(len(keys) >= 2 for keys in NOT_UNDERSTOOD.values())


@pytest.mark.parametrize(
    ("model_type", "key"), [(model_type, key) for model_type, keys in NOT_UNDERSTOOD.items() for key in keys]
)
def test_what_is_not_understood_is_an_error_that_names_it(model_type, key):
    raw = new_style("chatglm" if model_type == "chatglm" else FAMILY_EXAMPLES[model_type])
    value = NOT_UNDERSTOOD[model_type][key]
    assert raw.get(key) != value
    read_model_config(raw)
    with pytest.raises(UsageError, match=f"{key} = ") as error:
        read_model_config({**raw, key: value})
    assert repr(model_type) in str(error.value)


@pytest.mark.parametrize("key", ["rope_interval", "low_freq_factro"])
def test_a_rope_field_that_is_not_understood_is_an_error(key):
    raw = new_style("llama-llama3")
    with pytest.raises(UsageError, match=key):
        read_model_config({**raw, "rope_parameters": {**raw["rope_parameters"], key: 2.0}})


@pytest.mark.parametrize(
    ("name", "key"), [("llama", "rope_theta"), ("gemma3", "rope_theta"), ("gemma3", "rope_local_base_freq")]
)
def test_styles_that_disagree_are_an_error(name, key):
    raw = json.loads(json.dumps(write_model_config(read_model_config(new_style(name)), dtype="float32")))
    with pytest.raises(UsageError, match="describes the rope twice"):
        read_model_config({**raw, key: raw[key] + 1})


def test_unknown_keys_that_say_nothing_about_the_mathematics_are_carried_through():
    raw = {**new_style("qwen3"), "my_note": {"a": [1, 2]}}
    assert write_model_config(read_model_config(raw), dtype="float32")["my_note"] == {"a": [1, 2]}


# Rope facts of published config.json files in the old style, which no class of transformers 5 writes any more.
def old(model_type: str, **keys: Any) -> DecoderConfig:
    names = {"gemma3_text": "gemma3"}
    sizes = new_style(names.get(model_type, FAMILY_EXAMPLES.get(model_type, model_type)))
    drop = ("rope_parameters", "layer_types", "_sliding_window_pattern")
    return read_model_config({**{key: value for key, value in sizes.items() if key not in drop}, **keys})


def test_published_old_files():
    assert old("mixtral").rope == RopeConfig(theta=1e6)
    assert old("mistral").rope == RopeConfig(theta=1e4)
    assert old("phi", partial_rotary_factor=0.25).rope == RopeConfig(theta=1e4, partial=0.25)
    assert old("glm", rope_theta=1e4).rope == RopeConfig(theta=1e4, partial=0.5)
    llama31 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    rope = old("llama", rope_theta=5e5, rope_scaling=llama31).rope
    assert (rope.theta, rope.kind, rope.factor, rope.original_max_position_embeddings) == (5e5, "llama3", 8.0, 8192)
    qwen_yarn = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    assert old("qwen2", rope_theta=1e6, rope_scaling=qwen_yarn).rope.kind == "yarn"
    su = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "type": "su"}
    rope = old("phi3", rope_scaling=su, original_max_position_embeddings=4096, max_position_embeddings=131072).rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("longrope", 32.0, 4096)
    config = old("gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=None, sliding_window_pattern=6)
    assert config.rope == RopeConfig(theta=1e6)
    assert config.local_rope == RopeConfig(theta=1e4)
    assert config.sliding_windows == (6, 6, 6)
    stretched = {"rope_type": "linear", "factor": 8.0}
    config = old("gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=stretched)
    assert config.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert config.local_rope == RopeConfig(theta=1e4)
    assert dataclasses.asdict(old("glm4", attention_bias=False))["qkv_bias"] is False
