"""Every family through the paged engine: greedy tokens are transformers', log-probabilities are the trainer's."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from models.oracle import CONFIGS, save_oracle
from serving.tiny_models import make_request
from shardline.checkpoints.huggingface import load_decoder
from shardline.models.attention import DenseAttention
from shardline.serving.engine import Engine, EngineConfig
from shardline.serving.loading import open_decoder
from shardline.text.tokenizer import byte_tokenizer

PROMPTS = [(5, 9, 200, 31, 7), tuple(range(40, 62)), (11,), tuple(range(100, 112))]


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_greedy_tokens_and_logprobs(name, tmp_path):
    theirs = save_oracle(name, tmp_path, vocab_size=320)
    theirs.generation_config = GenerationConfig()  # no end-of-text: all replies have the same length
    decoder = load_decoder(tmp_path)
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=9, block_size=4)
    engine = Engine(open_decoder(tmp_path, config), byte_tokenizer(), config)
    requests = [
        make_request(
            str(i),
            prompt,
            max_tokens=min(12, engine.max_model_len - len(prompt)),
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0,
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    for request, answer in zip(requests, engine.generate(requests), strict=True):
        prompt = torch.tensor([request.prompt_token_ids])
        expected = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.sampling.max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert answer.token_ids == expected[0, prompt.shape[1] :].tolist()
        if decoder.config.rope.depends_on_length:
            continue  # what was sampled before the rope changed differs from a whole forward, in transformers too
        ids = torch.tensor([[*request.prompt_token_ids, *answer.token_ids]])
        with torch.no_grad():
            logits = decoder(ids, positions_BT=torch.arange(ids.shape[1])[None], attention=DenseAttention())
        trainer = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        served = torch.tensor([*answer.prompt_logprobs[1:], *answer.logprobs])
        torch.testing.assert_close(served, trainer, atol=1e-5, rtol=0)
