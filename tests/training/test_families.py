"""Every family trains, and data parallelism gives each of them the losses and gradients of one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from models.oracle import CONFIGS, SIZES
from models.test_chatglm import CONFIG as CHATGLM
from shardline.models.config import DecoderConfig
from shardline.models.families import FAMILIES, read_model_config
from training.conftest import with_layout
from training.jobs import train_family

# One of each family, the one with the most parts.
PARALLEL = [
    "llama-biases",
    "mistral-window",
    "qwen2-window",
    "qwen3",
    "qwen3-moe",
    "mixtral",
    "gemma",
    "gemma2",
    "gemma3",
    "phi-qk-norm",
    "phi3",
    "glm",
    "glm4",
    "gpt2",
    "opt-350m",
    "bloom",
    "chatglm",
]


def model_of(name: str, **changes: Any) -> DecoderConfig:
    """A family's config with the byte tokenizer's vocabulary and weights of the usual size."""
    if name == "chatglm":
        raw = {**CHATGLM, "padded_vocab_size": 320}
    else:
        config_class, extra = CONFIGS[name]
        raw = config_class(**{**SIZES, **extra, "vocab_size": 320, **changes}).to_dict()
    return dataclasses.replace(read_model_config(raw), initializer_range=0.05)


@pytest.fixture(scope="module")
def small(base_config):
    """8 rows of 64 tokens a step, and a rate that needs no warm-up."""
    train = dataclasses.replace(base_config.train, global_batch=8, steps=4)
    return dataclasses.replace(base_config, train=train)


@pytest.mark.parametrize("name", [*sorted(CONFIGS), "chatglm"])
def test_the_loss_falls(name, small, workers, cache):
    config = with_layout(small, zero=0, micro_batch=8, steps=8)
    losses = workers.run(1, train_family, config, cache, model_of(name))["loss"]
    assert 5.0 < losses[0] < 7.5, "a new model knows little more than that there are 320 words"
    assert losses[-1] < losses[0] - 0.4


def test_every_family_runs_over_two_processes():
    assert {model_of(name).family for name in PARALLEL} == set(FAMILIES)


@pytest.mark.parametrize("name", PARALLEL)
def test_two_processes_with_accumulation_equal_one(name, small, workers, cache):
    model = model_of(name)
    expected = workers.run(1, train_family, with_layout(small, zero=0, micro_batch=8), cache, model)
    for zero in (0, 3):
        actual = workers.run(2, train_family, with_layout(small, zero=zero, micro_batch=2), cache, model)
        compare(actual, expected)


@pytest.mark.parametrize("zero", [0, 3])
def test_experts_without_a_token_break_nothing(zero, small, workers, cache):
    model = model_of("mixtral", num_local_experts=48, num_experts_per_tok=1, intermediate_size=8, num_hidden_layers=2)
    expected = workers.run(1, train_family, with_layout(small, zero=0, micro_batch=8, steps=2), cache, model)
    actual = workers.run(2, train_family, with_layout(small, zero=zero, micro_batch=1, steps=2), cache, model)
    assert actual["idle_experts"] > expected["idle_experts"], "some expert must be idle in one micro-batch only"
    compare(actual, expected)


def compare(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5, atol=0, err_msg=name)
    assert actual["gradients"].keys() == expected["gradients"].keys()
    # A key's bias without rope moves all scores of a query alike: its gradient is zero but for rounding.
    floor = 1e-3 * max(np.abs(gradient).max() for gradient in expected["gradients"].values())
    for name, gradient in expected["gradients"].items():
        largest = max(np.abs(gradient).max(), floor)
        assert np.abs(actual["gradients"][name] - gradient).max() <= 1e-4 * largest, name
