"""`shardline.LLM`: vLLM's call shape over the same engine and the same text as the server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving.conftest import local_server
from serving.test_http import call_json
from serving.tiny_models import SCRIPTS, bos_tokenizer, dense_logprobs, save_tiny_folder
from shardline import LLM, SamplingParams
from shardline.checkpoints.huggingface import load_decoder
from shardline.config import UsageError
from shardline.serving.engine import Engine, EngineConfig
from shardline.serving.errors import RequestError
from shardline.serving.requests import StructuredOutputs
from shardline.serving.startup import OpenedEngine
from shardline.text.tokenizer import CHATML_TEMPLATE

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["Hello", "Once upon a time", SCRIPTS["japanese"]]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> LLM:
    return LLM(tiny_folder, max_model_len=256, max_num_seqs=4)


def test_importing_the_package_loads_no_torch():
    code = "import shardline, sys; assert 'torch' not in sys.modules; shardline.LLM; assert 'torch' in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_results_have_vllms_fields(llm: LLM):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [output.prompt_token_ids for output in outputs] == [list(prompt.encode()) for prompt in PROMPTS]
    for output in outputs:
        [sample] = output.outputs
        assert output.finished
        assert len(sample.token_ids) == 12
        assert (sample.index, sample.finish_reason, sample.logprobs) == (0, "length", None)
        assert sample.text == llm.get_tokenizer().decode(sample.token_ids)


def test_a_batch_answers_what_each_prompt_alone_does(llm: LLM):
    together = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


@pytest.mark.parametrize(
    "prompt",
    [
        "Hello",
        ["Hello"],
        {"prompt": "Hello"},
        list(b"Hello"),
        [list(b"Hello")],
        {"prompt_token_ids": list(b"Hello")},
        [{"prompt_token_ids": list(b"Hello")}],
    ],
    ids=["text", "texts", "dict", "ids", "lists of ids", "dict of ids", "dicts of ids"],
)
def test_every_form_of_a_prompt_is_the_same_prompt(llm: LLM, prompt: Any):
    [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == list(b"Hello")
    assert output.outputs[0].token_ids == llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_parameters_may_be_one_a_prompt(llm: LLM):
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (2, 5, 7)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5, 7]


def test_log_probabilities_are_the_trainers(llm: LLM, tiny_folder: Path):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    [output] = llm.generate("some prompt", params, use_tqdm=False)
    [sample] = output.outputs
    expected = dense_logprobs(load_decoder(tiny_folder), [*output.prompt_token_ids, *sample.token_ids]).tolist()
    assert output.prompt_logprobs is not None
    assert sample.logprobs is not None
    assert output.prompt_logprobs[0] is None
    entries = [*output.prompt_logprobs[1:], *sample.logprobs]
    ids = [*output.prompt_token_ids[1:], *sample.token_ids]
    scores = [entry[token].logprob for entry, token in zip(entries, ids, strict=True) if entry is not None]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert sample.cumulative_logprob == pytest.approx(sum(expected[-6:]), abs=1e-4)
    for entry, token in zip(sample.logprobs, sample.token_ids, strict=True):
        assert entry[token].rank == 1  # greedy
        assert len(entry) == 3


def test_samples_of_one_prompt_differ_and_repeat(llm: LLM):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    first, again = (llm.generate(["Hello", "x"], [params, GREEDY], use_tqdm=False)[0] for _ in range(2))
    assert [sample.index for sample in first.outputs] == [0, 1, 2]
    texts = [tuple(sample.token_ids) for sample in first.outputs]
    assert len(set(texts)) == 3
    assert texts == [tuple(sample.token_ids) for sample in again.outputs]


def test_chat_is_the_servers_chat(llm: LLM):
    [output] = llm.chat(CHAT, GREEDY, use_tqdm=False)
    with local_server(llm.engine) as server:
        body = {"messages": CHAT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        _, answer = call_json(server.url, "/v1/chat/completions", body)
        _, tokens = call_json(server.url, "/tokenize", {"messages": CHAT})
    assert output.outputs[0].text == answer["choices"][0]["message"]["content"]
    assert output.prompt_token_ids == tokens["tokens"]
    several = llm.chat([CHAT, CHAT[1:]], GREEDY, use_tqdm=False)
    assert several[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert len(several) == 2


def test_there_is_never_a_second_bos(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    tokenizer = bos_tokenizer(chat_template="<|endoftext|>" + CHATML_TEMPLATE)
    engine = Engine(llm.engine.decoder, tokenizer, EngineConfig(max_model_len=256, max_num_seqs=2))
    opened = OpenedEngine(engine=engine, defaults={}, defaults_reason="", phases_s={})
    monkeypatch.setattr(llm, "_opened", opened)
    for [output] in (
        llm.generate("Hello", GREEDY, use_tqdm=False),
        llm.generate("<|endoftext|>Hello", GREEDY, use_tqdm=False),
        llm.chat(CHAT, GREEDY, use_tqdm=False),
    ):
        assert output.prompt_token_ids.count(tokenizer.bos_token_id) == 1
        assert output.prompt_token_ids[0] == tokenizer.bos_token_id


def test_replies_follow_what_they_must(llm: LLM):
    wanted = [StructuredOutputs(choice=("yes", "no")), StructuredOutputs(regex="[0-9]{4}")]
    params = [SamplingParams(max_tokens=12, structured_outputs=each) for each in wanted]
    first, second = llm.generate(["a", "b"], params, use_tqdm=False)
    assert first.outputs[0].text in ("yes", "no")
    assert second.outputs[0].text.isdigit()
    assert len(second.outputs[0].text) == 4
    with pytest.raises(RequestError, match="structured_outputs"):
        llm.generate("a", SamplingParams(structured_outputs=StructuredOutputs(regex="(")), use_tqdm=False)


def test_stop_strings_are_taken_in_vllms_forms(llm: LLM):
    forms: list[Any] = ["xyz", ["xyz"], ("xyz",)]
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=form) for form in forms]
    assert params[0] == params[1] == params[2]
    assert params[0].stop == ("xyz",)
    [output] = llm.generate("Hello", params[0], use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"  # no single letter of it ends a reply


def test_embeddings_have_length_one(llm: LLM):
    outputs = llm.embed(PROMPTS, pooling="last", use_tqdm=False)
    assert all(sum(x * x for x in output.embedding) == pytest.approx(1.0) for output in outputs)
    assert len({tuple(output.embedding) for output in outputs}) == 3


def test_what_can_not_be_run_is_said_before_anything_runs(llm: LLM):
    with pytest.raises(RequestError, match="1000 tokens"):
        llm.generate(["Hello", "x" * 1000], GREEDY, use_tqdm=False)
    with pytest.raises(UsageError, match="2 prompts but 1 sampling parameters"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(UsageError, match="did you mean 'max_num_seqs'"):
        LLM("anywhere", max_num_seq=3)
    with pytest.raises(UsageError, match="1 prompts but 2 priorities"):
        llm.generate("a", GREEDY, priority=[1, 2])
    with pytest.raises(RequestError, match="role"):
        llm.chat([{"content": "no role"}])
    assert not llm.engine.has_unfinished


def test_an_interrupt_leaves_nothing_behind(llm: LLM):
    class Interrupting:
        def __init__(self, **_options: Any) -> None:
            pass

        def update(self, count: int) -> None:
            raise KeyboardInterrupt

        def close(self) -> None:
            pass

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS * 4, GREEDY, use_tqdm=Interrupting)
    assert not llm.engine.has_unfinished
    assert llm.engine.blocks.num_free == llm.engine.blocks.num_blocks


def test_the_progress_bar_counts_requests(llm: LLM, capsys: pytest.CaptureFixture[str]):
    llm.generate(PROMPTS, GREEDY)
    assert "3/3" in capsys.readouterr().err


def test_defaults_of_the_folder_are_for_calls_without_parameters(tmp_path: Path):
    folder = save_tiny_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7}')
    llm = LLM(folder, max_model_len=64, max_num_seqs=2)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=7)
    assert len(llm.generate("Hello", use_tqdm=False)[0].outputs[0].token_ids) <= 16
