"""The engine agrees with transformers and with the trainer's forward, whatever shares its batch."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from serving.tiny_models import (
    SCRIPTS,
    ScriptedTokens,
    dense_logprobs,
    make_decoder,
    make_engine,
    make_request,
    tiny_config,
)
from shardline.checkpoints.huggingface import load_decoder
from shardline.config import InfeasibleError, UsageError
from shardline.serving.engine import Engine, EngineConfig
from shardline.serving.errors import RequestError
from shardline.serving.requests import FinishReason, Request, RequestOutput, SamplingParams
from shardline.serving.runner import Runner
from shardline.text.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    """A random model of transformers' own, with grouped queries, and the folder it saved."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("oracle")
    model.save_pretrained(folder)
    return model, folder


def random_prompts(count: int, *, longest: int, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(256) for _ in range(rng.randint(1, longest))) for _ in range(count)]


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({}, id="mixed-batches"),
        pytest.param({"max_num_batched_tokens": 7}, id="chunked-prefill"),
        pytest.param({"num_blocks": 6, "max_num_batched_tokens": 16}, id="preemption"),
        pytest.param({"block_size": 1, "num_blocks": 400}, id="blocks-of-one"),
    ],
)
def test_greedy_tokens_equal_transformers(oracle: tuple[LlamaForCausalLM, Path], limits: dict[str, int]):
    model, folder = oracle
    engine = Engine(load_decoder(folder), byte_tokenizer(), EngineConfig(max_model_len=64, max_num_seqs=6, **limits))
    prompts = random_prompts(10, longest=40, seed=3)
    requests = [make_request(str(i), prompt, max_tokens=8 + i, ignore_eos=True) for i, prompt in enumerate(prompts)]
    answers = engine.generate(requests)
    for request, answer in zip(requests, answers, strict=True):
        prompt = torch.tensor([request.prompt_token_ids])
        expected = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.sampling.max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert answer.token_ids == expected[0, prompt.shape[1] :].tolist()
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert (engine.scheduler.num_preemptions > 0) == (limits.get("num_blocks") == 6)


@pytest.mark.parametrize("window", [None, 5], ids=["full", "window"])
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({}, id="whole-prompts"),
        pytest.param({"max_num_batched_tokens": 9}, id="chunked"),
        pytest.param({"num_blocks": 17, "max_num_batched_tokens": 24}, id="preempted"),
    ],
)
def test_logprobs_equal_the_trainers_forward(window: int | None, limits: dict[str, int]):
    config = tiny_config(byte_tokenizer(), sliding_windows=(window, None, window))
    decoder = make_decoder(config)
    engine = make_engine(decoder, max_model_len=80, **limits)
    prompts = random_prompts(9, longest=50, seed=5)
    requests = [
        make_request(
            str(i), prompt, max_tokens=20, temperature=i % 3 / 2, seed=i, ignore_eos=True, logprobs=0, prompt_logprobs=0
        )
        for i, prompt in enumerate(prompts)
    ]
    for request, answer in zip(requests, engine.generate(requests), strict=True):
        assert len(answer.token_ids) == len(answer.logprobs) == 20
        assert answer.prompt_logprobs[0] is None
        served = torch.tensor([*answer.prompt_logprobs[1:], *answer.logprobs])
        expected = dense_logprobs(decoder, [*request.prompt_token_ids, *answer.token_ids])
        torch.testing.assert_close(served, expected, atol=1e-5, rtol=0)
    assert (engine.scheduler.num_preemptions > 0) == ("num_blocks" in limits)


def test_prompt_alternatives_and_scoring_without_sampling():
    engine = make_engine()
    [answer] = engine.generate([make_request("a", "abcd", max_tokens=0, prompt_logprobs=3)])
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.token_ids == []
    assert len(answer.prompt_logprobs) == len(answer.prompt_top_logprobs) == 4
    for chosen, top in zip(answer.prompt_logprobs[1:], answer.prompt_top_logprobs[1:], strict=True):
        assert len(top) == 3
        scores = [score for _, score in top]
        assert scores == sorted(scores, reverse=True)
        assert chosen is not None
        assert chosen <= scores[0]


def test_a_seeded_request_does_not_depend_on_its_batch():
    request = make_request("alone", "seeded", temperature=1.0, seed=7, max_tokens=30, ignore_eos=True)
    [alone] = make_engine().generate([request])
    others = [
        make_request(str(i), f"other {i}", temperature=1.3, top_k=5 * i, top_p=0.9, seed=i, max_tokens=10 + i)
        for i in range(6)
    ]
    crowd = make_engine().generate([*others[:3], dataclasses.replace(request, request_id="crowded"), *others[3:]])
    assert crowd[3].token_ids == alone.token_ids
    [other_seed] = make_engine().generate(
        [make_request("b", "seeded", temperature=1.0, seed=8, max_tokens=30, ignore_eos=True)]
    )
    assert other_seed.token_ids != alone.token_ids


def scripted(scripts: dict[str, list[int]], **limits: int) -> Engine:
    """An engine whose requests answer with the bytes of a script: texts are then known exactly."""
    engine = make_engine(**limits)
    engine.runner = Runner(engine.decoder, engine._cache, ScriptedTokens(scripts))  # type: ignore[arg-type]
    return engine


def stream_of(engine: Engine, request: Request) -> tuple[list[str], RequestOutput]:
    """The pieces of text as they come, and the whole answer."""
    pieces: list[str] = []
    [answer] = engine.generate([request], on_output=lambda output: pieces.append(output.text))
    assert "".join(pieces) == answer.text
    return pieces, answer


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_characters_are_never_split(text: str):
    ids = list(text.encode())
    pieces, answer = stream_of(scripted({"a": ids}), make_request("a", "x", max_tokens=len(ids)))
    assert answer.text == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_cut_by_max_tokens_is_shown_as_replacement():
    _, answer = stream_of(scripted({"a": list("\u65e5\u672c".encode())}), make_request("a", "x", max_tokens=4))
    assert answer.text == "\u65e5\ufffd"


def test_a_stop_string_across_tokens_is_never_shown():
    ids = list(b"Hello wor ENDS and more")
    request = make_request("a", "x", max_tokens=len(ids), stop=("END",))
    pieces, answer = stream_of(scripted({"a": ids}), request)
    assert answer.text == "Hello wor "
    assert answer.finish_reason is FinishReason.STOP
    assert answer.stop_reason == "END"
    assert len(answer.token_ids) == len(b"Hello wor END")
    assert all("E" not in piece for piece in pieces)


def test_what_was_held_back_is_shown_when_it_is_no_stop_string():
    ids = list(b"the ENd. EN")
    _, answer = stream_of(scripted({"a": ids}), make_request("a", "x", max_tokens=len(ids), stop=("END", "zz")))
    assert answer.text == "the ENd. EN"
    assert answer.finish_reason is FinishReason.LENGTH


def test_the_stop_string_may_be_kept():
    request = make_request("a", "x", max_tokens=20, stop=("END",), include_stop_str_in_output=True)
    _, answer = stream_of(scripted({"a": list(b"fin END more")}), request)
    assert answer.text == "fin END"


def test_every_eos_and_stop_token_ends_a_reply_and_is_not_part_of_its_text():
    eos = byte_tokenizer().eos_token_ids[0]
    _, answer = stream_of(scripted({"a": [104, 105, eos, 33]}), make_request("a", "x"))
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("hi", FinishReason.STOP, None)
    _, answer = stream_of(scripted({"a": [104, 105, 33, 33]}), make_request("a", "x", stop_token_ids=(33,)))
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("hi", FinishReason.STOP, 33)
    _, answer = stream_of(scripted({"a": [104, eos, 105]}), make_request("a", "x", max_tokens=3, ignore_eos=True))
    assert (answer.text, answer.finish_reason) == ("hi", FinishReason.LENGTH)


def test_the_models_own_eos_list_ends_a_reply():
    decoder = make_decoder(tiny_config(byte_tokenizer(), eos_token_ids=(10, 20)))
    engine = make_engine(decoder)
    engine.runner = Runner(engine.decoder, engine._cache, ScriptedTokens({"a": [65, 20, 66]}))  # type: ignore[arg-type]
    _, answer = stream_of(engine, make_request("a", "x"))
    assert (answer.text, answer.finish_reason) == ("A", FinishReason.STOP)


def test_min_tokens_holds_back_every_ending():
    engine = make_engine()
    greedy_first = engine.generate([make_request("a", "abc", max_tokens=1)])[0].token_ids[0]
    request = make_request("b", "abc", stop_token_ids=(greedy_first,), min_tokens=4, max_tokens=8)
    [answer] = engine.generate([request])
    assert len(answer.token_ids) >= 4
    assert greedy_first not in answer.token_ids[:4]


def test_aborting_in_every_state_frees_the_blocks():
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=8)
    for name in ("running", "prefilling", "waiting"):
        engine.add_request(make_request(name, "x" * 40, max_tokens=50))
    for _ in range(7):
        engine.step()
    assert [s.request_id for s in engine.scheduler.running] == ["running", "prefilling"]
    for name in ("waiting", "prefilling", "running"):
        assert engine.abort(name)
        assert not engine.abort(name)
    assert not engine.has_unfinished
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_a_poisoned_request_fails_alone_and_leaves_nothing_behind():
    decoder = make_decoder(tiny_config(byte_tokenizer(), tie_word_embeddings=False))
    with torch.no_grad():
        decoder.model.embed_tokens.weight[200] = float("nan")
    engine = make_engine(decoder, num_blocks=24)
    good = make_request("good", "fine", max_tokens=30, ignore_eos=True, logit_bias={200: -100})
    [alone] = engine.generate([good])
    bad, again = engine.generate([make_request("bad", (1, 2, 200, 3)), dataclasses.replace(good, request_id="again")])
    assert bad.finish_reason is FinishReason.ERROR
    assert "not finite" in (bad.error or "")
    assert again.token_ids == alone.token_ids
    later = engine.generate([dataclasses.replace(good, request_id=str(i)) for i in range(8)])
    assert [answer.token_ids for answer in later] == [alone.token_ids] * 8


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (make_request("a", ()), "prompt is empty"),
        (make_request("a", (999,)), "token id 999"),
        (make_request("a", "x" * 300), "300 tokens.*holds 256"),
        (make_request("a", "x" * 256), "256 tokens.*holds 256"),
        (make_request("a", "x" * 250, max_tokens=7), "250 tokens and max_tokens = 7.*257.*holds 256.*at most 6"),
        (make_request("a", "x", stop_token_ids=(999,)), "stop_token_ids has token id 999"),
    ],
)
def test_a_request_that_can_not_run_is_refused_with_the_numbers(request_: Request, words: str):
    with pytest.raises(RequestError, match=words):
        make_engine().add_request(request_)


def test_a_request_fills_the_context_exactly():
    engine = make_engine(max_model_len=32, block_size=4)
    [answer] = engine.generate([make_request("a", "x" * 20, max_tokens=None, ignore_eos=True)])
    assert len(answer.token_ids) == 12


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -1.0}, "temperature = -1"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_p": 0.0}, "top_p = 0"),
        ({"top_k": -2}, "top_k = -2"),
        ({"min_p": 1.5}, "min_p = 1.5"),
        ({"presence_penalty": 3.0}, "presence_penalty = 3"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0"),
        ({"max_tokens": -1}, "max_tokens = -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens = 5"),
        ({"stop": ("",)}, "empty string"),
        ({"logprobs": 21}, "logprobs = 21"),
        ({"logit_bias": {5: 101.0}}, r"logit_bias\[5\] = 101"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_sampling_values_are_checked(values: dict, words: str):
    with pytest.raises(RequestError, match=words):
        SamplingParams(**values)


def test_too_little_memory_names_the_equation_and_the_ways_out():
    with pytest.raises(InfeasibleError, match=r"256 tokens x .* bytes = .*--kv-cache-memory"):
        make_engine(max_model_len=256, kv_cache_bytes=20_000)


def test_a_context_beyond_the_models_positions_is_refused():
    with pytest.raises(UsageError, match="--max-model-len 513 is more than the model's 512 positions"):
        make_engine(max_model_len=513)


def test_without_a_limit_the_context_is_what_fits():
    engine = make_engine(max_model_len=None, num_blocks=10)
    assert engine.max_model_len == 160
    assert "all that the KV cache holds" in "\n".join(engine.budget.lines())


def test_scheduler_and_blocks_load_no_torch():
    import subprocess
    import sys

    code = "import sys, json, shardline.serving.scheduler; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
