"""How to serve on a number of devices: what is chosen, why not the others, what would help."""

from __future__ import annotations

from typing import Any

import pytest

from shardline.config import InfeasibleError, UsageError
from shardline.hardware.catalogue import device
from shardline.planning.cluster.known_shapes import known_shape
from shardline.planning.cluster.serve_explain import served_lines, served_to_json
from shardline.planning.cluster.serve_search import ServeAsked, search_serving


def asked(model: str = "llama-3.1-8b", **changes: Any) -> ServeAsked:
    given = {"device": device("h100"), "num_devices": 8, "runtime": "vllm", **changes}
    return ServeAsked(shape=known_shape(model), **given)


def test_the_most_tokens_of_all_devices_without_a_rate() -> None:
    found = search_serving(asked(), top=100)
    assert found.best is not None
    assert max(each.tokens_per_s for each in found.ranked) <= 1.01 * found.best.tokens_per_s
    assert found.best.replicas * found.best.tensor == 8
    assert {each.tensor for each in found.ranked} == {1, 2, 4, 8}


def test_the_fewest_devices_that_answer_a_rate_in_time() -> None:
    slow = search_serving(asked(request_rate=1.0)).best
    fast = search_serving(asked(request_rate=60.0)).best
    assert slow is not None
    assert fast is not None
    assert slow.num_devices == 1
    assert slow.num_devices < fast.num_devices <= 8
    tight = search_serving(asked(request_rate=1.0, tpot_limit_s=0.004)).best
    assert tight is not None
    assert tight.serving.tpot_s is not None
    assert tight.serving.tpot_s <= 0.004
    assert tight.tensor > 1  # one card reads 15 GiB of weights in no less


def test_too_small_too_slow_and_too_few() -> None:
    small = search_serving(asked("llama-3.1-70b", device=device("l4"), num_devices=2))
    assert small.best is None
    assert "GiB are needed for one request" in next(iter(served_lines(small)))
    slow = search_serving(asked(request_rate=1.0, ttft_limit_s=1e-4))
    assert slow.best is None
    assert served_to_json(slow)["verdict"] == "too slow"
    assert "a prompt alone takes" in served_to_json(slow)["reasons"][0]
    few = search_serving(asked(request_rate=600.0))
    assert served_to_json(few)["verdict"] == "too few devices"
    assert any("devices" in change for change in few.changes)


def test_the_changes_named_do_help() -> None:
    found = search_serving(asked("llama-3.1-70b", num_devices=1))
    assert found.best is None
    assert "weights in int8 (--weights int8)" in found.changes or "weights in int4 (--weights int4)" in found.changes
    kind = next(change for change in found.changes if "--weights" in change).split()[2]
    assert search_serving(asked("llama-3.1-70b", num_devices=1, weights=kind)).best is not None
    count = int(next(change for change in found.changes if change.endswith(" devices")).split()[0])
    assert search_serving(asked("llama-3.1-70b", num_devices=count)).best is not None


def test_replicas_cross_nodes_only_where_one_is_too_small() -> None:
    big = search_serving(asked("deepseek-v3", num_devices=32), top=100)
    assert big.best is not None
    assert big.best.tensor > 8
    assert max(each.tensor for each in search_serving(asked(num_devices=32), top=100).ranked) <= 8


def test_fewer_bits_are_alternatives_where_the_runtime_serves_them() -> None:
    names = [name for name, _, _ in search_serving(asked()).alternatives]
    assert {"with weights in fp8", "with weights in int4", "with a cache of fp8"} <= set(names)
    ours = [name for name, _, _ in search_serving(asked(runtime="shardline")).alternatives]
    assert "with weights in fp8" not in ours
    assert {"with weights in int8", "with a cache of int8"} <= set(ours)
    with pytest.raises(UsageError, match="--weights fp8: shardline serves bf16, fp32, int8, int4"):
        search_serving(asked(runtime="shardline", weights="fp8"))


def test_impossible_numbers_of_ranks() -> None:
    with pytest.raises(InfeasibleError, match="16 ranks are more than the 8 devices"):
        search_serving(asked(tensor=16))
    with pytest.raises(InfeasibleError, match="32 heads are not a multiple of tensor = 3"):
        search_serving(asked(tensor=3))
