"""The short form of `make soak`: wrong requests, the schema's requests, and clients that leave."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest

from serving.conftest import LocalServer, local_server
from serving.soak import fuzz, metric, schema_fuzz, soak, wait_until_free
from serving.tiny_models import make_engine
from shardline.hardware.memory import rss_bytes


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with local_server(make_engine(max_num_seqs=8, max_num_batched_tokens=64)) as server:
        yield server
        server.wait_until_idle()
        assert server.async_engine.health() is None


def test_wrong_requests_never_make_a_500(server: LocalServer):
    counts = fuzz(server.url, num_requests=600, seed=7)
    assert set(counts) <= {"200", "400", "404", "405", "413", "429", "closed", "no answer"}, counts
    assert counts["400"] > 200
    assert counts["200"] > 50


def test_requests_made_from_the_openapi_file_get_the_answers_it_promises(server: LocalServer):
    counts = schema_fuzz(server.url, max_examples=6, seed=7)
    assert counts["200"] > 20, counts
    assert counts["400"] > 10, counts


def test_the_openapi_file_has_every_route(server: LocalServer):
    with urllib.request.urlopen(f"{server.url}/openapi.json") as response:
        document = json.load(response)
    from shardline.serving.http import ServerConfig, make_app

    app = make_app(server.engine, ServerConfig(model_name="tiny"))
    routes = {(route.path.replace(":path", ""), method.lower()) for route in app.routes for method in route.methods}
    described = {
        (path, method) for path, item in document["paths"].items() for method in item if method != "parameters"
    }
    assert {route for route in routes if route[1] != "head"} == described


def test_clients_that_leave_cost_nothing(server: LocalServer):
    soak(server.url, num_requests=60, seed=1)
    wait_until_free(server.url)
    before = rss_bytes()
    counts = soak(server.url, num_requests=200, seed=2)
    assert counts["left"] + counts["left early"] > 30
    assert counts["whole"] > 100
    wait_until_free(server.url)
    assert server.engine.blocks.num_free == server.engine.blocks.num_blocks
    assert not server.engine._replies
    assert server.async_engine.num_in_flight == 0
    assert metric(server.url, "prefix_cache_hits_total") > 0
    assert rss_bytes() - before < 64 * 2**20
