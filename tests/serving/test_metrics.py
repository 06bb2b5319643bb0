"""The numbers of /metrics follow what was done: each family once."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from serving.conftest import LocalServer, local_server
from serving.soak import metric
from serving.test_admin import save_model
from serving.test_http import call, open_request, slow_down, wait_for
from serving.tiny_models import make_decoder, make_engine, tiny_config
from shardline.checkpoints.huggingface import load_decoder
from shardline.text.tokenizer import byte_tokenizer

PROMPT = "a prompt that fills a few blocks of sixteen tokens"


def complete(server: LocalServer, **changes: object) -> int:
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True, **changes}
    return call(server.url, "/v1/completions", body)[0]


def settled(server: LocalServer, name: str, value: float) -> None:
    """A step is counted just before its outputs are sent, or just after: wait for it."""
    wait_for(lambda: metric(server.url, name) == value)


def test_the_prefix_cache_is_counted_in_tokens():
    with local_server(make_engine(max_num_seqs=2)) as server:
        assert [complete(server), complete(server)] == [200, 200]
        settled(server, "request_success_total", 2)
        num_cached = len(PROMPT) // 16 * 16
        queries, hits = (metric(server.url, f"prefix_cache_{name}_total") for name in ("queries", "hits"))
        assert queries >= 2 * (len(PROMPT) - 1)
        assert hits == num_cached
        assert metric(server.url, "prompt_tokens_cached_total") == num_cached
        assert metric(server.url, "request_prefill_kv_computed_tokens_sum") == 2 * len(PROMPT) - num_cached
        assert metric(server.url, "prompt_tokens_total") == 2 * len(PROMPT) - num_cached


def test_what_requests_asked_for_and_how_long_they_took():
    with local_server(make_engine(max_num_seqs=4)) as server:
        assert complete(server, n=2) == 200
        assert complete(server) == 200
        settled(server, "request_success_total", 3)
        assert metric(server.url, "request_params_n_sum") == 3
        assert metric(server.url, "request_params_n_count") == 2
        assert metric(server.url, "request_params_max_tokens_sum") == 10
        assert metric(server.url, "generation_tokens_total") == 15
        assert metric(server.url, "request_generation_tokens_sum") == 15
        for name in ("e2e_request_latency", "request_inference_time", "request_time_per_output_token"):
            assert metric(server.url, f"{name}_seconds_count") == 3
        parts = [metric(server.url, f"request_{name}_time_seconds_sum") for name in ("prefill", "decode", "inference")]
        assert parts[0] + parts[1] == pytest.approx(parts[2])
        assert metric(server.url, "cache_config_info") == 1
        with urllib.request.urlopen(f"{server.url}/metrics") as response:
            [line] = [line for line in response.read().decode().splitlines() if "cache_config_info{" in line]
        assert f'num_gpu_blocks="{server.engine.blocks.num_blocks}"' in line
        assert 'block_size="16"' in line


def test_speculation_is_counted():
    with local_server(make_engine(max_num_seqs=2, speculative="ngram", max_model_len=256)) as server:
        assert complete(server, prompt="abcabcabcabcabc", max_tokens=80) == 200
        settled(server, "request_success_total", 1)
        drafts, guessed, accepted = (
            metric(server.url, f"spec_decode_num_{name}_total")
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        assert 0 < drafts <= guessed
        assert accepted <= guessed


def test_refused_requests_are_counted():
    engine = make_engine(max_num_seqs=1)
    slow_down(engine, 0.02)
    with local_server(engine, max_num_waiting=1) as server:
        body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}
        crowd = [open_request(server.url, "/v1/completions", body) for _ in range(2)]
        wait_for(lambda: server.async_engine.num_in_flight == 2)
        settled(server, "num_requests_waiting", 1)
        assert complete(server) == 429
        assert metric(server.url, "admission_rejections_total") == 1
        for connection in crowd:
            connection.close()
        settled(server, "request_success_total", 2)  # by finished_reason "abort"


def test_broken_requests_reloads_and_sleep_are_counted(tmp_path: Path):
    folder = save_model(tmp_path / "model", seed=0)
    key = {"authorization": "Bearer k"}
    with local_server(make_engine(load_decoder(folder)), folder=str(folder), admin_key="k") as server:
        assert call(server.url, "/admin/reload", {"path": str(folder)}, headers=key)[0] == 200
        assert metric(server.url, "weight_reloads_total") == 1
        for path, asleep in (("sleep", 1), ("wake", 0)):
            assert call(server.url, f"/admin/{path}", {}, headers=key)[0] == 200
            assert metric(server.url, "engine_sleep_state") == asleep
    decoder = make_decoder(tiny_config(byte_tokenizer()))
    decoder.get_parameter("model.layers.0.mlp.down_proj.weight").data.fill_(float("nan"))
    with local_server(make_engine(decoder)) as server:
        assert complete(server) == 500
        settled(server, "corrupted_requests_total", 1)
