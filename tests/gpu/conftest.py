"""Everything here needs a GPU that torch can use; elsewhere each test is skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from shardline.parallel.world import World, start_world
from training.conftest import base_config, cache, corpus

__all__ = ["base_config", "cache", "corpus", "world"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device here"))


@pytest.fixture
def world() -> Iterator[World]:
    """One rank on the first GPU; NCCL carries its tensors and gloo the CPU's."""
    with start_world(store=dist.HashStore()) as world:
        yield world
