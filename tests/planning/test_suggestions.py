"""Whatever layout is asked for: it works, or what the error suggests does."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.config import DataConfig, InfeasibleError, ParallelConfig, RunConfig, TrainConfig
from shardline.models.config import DecoderConfig, RopeConfig
from shardline.planning.layouts import require_layout

Asked = tuple[DecoderConfig, RunConfig, int]
_SET = re.compile(r"(?:set|or) ((?:parallel|train|data)\.\w+|it) to (\w+)(?: or to (\w+))?")


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    num_kv_heads = one(1, 2, 3, 4, 6)
    num_heads = num_kv_heads * one(1, 2, 3)
    num_layers = one(1, 2, 3, 4, 6)
    model = DecoderConfig(
        vocab_size=one(5, 320, 322),
        hidden_size=num_heads * 4,
        intermediate_size=one(5, 7, 90),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=4,
        max_position_embeddings=256,
        rope=RopeConfig(theta=10000.0),
        num_experts=one(0, 0, 4),
        experts_per_token=2,
        expert_size=one(5, 16),
        dense_layers=one((), (0,)),
    )
    # Mostly as many processes as are asked for, or no other equation would ever be looked at.
    data, tensor, pipeline = one(1, 2, 3, 4), one(1, 2, 3, 4, 6, 8), one(1, 2, 3, 4)
    parallel = ParallelConfig(
        data=one("auto", data),
        tensor=tensor,
        pipeline=pipeline,
        zero=one(0, 1, 2, 3),
        zero_group=one("auto", "auto", 1, 2, 3),
        sequence_parallel=one(False, True),
        schedule=one("gpipe", "1f1b", "interleaved", "zero_bubble_v"),
        virtual_stages=one("auto", "auto", "auto", 1, 2, 3),
        micro_batches=one("auto", "auto", 1, 2, 4),
    )
    train = TrainConfig(global_batch=one(4, 8, 12, 24), micro_batch=one(1, 2, 4))
    run = RunConfig(parallel=parallel, train=train, data=DataConfig(sequence_length=one(16, 63)))
    return model, run, one(data * tensor * pipeline, data * tensor * pipeline, 1, 2, 3, 8)


def changed(run: RunConfig, name: str, value: str) -> RunConfig:
    section, field = name.split(".")
    part = dataclasses.replace(getattr(run, section), **{field: int(value) if value.isdigit() else value})
    return dataclasses.replace(run, **{section: part})


def complaint(model: DecoderConfig, run: RunConfig, processes: int) -> str:
    """What is said of the layout; nothing where it works."""
    try:
        require_layout(model, run, num_processes=processes)
    except InfeasibleError as error:
        return str(error)
    return ""


def suggested(sentence: str, run: RunConfig, processes: int) -> list[tuple[RunConfig, int]]:
    found = [(run, int(count)) for count in re.findall(r"--nproc (\d+)", sentence)]
    for name, *values in _SET.findall(sentence):
        if name == "it":
            last = re.findall(r"(?:parallel|train|data)\.\w+ = ", sentence)
            name = "data.sequence_length" if "sequence_length" in sentence else last[-1].removesuffix(" = ")
        found += [(changed(run, name, value), processes) for value in values if value]
    return found


@settings(max_examples=200, deadline=None)
@given(asked())
def test_every_suggestion_makes_its_equation_hold(asked: Asked) -> None:
    model, run, processes = asked
    sentence, *_ = complaint(model, run, processes).splitlines() or [""]
    if not sentence:
        return
    suggestions = suggested(sentence, run, processes)
    assert suggestions, sentence
    for other, count in suggestions:
        after, *_ = complaint(model, other, count).splitlines() or [""]
        assert re.sub(r"\d+", "", after) != re.sub(r"\d+", "", sentence), f"{sentence}\nthen: {after}"


@settings(max_examples=200, deadline=None)
@given(asked())
def test_the_nearest_layout_works(asked: Asked) -> None:
    model, run, processes = asked
    text = complaint(model, run, processes)
    if not text:
        return
    _, heading, *lines = text.splitlines()
    assert heading.startswith("The nearest layout that works with "), text
    # The lines are a part of a config file, as they stand.
    for section, values in yaml.safe_load("\n".join(lines)).items():
        part = dataclasses.replace(getattr(run, section), **values)
        run = dataclasses.replace(run, **{section: part})
    assert complaint(model, run, processes) == "", text
