"""Presets: published parameter counts, exactly; a config.json that transformers reads alike; plain data."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig

from shardline.config import UsageError
from shardline.models.config import DecoderConfig
from shardline.models.decoder import Decoder
from shardline.models.families import FAMILIES, read_model_config, write_model_config
from shardline.models.presets import preset, preset_names
from shardline.planning.parameters import count_parameters

# As the model cards, papers and safetensors headers give them; a tied head counts once, buffers do not count.
PUBLISHED_PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "llama-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "glm-4-9b": 9_399_951_360,
    "glm-4-9b-0414": 9_400_279_040,
    "glm-4-32b-0414": 32_566_081_536,
    "chatglm2-6b": 6_243_584_000,
    "chatglm3-6b": 6_243_584_000,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
}

# Only "66B" is published: this follows from the shape in the paper's table 1, as the other sizes' counts do.
PARAMETERS = {**PUBLISHED_PARAMETERS, "opt-66b": 65_719_701_504}


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_presets_have_the_published_parameter_counts(name: str) -> None:
    with torch.device("meta"):
        decoder = Decoder(preset(name))
    assert sum(parameter.numel() for parameter in decoder.parameters()) == PARAMETERS[name]
    assert count_parameters(preset(name)).total == PARAMETERS[name]


def test_every_preset_is_counted_and_every_family_has_one() -> None:
    assert set(preset_names()) - {"tiny"} == set(PARAMETERS)
    assert {preset(name).family for name in preset_names()} == set(FAMILIES)


def test_tiny_is_what_it_always_was() -> None:
    assert preset("tiny") == DecoderConfig(
        family="llama",
        vocab_size=320,
        hidden_size=128,
        intermediate_size=384,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="gemma-2-9b"):
        preset("gemma2-9b")


@pytest.mark.parametrize("name", preset_names())
def test_presets_survive_config_json(name: str) -> None:
    config = preset(name)
    assert read_model_config(json.loads(json.dumps(write_model_config(config, dtype="float32")))) == config


# transformers has no class for ChatGLM: its configuration is code in the model's own repository.
@pytest.mark.parametrize("name", [name for name in preset_names() if preset(name).family != "chatglm"])
def test_transformers_reads_the_same(name: str, tmp_path) -> None:
    config = preset(name)
    (tmp_path / "config.json").write_text(json.dumps(write_model_config(config, dtype="float32")))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.hidden_size == config.hidden_size
    assert theirs.num_hidden_layers == config.num_layers
    assert theirs.vocab_size == config.vocab_size
    assert theirs.tie_word_embeddings == config.tie_word_embeddings
    assert getattr(theirs, "num_key_value_heads", config.num_heads) == config.num_kv_heads
    assert getattr(theirs, "head_dim", None) in (config.head_dim, None)
    if config.position == "rope":
        parameters = theirs.rope_parameters
        rope = parameters.get("full_attention", parameters)
        assert rope["rope_theta"] == config.rope.theta
        assert rope["rope_type"] == config.rope.kind
        assert rope.get("factor", 1.0) == config.rope.factor
        assert rope.get("partial_rotary_factor", 1.0) == config.rope.partial


def test_reading_a_preset_loads_no_torch() -> None:
    code = (
        "import sys; from shardline.models.presets import preset; preset('bloom-176b'); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
