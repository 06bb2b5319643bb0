"""What a plan says that ranks hold, against what they hold: weights, gradients, optimizer state, activations."""

from __future__ import annotations

import dataclasses

import pytest

from shardline.config import RunConfig
from shardline.parallel.grid import Layout
from shardline.planning.activations import layer_bytes, outer_bytes
from shardline.planning.parameters import count_parameters
from shardline.planning.parts import tensor_part
from shardline.planning.rank import StateSizes
from training.held import held_bytes, saved_bytes
from training.jobs import small_model

MODEL = small_model(tied=False)
MIXTURE = dataclasses.replace(MODEL, num_experts=4, experts_per_token=2, expert_size=32)
P = count_parameters(MODEL).total


def _with(config: RunConfig, *, micro_batch: int = 1, **fields: object) -> RunConfig:
    train = dataclasses.replace(config.train, global_batch=4, micro_batch=micro_batch)
    return dataclasses.replace(config, train=train, parallel=dataclasses.replace(config.parallel, **fields))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_are_as_the_formula_of_the_stage_says(zero, ranks, workers, base_config, cache):
    """ZeRO, figure 1, in fp32: (4 + 4 + 8) P, of which the optimizer's 8 are shared from stage 1 on, the gradients' 4
    from stage 2, the parameters' 4 (between steps) under FSDP2. The model's dims divide by 4, so nothing is padded.
    """
    held = workers.run_all(ranks, held_bytes, _with(base_config, zero=zero), cache, MODEL)
    for rank in held:
        assert rank["weights"] == (4 * P if zero < 2 else 4 * P // ranks)
        assert rank["gradients"] == (4 * P if zero < 2 else 4 * P // ranks)
    optimizer = [rank["optimizer"] for rank in held]
    if zero == 1:  # whole tensors are dealt out
        assert sum(optimizer) == 8 * P
        assert max(optimizer) - 8 * P // ranks < 8 * MODEL.vocab_size * MODEL.hidden_size
    else:
        assert set(optimizer) == {8 * P if zero == 0 else 8 * P // ranks}


LAYOUTS = {
    "tensor 2": {"tensor": 2},
    "tensor 4, kv heads shared": {"tensor": 4},
    "pipeline 2": {"pipeline": 2},
    "data 2 x pipeline 2, ZeRO-0": {"pipeline": 2, "zero": 0},
    "data 2 x pipeline 2, ZeRO-1": {"pipeline": 2, "zero": 1},
    "data 2 x pipeline 2, ZeRO-3": {"pipeline": 2, "zero": 3},
    "data 2 x tensor 2, ZeRO-2": {"tensor": 2, "zero": 2},
    "tensor 2 x pipeline 2": {"tensor": 2, "pipeline": 2},
    "tensor 2 x pipeline 2, zero bubble": {"tensor": 2, "pipeline": 2, "schedule": "zero_bubble_v"},
    "ZeRO-3 over 2 of 4": {"zero": 3, "zero_group": 2},
    "data 4, ZeRO-1": {"zero": 1},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_plan_counts_what_each_rank_holds(name, tied, workers, base_config, cache):
    ranks = 2 if name in ("tensor 2", "pipeline 2") else 4
    model = dataclasses.replace(MODEL, tie_word_embeddings=tied, num_layers=4, sliding_windows=())
    config = _with(base_config, **LAYOUTS[name])
    layout = Layout.resolve(config.parallel, world_size=ranks)
    held = workers.run_all(ranks, held_bytes, config, cache, model)
    for pipeline_rank in range(layout.pipeline):
        here = [rank for rank in held if rank["pipeline_rank"] == pipeline_rank]
        planned = StateSizes.of(model, config, layout, rank=pipeline_rank, arithmetic="fp32")
        assert max(rank["weights"] for rank in here) == planned.full // planned.shards
        assert max(rank["gradients"] for rank in here) == planned.full // planned.shards
        # ZeroRedundancyOptimizer deals whole tensors in another order.
        expected = planned.state.kept_bytes if layout.zero != 1 else pytest.approx(planned.state.kept_bytes, rel=0.01)
        assert max(rank["optimizer"] for rank in here) == expected


@pytest.mark.parametrize("model", [MODEL, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_activations_of_tensor_ranks_are_what_autograd_saves(
    ranks, sequence_parallel, model, workers, base_config, cache
):
    config = _with(base_config, micro_batch=2, tensor=ranks, sequence_parallel=sequence_parallel)
    saved = workers.run_all(ranks, saved_bytes, config, cache, model)
    part = tensor_part(model, ranks)
    shape = {
        "rows": config.train.micro_batch,
        "sequence_length": config.data.sequence_length,
        "arithmetic": "fp32",
        "sequence_ranks": ranks if sequence_parallel else 1,
    }
    planned = outer_bytes(part, **shape) + sum(layer_bytes(part, layer=layer, **shape) for layer in range(2))
    assert max(saved) == pytest.approx(planned, rel=0.002), [each - planned for each in saved]
