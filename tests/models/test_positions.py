"""Rotary frequencies and ALiBi slopes against transformers, and angles that depend on the length of a document."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from shardline.config import UsageError
from shardline.models.config import RopeConfig
from shardline.models.families import read_model_config
from shardline.models.families.rope_keys import read_rope
from shardline.models.positions import Rope, alibi_slopes, inverse_frequencies

HEAD_DIM, CONTEXT = 16, 64
SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [1.0 + 0.9 * i for i in range(8)]
HALF = {"short_factor": SHORT[:4], "long_factor": LONG[:4], "partial_rotary_factor": 0.5}

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "linear, half": {"rope_type": "linear", "factor": 2.5, "partial_rotary_factor": 0.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic, half": {"rope_type": "dynamic", "factor": 3.0, "partial_rotary_factor": 0.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, own context": {"rope_type": "yarn", "factor": 4.0},
    "yarn, untruncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "truncate": False,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 0.7,
        "original_max_position_embeddings": 16,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 16,
        "partial_rotary_factor": 0.5,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope, factor from the contexts": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 16,
    },
    "longrope, attention factor, half": {
        "rope_type": "longrope",
        **HALF,
        "attention_factor": 1.3,
        "original_max_position_embeddings": 16,
    },
}


def their_config(keys: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": 500.0, **keys},
    )


@pytest.mark.parametrize("length", [0, 1, 16, 17, 64, 65, 200])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_transformers(name, length):
    theirs = their_config(dict(ROPES[name]))
    rope = read_model_config(theirs.to_dict()).rope
    expected, expected_scale = ROPE_INIT_FUNCTIONS[rope.kind](theirs, device="cpu", seq_len=length or None)
    actual, scale = inverse_frequencies(rope, head_dim=HEAD_DIM, max_position_embeddings=CONTEXT, length=length)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    assert scale == pytest.approx(expected_scale, rel=1e-12)


def test_every_kind_is_compared():
    assert {ROPES[name]["rope_type"] for name in ROPES} == set(ROPE_INIT_FUNCTIONS) - {"proportional"}


def test_a_kind_that_we_do_not_have_is_refused():
    with pytest.raises(UsageError, match="'proportional' is not supported"):
        read_rope({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1.0}})


def test_default_frequencies_by_the_papers_formula():
    actual, scale = inverse_frequencies(RopeConfig(theta=500.0), head_dim=8, max_position_embeddings=CONTEXT)
    torch.testing.assert_close(actual, torch.tensor([500.0 ** (-2 * pair / 8) for pair in range(4)]))
    assert scale == 1.0


@pytest.mark.parametrize("num_heads", range(1, 71))
def test_alibi_slopes_equal_transformers(num_heads):
    alibi_N1T = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)
    torch.testing.assert_close(alibi_slopes(num_heads), alibi_N1T[:, 0, 1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["longrope", "dynamic", "longrope, attention factor, half"])
def test_each_document_turns_by_the_angles_of_its_own_length(name):
    rope = read_model_config(their_config(dict(ROPES[name])).to_dict()).rope
    turner = Rope(rope, head_dim=HEAD_DIM, max_position_embeddings=CONTEXT)
    lengths = [10, 90, 10, 17, 130]  # below and above the original context, one of them twice
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    lengths_BT = torch.cat([torch.full((n,), n) for n in lengths]).unsqueeze(0)
    alone = [turner.cos_sin(torch.arange(n).unsqueeze(0)) for n in lengths]
    together = turner.cos_sin(positions, lengths_BT)
    for which in (0, 1):
        assert torch.equal(together[which], torch.cat([pair[which] for pair in alone], dim=1))
    # As one sequence of the longest length, the short documents would turn by other angles.
    longest = turner.cos_sin(positions)
    assert (longest[0] - together[0])[0, 1:10].abs().max() > 1e-3


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_other_kinds_do_not_look_at_lengths(name):
    rope = read_model_config(their_config(dict(ROPES[name])).to_dict()).rope
    turner = Rope(rope, head_dim=HEAD_DIM, max_position_embeddings=CONTEXT)
    positions = torch.arange(90).unsqueeze(0)
    assert torch.equal(turner.cos_sin(positions)[0], turner.cos_sin(positions, torch.full((1, 90), 200))[0])


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_a_stretched_rope_without_a_factor_is_refused(kind):
    with pytest.raises(UsageError, match=f"{kind} needs factor"):
        read_rope({"rope_scaling": {"type": kind}, "rope_theta": 500.0})


def test_keys_that_are_null_count_as_missing():
    nulls = {"rope_theta": None, "rope_scaling": None, "rope_parameters": None, "partial_rotary_factor": None}
    assert read_rope(nulls, theta=7.0, partial=0.5) == RopeConfig(theta=7.0, partial=0.5)
