"""What may be switched on for any layout: bf16 compute and torch.compile."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest

from training.conftest import with_layout
from training.jobs import losses, parameter_dtypes


def switched(config, **changes):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


@pytest.fixture(scope="module")
def plain(workers, base_config, cache):
    return workers.run(1, losses, with_layout(base_config, zero=0, micro_batch=4, steps=6), cache, True)


@pytest.mark.parametrize(("processes", "zero"), [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_bf16_stays_near_fp32_and_keeps_fp32_master_weights(processes, zero, plain, workers, base_config, cache):
    config = switched(with_layout(base_config, zero=zero, micro_batch=4, steps=6), precision="bf16")
    actual = workers.run(processes, losses, config, cache, True)
    np.testing.assert_allclose(actual["loss"], plain["loss"], rtol=5e-3)
    assert actual["loss"] != plain["loss"], "bf16 was not used"
    assert workers.run(processes, parameter_dtypes, config, cache) == ["torch.float32"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize(("processes", "zero"), [(1, 0), (2, 0), (2, 3)])
def test_compiled_layers_give_the_same_losses(processes, zero, plain, workers, base_config, cache):
    config = switched(with_layout(base_config, zero=zero, micro_batch=4, steps=6), compile=True)
    actual = workers.run(processes, losses, config, cache, True)
    np.testing.assert_allclose(actual["loss"], plain["loss"], rtol=1e-5)
    np.testing.assert_allclose(actual["heldout"], plain["heldout"], rtol=1e-5)
