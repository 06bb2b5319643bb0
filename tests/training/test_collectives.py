"""What a step sends: each layout's collectives are the ones that the plan counts, for any number of micro-batches."""

from __future__ import annotations

import pytest

from training.conftest import with_layout
from training.jobs import collectives

ALL_REDUCE, BROADCAST = "c10d::allreduce_", "c10d::broadcast_"
GATHER, REDUCE_SCATTER = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"
GROUPS = 3  # what FSDP2 gathers at once: each of the two layers, and the rest


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_collectives_of_each_stage(micro_batches, workers, base_config, cache):
    def count(zero: int) -> dict[str, int]:
        config = with_layout(base_config, zero=zero, micro_batch=8 // micro_batches)
        return workers.run(2, collectives, config, cache)

    ddp, zero1, zero2, zero3 = (count(zero) for zero in (0, 1, 2, 3))
    assert not {GATHER, REDUCE_SCATTER} & (set(ddp) | set(zero1))
    assert zero1[ALL_REDUCE] == ddp[ALL_REDUCE], "gradients are reduced once, after the last micro-batch"
    assert zero1[BROADCAST] > ddp.get(BROADCAST, 0), "the owner of each parameter hands it out"
    assert zero2[GATHER] == GROUPS, "parameters stay gathered over a step"
    assert zero3[GATHER] == 2 * GROUPS * micro_batches
    assert zero2[REDUCE_SCATTER] == zero3[REDUCE_SCATTER] == GROUPS * micro_batches
