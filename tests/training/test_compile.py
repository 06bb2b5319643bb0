"""`train.compile` on every layout: the losses of eager execution, and one graph for all layers.

All but one test stop short of generating code (backend aot_eager): the graphs and their gradients are the same, and it
takes a second where the compiler takes a minute.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from shardline.config import ParallelConfig
from training.compiled import eager_and_compiled
from training.jobs import small_model

# (processes, layout)
LAYOUTS = {
    "one process": (1, {}),
    "full recomputation": (1, {"activation_checkpointing": "full"}),
    "selective recomputation": (1, {"activation_checkpointing": "selective"}),
    "ZeRO-1": (2, {"zero": 1}),
    "ZeRO-2": (2, {"zero": 2}),
    "ZeRO-3, full recomputation": (2, {"zero": 3, "activation_checkpointing": "full"}),
    "tensor": (2, {"tensor": 2}),
    "sequence parallel": (2, {"tensor": 2, "sequence_parallel": True}),
    "1f1b": (2, {"pipeline": 2}),
}


def _config(base_config, *, num_steps=3, **parallel):
    train = dataclasses.replace(base_config.train, steps=num_steps)
    return dataclasses.replace(base_config, train=train, parallel=ParallelConfig(**parallel))


def _same_losses(told):
    np.testing.assert_allclose(told["compiled"], told["eager"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_compiles_a_layer_once(name, workers, base_config, cache):
    processes, parallel = LAYOUTS[name]
    told = workers.run(
        processes, eager_and_compiled, _config(base_config, **parallel), cache, small_model(), "aot_eager"
    )
    _same_losses(told)
    assert 2 <= told["graphs"] <= 3, "training with several documents a row and with one, and evaluation"
    assert told["breaks"] == 0
    assert told["compile_s"][0] > 0


@pytest.mark.parametrize("tensor", [1, 2])
def test_routed_layers_compile_around_their_experts(tensor, workers, base_config, cache):
    model = dataclasses.replace(
        small_model(),
        family="mixtral",
        num_experts=4,
        experts_per_token=2,
        expert_size=32,
        router_loss_coefficient=0.01,
    )
    told = workers.run(tensor, eager_and_compiled, _config(base_config, tensor=tensor), cache, model, "aot_eager")
    _same_losses(told)
    assert told["graphs"] > 1


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_depth_makes_no_more_graphs(schedule, workers, base_config, cache):
    """zero_bubble_v compiles what lies between the products that wait: more graphs, but no more with depth either."""
    graphs = set()
    for num_layers in (4, 8):
        model = dataclasses.replace(small_model(), num_layers=num_layers, sliding_windows=(None,) * num_layers)
        config = _config(base_config, num_steps=1, pipeline=2, schedule=schedule)
        told = workers.run(2, eager_and_compiled, config, cache, model, "aot_eager")
        _same_losses(told)
        graphs.add(told["graphs"])
    assert len(graphs) == 1


def test_generated_code_has_the_same_losses(workers, base_config, cache):
    told = workers.run(1, eager_and_compiled, _config(base_config), cache, small_model(), "inductor")
    _same_losses(told)
    assert told["compile_s"][0] > 10 * told["compile_s"][-1], "steps go on without compiling"
