"""Every data-parallel layout trains the same model: losses over 20 steps, and every gradient of the first."""

from __future__ import annotations

import numpy as np
import pytest

from training.conftest import with_layout
from training.jobs import first_gradients, losses, max_weight_difference

# (tied head, processes, ZeRO stage, accumulation): all of them for a tied head, accumulation 2 for an untied one.
LAYOUTS = [
    (tied, processes, zero, accumulation)
    for tied in (True, False)
    for processes in (2, 4)
    for zero in (0, 1, 2, 3)
    for accumulation in ((1, 2, 4) if tied else (2,))
]
LAYOUTS += [(tied, 1, 0, accumulation) for tied in (True, False) for accumulation in (2, 4)]


@pytest.fixture(scope="module")
def reference(workers, base_config, cache):
    """One process, one micro-batch: the arithmetic that everything else is held against."""
    config = with_layout(base_config, zero=0, micro_batch=16)
    return {
        tied: (workers.run(1, losses, config, cache, tied), workers.run(1, first_gradients, config, cache, tied))
        for tied in (True, False)
    }


def test_the_data_is_uneven(reference):
    for expected, _ in reference.values():
        assert len(set(expected["num_tokens"])) > 5, "valid tokens must differ by step, or denominators can't show"
        assert expected["loss"][-1] < expected["loss"][0] - 0.3
        assert expected["heldout"][1] < expected["heldout"][0] - 0.3


@pytest.mark.parametrize(("tied", "processes", "zero", "accumulation"), LAYOUTS)
def test_losses_equal_one_process(tied, processes, zero, accumulation, reference, workers, base_config, cache):
    config = with_layout(base_config, zero=zero, micro_batch=16 // processes // accumulation)
    expected, _ = reference[tied]
    actual = workers.run(processes, losses, config, cache, tied)
    for name in ("loss", "grad_norm", "num_tokens", "heldout"):
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5, atol=0, err_msg=name)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_equal_one_process(tied, zero, reference, workers, base_config, cache):
    config = with_layout(base_config, zero=zero, micro_batch=2)
    _, expected = reference[tied]
    actual = workers.run(2, first_gradients, config, cache, tied)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert np.abs(gradient).max() > 0, name
        assert np.abs(actual[name] - gradient).max() <= 1e-4 * np.abs(gradient).max(), name


@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_stay_identical(zero, workers, base_config, cache):
    config = with_layout(base_config, zero=zero, micro_batch=4, steps=3)
    assert workers.run(2, max_weight_difference, config, cache) == 0.0
