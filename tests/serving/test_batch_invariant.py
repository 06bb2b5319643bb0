"""Batch-invariant serving: the same bits in any company, and the trainer's."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.tiny_models import make_decoder, make_engine, make_request, tiny_config
from shardline.config import DataConfig, RunConfig, TrainConfig
from shardline.kernels import batch_invariant
from shardline.models.attention import DenseAttention
from shardline.models.decoder import Decoder
from shardline.parallel.world import start_world
from shardline.serving.engine import Engine, EngineConfig
from shardline.serving.requests import Request, RequestOutput
from shardline.text.dataset import prepare_dataset
from shardline.text.tokenizer import byte_tokenizer
from shardline.training.loss import IGNORED, LanguageModelLoss
from shardline.training.trainer import Trainer

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "window": {"sliding_windows": (70, None, 5)},
    "softcap": {"attention_softcap": 20.0, "final_softcap": 10.0, "activation": "gelu_tanh", "norm_offset": 1.0},
    "alibi": {"position": "alibi", "norm": "layer", "activation": "gelu", "gated": False, "embedding_norm": True},
    "experts": {"num_experts": 4, "experts_per_token": 2, "expert_size": 50},
}


def odd_decoder(**changes: Any) -> Decoder:
    """Grouped queries, sizes that are no multiples of a vector, a head of its own."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "intermediate_size": 90, "tie_word_embeddings": False}
    return make_decoder(tiny_config(byte_tokenizer(), **{**sizes, **changes}))


def prompt(length: int, *, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(256) for _ in range(length))


def scored(name: str, ids: tuple[int, ...], **sampling: Any) -> Request:
    return make_request(
        name, ids, **{"max_tokens": 20, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 0, **sampling}
    )


def bits(answer: RequestOutput) -> tuple[Any, ...]:
    """All that was computed; floats compare by value, which for logarithms of probabilities is by bits."""
    assert answer.error is None
    return answer.token_ids, answer.logprobs, answer.top_logprobs, answer.prompt_logprobs


def packed_logprobs(decoder: Decoder, rows: list[list[list[int]]]) -> list[list[float]]:
    """The trainer's side: rows of several documents and padding, all in one batch, in the mode."""
    length = max(sum(map(len, row)) for row in rows) + 3
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    documents, positions = torch.full_like(tokens, -1), torch.zeros_like(tokens)
    places = []
    for index, row in enumerate(rows):
        start = 0
        for number, document in enumerate(row):
            where = slice(start, start + len(document))
            tokens[index, where] = torch.tensor(document)
            documents[index, where] = number
            positions[index, where] = torch.arange(len(document))
            places.append((index, where, document))
            start += len(document)
    with torch.no_grad(), batch_invariant():
        logits = decoder(tokens, positions_BT=positions, attention=DenseAttention(documents))
        logprobs = logits.log_softmax(-1)
    return [
        logprobs[index, where][:-1].gather(1, torch.tensor(document[1:]).unsqueeze(1)).squeeze(1).tolist()
        for index, where, document in places
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_among_others_chunked_preempted_and_the_trainer(family: str):
    decoder = odd_decoder(**FAMILIES[family])
    requests = [scored(str(i), prompt(1 + 9 * i % 101, seed=i), temperature=(i % 3) / 2, seed=i) for i in range(12)]
    alone = {}
    for request in requests:
        [answer] = make_engine(decoder, batch_invariant=True).generate([request])
        alone[request.request_id] = bits(answer)
    shuffled = list(requests)
    random.Random(7).shuffle(shuffled)
    for limits in (
        {"max_num_seqs": 12, "max_num_batched_tokens": 512},
        {"max_num_seqs": 5, "max_num_batched_tokens": 13},
        {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 20, "max_model_len": 128},
        {"max_num_seqs": 8, "speculative": "ngram", "num_speculative_tokens": 3},
        {"max_num_seqs": 3, "block_size": 5, "max_num_batched_tokens": 50},
    ):
        engine = make_engine(decoder, batch_invariant=True, **limits)
        for request, answer in zip(shuffled, engine.generate(shuffled), strict=True):
            assert bits(answer) == alone[request.request_id], (limits, request.request_id)
        assert (engine.scheduler.num_preemptions > 0) == ("num_blocks" in limits)
    documents = [[*r.prompt_token_ids, *alone[r.request_id][0]] for r in requests]
    trainer = packed_logprobs(decoder, [documents[:5], documents[5:7], documents[7:]])
    for request, expected in zip(requests, trainer, strict=True):
        _, logprobs, _, prompt_logprobs = alone[request.request_id]
        assert [*prompt_logprobs[1:], *logprobs] == expected


def test_one_request_among_31_others_in_random_order():
    decoder = odd_decoder()
    request = scored("it", prompt(40, seed=100), max_tokens=30)
    [answer] = make_engine(decoder, batch_invariant=True).generate([request])
    others = [
        make_request(str(i), prompt(1 + 7 * i % 90, seed=i), max_tokens=1 + i, temperature=i % 2, seed=i, top_k=i)
        for i in range(31)
    ]
    for seed in range(3):
        crowd = [*others, request]
        random.Random(seed).shuffle(crowd)
        engine = make_engine(decoder, batch_invariant=True, max_num_seqs=32, max_num_batched_tokens=96)
        found = {a.request_id: a for a in engine.generate(crowd)}
        assert bits(found["it"]) == bits(answer)


def test_a_prefix_hit_changes_nothing():
    decoder = odd_decoder()
    start = prompt(70, seed=5)
    request = scored("late", (*start, 1, 2, 3), prompt_logprobs=None)
    [cold] = make_engine(decoder, batch_invariant=True).generate([request])
    engine = make_engine(decoder, batch_invariant=True)
    engine.generate([make_request("first", (*start, 9))])
    [warm] = engine.generate([dataclasses.replace(request, request_id="again")])
    assert warm.num_cached_tokens > 0
    assert bits(warm) == bits(cold)


def test_the_ordinary_mode_is_not_always_equal():
    """If it were, the tests above could not fail."""
    decoder = odd_decoder()
    requests = [scored(str(i), prompt(20 + i, seed=i)) for i in range(6)]
    together = make_engine(decoder).generate(requests)
    alone = [make_engine(decoder).generate([request])[0] for request in requests]
    assert [bits(answer) for answer in together] != [bits(answer) for answer in alone]


def test_bf16_is_invariant_too():
    decoder = odd_decoder().to(torch.bfloat16)
    requests = [scored(str(i), prompt(10 + 5 * i, seed=i), max_tokens=6) for i in range(4)]
    together = make_engine(decoder, batch_invariant=True, max_num_batched_tokens=11).generate(requests)
    alone = [make_engine(decoder, batch_invariant=True).generate([request])[0] for request in requests]
    assert [bits(answer) for answer in together] == [bits(answer) for answer in alone]


def test_the_trainers_loss_in_the_mode_is_the_sum_of_served_logprobs():
    decoder = odd_decoder()
    ids = prompt(90, seed=3)
    [answer] = make_engine(decoder, batch_invariant=True).generate([scored("a", ids, max_tokens=0)])
    other = prompt(30, seed=4)
    tokens = torch.tensor([[*other, *ids, 0, 0, 0]])
    documents = torch.tensor([[0] * 30 + [1] * 90 + [-1] * 3])
    positions = torch.tensor([[*range(30), *range(90), 0, 0, 0]])
    targets = torch.full_like(tokens, IGNORED)
    targets[0, 30:119] = tokens[0, 31:120]
    with torch.no_grad(), batch_invariant():
        loss = LanguageModelLoss(decoder)(tokens, targets, documents, positions)
    assert loss.item() == pytest.approx(-math.fsum(answer.prompt_logprobs[1:]), rel=1e-14)


def test_the_trainers_evaluation_in_the_mode_is_made_of_served_logprobs(tmp_path: Path):
    """Several rows of several documents a batch against documents that are served one by one: equal to fp64's end."""
    source = tmp_path / "texts.jsonl"
    texts = [f"Document {i} " + "with some words, " * (i % 7) for i in range(80)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = RunConfig(
        data=DataConfig(source=str(source), sequence_length=96, heldout_fraction=0.5),
        train=TrainConfig(steps=1, global_batch=3, micro_batch=3, eval_rows=7),
        run=str(tmp_path / "run"),
    )
    tokenizer = byte_tokenizer()
    rows, heldout = prepare_dataset(config.data, tokenizer, cache_dir=tmp_path / "cache")
    model = tiny_config(tokenizer)
    with start_world() as world:
        trainer = Trainer(config=config, world=world, architecture=model, rows=rows, heldout=heldout)
        trainer.train_step()
        with batch_invariant():
            evaluated = trainer.evaluate()
        decoder = Decoder(model)
        decoder.load_state_dict({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
    batch = heldout.batch(range(min(7, heldout.num_rows)))
    documents = []
    for tokens, targets, owners in zip(batch.tokens_BT, batch.targets_BT, batch.documents_BT, strict=True):
        for owner in sorted(set(owners.tolist()) - {-1}):
            own, aims = tokens[owners == owner], targets[owners == owner]
            last = aims[-1:][aims[-1:] != IGNORED]
            documents.append(((*own.tolist(), *last.tolist()), int((aims != IGNORED).sum())))
    engine = make_engine(decoder, batch_invariant=True, max_num_batched_tokens=50)
    requests = [scored(str(i), ids, max_tokens=0) for i, (ids, _) in enumerate(documents)]
    served = [value for answer in engine.generate(requests) for value in answer.prompt_logprobs[1:]]
    assert len(served) == sum(count for _, count in documents)
    assert evaluated == pytest.approx(-math.fsum(served) / len(served), rel=1e-14)


def test_a_draft_model_changes_nothing():
    decoder, draft = (
        odd_decoder(),
        make_decoder(tiny_config(byte_tokenizer(), num_layers=1, sliding_windows=(None,)), seed=3),
    )
    requests = [scored(str(i), prompt(5 + 8 * i, seed=i), max_tokens=15) for i in range(5)]
    plain = make_engine(decoder, batch_invariant=True).generate(requests)
    config = EngineConfig(max_model_len=256, max_num_seqs=8, batch_invariant=True, speculative="draft")
    for draft_model in (draft, decoder):  # one that is mostly wrong, and one that never is
        engine = Engine(decoder, byte_tokenizer(), config, draft=draft_model)
        assert [bits(answer) for answer in engine.generate(requests)] == [bits(answer) for answer in plain]
        assert engine.num_draft_tokens > 0
        assert (engine.num_accepted_tokens == engine.num_draft_tokens) == (draft_model is decoder)
