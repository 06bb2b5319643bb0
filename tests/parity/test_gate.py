"""The parity gate: every layout trains the model that one process trains, in fp32 and on uneven data.

Losses of 20 steps and gradient norms lie within 1e-5 of one process, and every parameter's gradient of the first step
within 1e-4 of its largest entry. `docs/parity.md` is made of these tests' figures by `python docs/parity_table.py`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from parity.jobs import FAULTS, GRADIENT_TOLERANCE, LOSS_TOLERANCE, Difference, gate_model, train
from parity.layouts import AXES, Choice, layouts, possible
from shardline.config import ParallelConfig
from shardline.models.config import DecoderConfig
from training.conftest import with_layout
from training.test_families import model_of
from training.workers import Workers

# One family of each kind of block: name in the transformers oracles, kind.
FAMILIES = {
    "qwen2-window": "dense, biases, a window",
    "phi-qk-norm": "parallel block",
    "gemma2": "sandwich norms, soft-caps",
    "qwen3-moe": "mixture of experts",
    "opt-350m": "post norms, learned positions, projected embedding",
    "bloom": "ALiBi, embedding norm",
}
FAMILY_LAYOUTS = {
    "tensor 2": ParallelConfig(tensor=2),
    "tensor 2, sequence parallel": ParallelConfig(tensor=2, sequence_parallel=True),
    "pipeline 2 1f1b": ParallelConfig(pipeline=2),
    "ZeRO-3": ParallelConfig(zero=3),
    "tensor 2, sequence parallel, ZeRO-3": ParallelConfig(tensor=2, sequence_parallel=True, zero=3),
    "tensor 2, pipeline 2 zero_bubble_v": ParallelConfig(tensor=2, pipeline=2, schedule="zero_bubble_v"),
}
EIGHT = {
    "data 2, tensor 2, pipeline 2 1f1b, ZeRO-3, sequence parallel": ParallelConfig(
        tensor=2, pipeline=2, zero=3, sequence_parallel=True
    ),
    "data 2, tensor 2, pipeline 2 zero_bubble_v, ZeRO-2": ParallelConfig(
        tensor=2, pipeline=2, zero=2, schedule="zero_bubble_v"
    ),
}
# Each fault, and the smallest layout that has the part which it breaks.
BROKEN = {
    "norms' gradients not summed over the sequence's pieces": ParallelConfig(tensor=2, sequence_parallel=True),
    "query and key norms' gradients not summed over heads": ParallelConfig(tensor=2),
    "shared kv heads' gradients not summed": ParallelConfig(tensor=4),
    "tied embeddings not summed over the pipeline": ParallelConfig(pipeline=2),
    "gradients not averaged over data ranks": ParallelConfig(pipeline=2),
    "each rank divides by its own tokens": ParallelConfig(),
    "copies count twice in the norm": ParallelConfig(pipeline=2),
    "no gradient from a column-parallel part to what it read": ParallelConfig(tensor=2),
}
PROCESSES = {
    "shared kv heads' gradients not summed": 4,
    "gradients not averaged over data ranks": 4,
}


@pytest.fixture(scope="module")
def gate_config(base_config, tmp_path_factory):
    return dataclasses.replace(base_config, run=str(tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def reference(workers, gate_config, cache):
    """One process, one micro-batch: the arithmetic that everything else is held against."""
    config = with_layout(gate_config, zero=0, micro_batch=16)
    return {tied: workers.run(1, train, config, cache, gate_model(tied=tied)) for tied in (True, False)}


def test_every_possible_pair_of_choices_is_in_a_layout():
    covered = frozenset().union(*(choice.pairs for choice in layouts()))
    assert covered == frozenset().union(*(choice.pairs for choice in possible()))
    for axis, values in AXES.items():
        assert {getattr(choice, axis) for choice in layouts()} == set(values)


def test_the_data_is_uneven_and_the_model_learns(reference):
    for expected in reference.values():
        assert expected.losses[19] < expected.losses[0] - 0.3
        assert all(np.abs(gradient).max() > 0 for gradient in expected.gradients.values())


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_layout(layout: Choice, reference, workers, gate_config, cache, record_property):
    model = gate_model(tied=layout.tied)
    actual = workers.run(layout.num_processes, train, layout.config(gate_config), cache, model)
    _hold(record_property, str(layout), layout.num_processes, Difference.between(actual, reference[layout.tied]))


@pytest.mark.parametrize("layout", EIGHT)
def test_layout_of_all_axes(layout, reference, gate_config, cache, record_property):
    """Eight processes, in a pool of their own: data, tensor and pipeline ranks at once."""
    config = with_layout(dataclasses.replace(gate_config, parallel=EIGHT[layout]), micro_batch=2)
    pool = Workers(8)
    try:
        actual = pool.run(8, train, config, cache, gate_model(tied=True))
    finally:
        pool.close()
    _hold(record_property, f"tied, {layout}", 8, Difference.between(actual, reference[True]))


@pytest.fixture(scope="module")
def family_config(gate_config):
    return with_layout(gate_config, zero=0, micro_batch=16, steps=4)


def family_model(family: str) -> DecoderConfig:
    """Four layers, so that two ranks can hold two stages each, and kv heads that two ranks can deal out."""
    return model_of(family, num_hidden_layers=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def family_references(workers, family_config, cache):
    return {name: workers.run(1, train, family_config, cache, family_model(name)) for name in FAMILIES}


@pytest.mark.parametrize("layout", FAMILY_LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, layout, family_references, workers, family_config, cache, record_property):
    parallel = FAMILY_LAYOUTS[layout]
    processes = parallel.tensor * parallel.pipeline * (2 if parallel.zero else 1)
    config = with_layout(dataclasses.replace(family_config, parallel=parallel), micro_batch=4)
    model = family_model(family)
    actual = workers.run(processes, train, config, cache, model)
    # Without rope a key's bias moves all scores of a query alike: its gradient is zero but for rounding.
    null = "*.k_proj.bias" if model.position != "rope" else ""
    difference = Difference.between(actual, family_references[family], null=null)
    _hold(record_property, f"{family}: {layout}", processes, difference)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_gate_fails_on_a_broken_engine(fault, reference, workers, gate_config, cache, record_property):
    processes = PROCESSES.get(fault, 2)
    config = with_layout(dataclasses.replace(gate_config, parallel=BROKEN[fault]), micro_batch=2, steps=3)
    actual = workers.run(processes, train, config, cache, gate_model(tied=True), fault)
    expected = dataclasses.replace(
        reference[True], losses=[*reference[True].losses[:3], *actual.losses[3:]], norms=reference[True].norms[:3]
    )
    difference = Difference.between(actual, expected)
    with pytest.raises(AssertionError, match=r"apart|off"):
        difference.check()
    record_property("fault", {"name": fault, **dataclasses.asdict(difference)})


def _hold(record_property, layout: str, processes: int, difference: Difference) -> None:
    figures = dataclasses.asdict(difference)
    record_property("parity", {"layout": layout, "processes": processes, **figures})
    difference.check()


def test_the_tolerances_are_those_that_were_promised():
    assert (LOSS_TOLERANCE, GRADIENT_TOLERANCE) == (1e-5, 1e-4)
