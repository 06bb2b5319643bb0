"""`/v1/embeddings` against the decoder's own hidden states, over HTTP and through OpenAI's client."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from openai import OpenAI

from serving.conftest import LocalServer, local_server
from serving.test_http import call_json
from serving.tiny_models import make_engine
from shardline.models.attention import DenseAttention

TEXTS = ["a first text", "another, rather longer text that takes several blocks of the cache", "x"]


@torch.no_grad()
def dense_embedding(local: LocalServer, text: str, pooling: str) -> list[float]:
    """The trainer's hidden states after the last norm, pooled and scaled to length 1."""
    tokens_BT = torch.tensor([list(text.encode())])
    positions_BT = torch.arange(tokens_BT.shape[1]).unsqueeze(0)
    x_TD = local.engine.decoder.hidden_states(tokens_BT, positions_BT=positions_BT, attention=DenseAttention())[0]
    x_D = x_TD.mean(0) if pooling == "mean" else x_TD[-1]
    return (x_D / x_D.norm()).tolist()


def embed(url: str, **body: Any) -> tuple[int, Any]:
    return call_json(url, "/v1/embeddings", body)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_the_decoders_hidden_states(local: LocalServer, pooling: str):
    status, answer = embed(local.url, input=TEXTS, pooling=pooling)
    assert status == 200, answer
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    for entry, text in zip(answer["data"], TEXTS, strict=True):
        assert entry["embedding"] == pytest.approx(dense_embedding(local, text, pooling), abs=1e-5)
        assert math.fsum(value * value for value in entry["embedding"]) == pytest.approx(1.0)
    num_tokens = sum(len(text) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_openais_client_reads_both_encodings(local: LocalServer):
    client = OpenAI(base_url=f"{local.url}/v1", api_key="none")
    with client:
        packed = client.embeddings.create(model="tiny", input=TEXTS)  # base64, its default
        plain = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    for first, second in zip(packed.data, plain.data, strict=True):
        assert first.embedding == pytest.approx(second.embedding, abs=1e-7)


def test_ids_and_texts_are_the_same_and_repeat(local: LocalServer):
    answers = [
        embed(local.url, input=value)[1]["data"][0]["embedding"]
        for value in (TEXTS[0], [TEXTS[0]], list(TEXTS[0].encode()), [list(TEXTS[0].encode())])
    ]
    assert all(answer == pytest.approx(answers[0], abs=1e-6) for answer in answers)


def test_more_inputs_than_the_queue_holds_go_through_in_parts():
    with local_server(make_engine(max_num_seqs=2), max_num_waiting=1) as server:
        status, answer = embed(server.url, input=["text"] * 20)
        assert status == 200
        assert len(answer["data"]) == 20
        server.wait_until_idle()


def test_what_can_not_be_embedded_is_one_sentence(local: LocalServer):
    size = local.engine.decoder.config.hidden_size
    for body, words, param in [
        ({"input": "x", "dimensions": 8}, f"dimensions = 8, but this model's vectors have {size}", "dimensions"),
        ({"input": []}, "input is empty", "input"),
        ({"input": ""}, "empty", "input"),
        ({"input": ["x", 1]}, "mixes texts and token ids", "input"),
        ({"input": "x" * 1000}, "1000 tokens, but this model's context holds 256", "input"),
        ({"input": [999]}, "token id 999", "input"),
        ({"input": ["x"] * 2049}, "at most 2048", "input"),
        ({"input": "x", "pooling": "max"}, "max", "pooling"),
        ({}, "input is missing", "input"),
    ]:
        status, answer = embed(local.url, **body)
        assert status == 400, body
        assert words in answer["error"]["message"]
        assert answer["error"]["param"] == param
    assert embed(local.url, input="x", dimensions=size)[0] == 200
