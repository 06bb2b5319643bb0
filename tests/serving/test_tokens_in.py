"""What becomes of a prompt before the engine sees it: one BOS, never two; a template, or a sentence about it."""

from __future__ import annotations

import pytest

from serving.conftest import local_server
from serving.test_http import call_json
from serving.tiny_models import bos_tokenizer, make_decoder, tiny_config
from shardline.serving.engine import Engine, EngineConfig
from shardline.text.tokenizer import CHATML_TEMPLATE, Tokenizer

BOS = 256


def engine_with(tokenizer: Tokenizer) -> Engine:
    return Engine(make_decoder(tiny_config(tokenizer)), tokenizer, EngineConfig(max_model_len=128, max_num_seqs=2))


def test_there_is_one_bos_however_a_prompt_comes():
    template = "{{ bos_token }}" + CHATML_TEMPLATE
    messages = [{"role": "user", "content": "x"}]
    with local_server(engine_with(bos_tokenizer(chat_template=template))) as server:
        for body in (
            {"prompt": "abc"},
            {"prompt": "<|endoftext|>abc"},
            {"messages": messages},
        ):
            tokens = call_json(server.url, "/tokenize", body)[1]["tokens"]
            assert tokens[0] == BOS
            assert tokens.count(BOS) == 1
        num_chat_tokens = len(tokens)
        _, answer = call_json(server.url, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert answer["usage"]["prompt_tokens"] == num_chat_tokens
        _, answer = call_json(server.url, "/v1/completions", {"prompt": "abc", "max_tokens": 1})
        assert answer["usage"]["prompt_tokens"] == 4
        _, answer = call_json(server.url, "/v1/completions", {"prompt": [97, 98, 99], "max_tokens": 1})
        assert answer["usage"]["prompt_tokens"] == 3  # ids are taken as they are


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ],
)
def test_a_template_that_is_missing_or_refuses_is_a_400(template: str | None, words: str):
    with local_server(engine_with(bos_tokenizer(chat_template=template))) as server:
        status, answer = call_json(server.url, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        assert status == 400
        assert words in answer["error"]["message"]
        assert call_json(server.url, "/v1/completions", {"prompt": "still fine", "max_tokens": 1})[0] == 200
