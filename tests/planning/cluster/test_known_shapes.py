"""Models that are planned by name: their dimensions add up to what was published."""

from __future__ import annotations

import pytest

from shardline.config import UsageError
from shardline.models.presets import preset, preset_names
from shardline.planning.cluster.known_shapes import known_shape, known_shape_names, published_parameters
from shardline.planning.cluster.shape import ModelShape


@pytest.mark.parametrize("name", published_parameters())
def test_parameters_are_the_published_ones(name: str) -> None:
    assert known_shape(name).parameters == pytest.approx(published_parameters()[name], rel=2e-3)


def test_presets_are_known_and_no_name_is_there_twice() -> None:
    assert known_shape("llama-3.1-8b") == ModelShape.of(preset("llama-3.1-8b"), name="llama-3.1-8b")
    assert not set(preset_names()) & set(published_parameters())
    assert {"llama-13b", "gpt-13b", "qwen2.5-7b", "glm-4-9b", "bloom-176b", "mpt-7b"} <= set(known_shape_names())


def test_active_parameters_of_a_mixture() -> None:
    assert known_shape("deepseek-v3").active_parameters == pytest.approx(37e9, rel=0.03)
    assert known_shape("gpt-oss-120b").active_parameters == pytest.approx(5.1e9, rel=0.15)  # theirs leaves out ends


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="deepseek-v3"):
        known_shape("deepseek-v4")
