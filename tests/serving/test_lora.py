"""LoRA adapters: PEFT's own result, several in one batch, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from models.oracle import save_oracle
from serving.conftest import local_server
from serving.tiny_models import make_request
from shardline.checkpoints.huggingface import load_decoder, read_config
from shardline.config import ShardlineError, UsageError
from shardline.serving.engine import Engine, EngineConfig
from shardline.serving.errors import RequestError
from shardline.serving.lora import read_adapter
from shardline.serving.quantize import quantize_decoder
from shardline.serving.requests import Request, RequestOutput
from shardline.text.tokenizer import byte_tokenizer

LLAMA = {"vocab_size": 320, "max_position_embeddings": 256}
PROMPT = tuple(range(40, 75))


def save_adapter(model: Any, folder: Path, *, seed: int, **config: Any) -> Any:
    """Writes an adapter with random weights by PEFT; returns PEFT's model, without the adapter's effect on `model`."""
    torch.manual_seed(seed)
    targets = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    with warnings.catch_warnings():  # PEFT's own use of what transformers will drop, and of matrices lying across
        warnings.simplefilter("ignore")
        peft_model = get_peft_model(copy.deepcopy(model), LoraConfig(**{**targets, **config})).eval()
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    peft_model.save_pretrained(folder)
    return peft_model


@torch.no_grad()
def logprobs_of(model: Any, ids: list[int]) -> list[float]:
    tokens = torch.tensor([ids])
    return model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].tolist()


def scored(name: str, adapter: str | None, prompt: tuple[int, ...] = PROMPT, **changes: Any) -> Request:
    values = {"max_tokens": 8, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 0, **changes}
    return dataclasses.replace(make_request(name, prompt, **values), adapter=adapter)


def make_engine(folder: Path, adapters: dict[str, Path], **limits: Any) -> Engine:
    named = tuple((name, str(path)) for name, path in adapters.items())
    config = EngineConfig(**{"max_model_len": 64, "max_num_seqs": 8, "adapters": named, **limits})
    return Engine(load_decoder(folder), byte_tokenizer(), config)


def all_logprobs(answer: RequestOutput) -> torch.Tensor:
    return torch.tensor([*answer.prompt_logprobs[1:], *answer.logprobs])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    """A model, three adapters of different ranks and targets, and PEFT's model of each."""
    root = tmp_path_factory.mktemp("lora")
    model = save_oracle("llama", root / "model", **LLAMA)
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "rslora": {"r": 9, "use_rslora": True, "target_modules": "all-linear", "lora_alpha": 5},
        "patterns": {
            "target_modules": r".*layers\.[02]\.(self_attn\.(q|k|o)_proj|mlp\.up_proj)",
            "rank_pattern": {"k_proj": 2},
            "alpha_pattern": {r"layers\.2\.self_attn\.q_proj": 30, "up_proj": 1},
        },
    }
    theirs = {
        name: save_adapter(model, root / name, seed=seed, **kind) for seed, (name, kind) in enumerate(kinds.items())
    }
    return root / "model", {name: root / name for name in kinds}, {**theirs, None: model}


@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 9}], ids=["whole", "chunked"])
def test_several_adapters_in_one_batch_are_pefts(served, limits: dict[str, int]):
    folder, adapters, theirs = served
    engine = make_engine(folder, adapters, **limits)
    names = [None, "plain", "rslora", "plain", None, "patterns", "rslora"]
    requests = [scored(str(i), name, PROMPT[: 20 + i]) for i, name in enumerate(names)]
    for name, request, answer in zip(names, requests, engine.generate(requests), strict=True):
        expected = logprobs_of(theirs[name], [*request.prompt_token_ids, *answer.token_ids])
        torch.testing.assert_close(all_logprobs(answer), torch.tensor(expected), atol=1e-4, rtol=0)
    base = logprobs_of(theirs[None], list(PROMPT))
    for name in adapters:
        assert max(abs(a - b) for a, b in zip(base, logprobs_of(theirs[name], list(PROMPT)), strict=True)) > 0.1


FUSED = {
    "phi3": ["qkv_proj", "gate_up_proj"],
    "gpt2": ["c_attn", "c_fc", "mlp.c_proj"],
    "bloom": ["query_key_value", "dense"],
    "glm4": ["q_proj", "k_proj", "gate_up_proj"],
    "opt": ["q_proj", "fc1", "out_proj"],
}


@pytest.mark.parametrize("family", sorted(FUSED))
def test_families_with_other_names_and_fused_matrices(family: str, tmp_path: Path):
    model = save_oracle(family, tmp_path / "model", vocab_size=320)
    theirs = save_adapter(model, tmp_path / "adapter", seed=1, target_modules=FUSED[family])
    engine = make_engine(tmp_path / "model", {"it": tmp_path / "adapter"})
    [answer] = engine.generate([scored("a", "it", PROMPT[:20])])
    expected = logprobs_of(theirs, [*PROMPT[:20], *answer.token_ids])
    torch.testing.assert_close(all_logprobs(answer), torch.tensor(expected), atol=1e-4, rtol=0)


def test_batch_invariant_with_adapters(served):
    folder, adapters, _ = served
    requests = [scored(str(i), name) for i, name in enumerate([None, "plain", "rslora", "plain", "patterns"])]
    together = make_engine(folder, adapters, batch_invariant=True, max_num_batched_tokens=23).generate(requests)
    for request, answer in zip(requests, together, strict=True):
        [alone] = make_engine(folder, adapters, batch_invariant=True).generate([request])
        assert torch.equal(all_logprobs(answer), all_logprobs(alone))


def test_the_prefix_cache_is_each_adapters_own(served):
    folder, adapters, theirs = served
    engine = make_engine(folder, adapters, block_size=4)
    for name in ("plain", None, "rslora", "plain"):
        [answer] = engine.generate([scored(f"{name}-first", name, prompt_logprobs=None)])
        [again] = engine.generate([scored(f"{name}-again", name, prompt_logprobs=None)])
        assert again.num_cached_tokens > 0
        assert again.token_ids == answer.token_ids
        expected = logprobs_of(theirs[name], [*PROMPT, *again.token_ids])[len(PROMPT) - 1 :]
        torch.testing.assert_close(torch.tensor(again.logprobs), torch.tensor(expected), atol=1e-4, rtol=0)


def test_adapters_over_quantised_weights(served):
    folder, adapters, theirs = served
    config = EngineConfig(max_model_len=64, adapters=(("rslora", str(adapters["rslora"])),))
    engine = Engine(quantize_decoder(load_decoder(folder), "int8"), byte_tokenizer(), config)
    with_it, without = engine.generate([scored("a", "rslora", max_tokens=0), scored("b", None, max_tokens=0)])
    for name, answer in (("rslora", with_it), (None, without)):
        expected = torch.tensor(logprobs_of(theirs[name], list(PROMPT)))
        assert (all_logprobs(answer) - expected).abs().max() < 0.2
    assert (all_logprobs(with_it) - all_logprobs(without)).abs().max() > 0.5


def test_an_adapter_that_is_not_served_is_refused(served):
    folder, adapters, _ = served
    with pytest.raises(RequestError, match="no adapter 'poems'; this engine has plain, rslora, patterns"):
        make_engine(folder, adapters).add_request(scored("a", "poems"))
    with pytest.raises(RequestError, match="this engine has none"):
        make_engine(folder, {}).add_request(scored("a", "plain"))


def test_clients_choose_by_model_name(served):
    folder, adapters, _ = served
    engine = make_engine(folder, {"plain": adapters["plain"], "rslora": adapters["rslora"]}, max_model_len=200)
    expected = {
        name: engine.generate([scored("a", name, tuple(b"hello"), prompt_logprobs=None)])[0].token_ids
        for name in (None, "plain", "rslora")
    }
    assert len({tuple(ids) for ids in expected.values()}) == 3
    with local_server(engine) as server, httpx2.Client(base_url=server.url) as client:
        cards = client.get("/v1/models").json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("tiny", None),
            ("plain", "tiny"),
            ("rslora", "tiny"),
        ]
        assert client.get("/v1/models/plain").json()["root"] == str(adapters["plain"])
        for name, ids in expected.items():
            body = {"prompt": "hello", "temperature": 0, "max_tokens": 8, "ignore_eos": True, "model": name or "tiny"}
            reply = client.post("/v1/completions", json=body).json()
            assert reply["model"] == (name or "tiny")
            assert reply["choices"][0]["text"] == engine.tokenizer.decode(ids)
        vectors = [
            client.post("/v1/embeddings", json={"input": "hello", "model": name}).json() for name in ("tiny", "plain")
        ]
        assert [each["model"] for each in vectors] == ["tiny", "plain"]
        assert vectors[0]["data"][0]["embedding"] != vectors[1]["data"][0]["embedding"]
        refused = client.post("/v1/completions", json={"prompt": "x", "model": "poems"})
        assert refused.status_code == 404
        assert "this server has 'tiny', 'plain', 'rslora'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"use_dora": True}, "use_dora = True, which is not supported; merge it"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"something_of_next_year": 3}, "something_of_next_year = 3"),
        ({"lora_alpha": "big"}, "lora_alpha = 'big' must be a number"),
    ],
)
def test_what_is_not_supported_is_one_sentence(served, tmp_path: Path, changes: dict[str, Any], words: str):
    folder, adapters, _ = served
    described = json.loads((adapters["plain"] / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**described, **changes}))
    (tmp_path / "adapter_model.safetensors").write_bytes((adapters["plain"] / "adapter_model.safetensors").read_bytes())
    with pytest.raises(UsageError, match=words):
        read_adapter(tmp_path, read_config(folder))


def test_tensors_that_do_not_fit_are_one_sentence(served, tmp_path: Path):
    folder, adapters, _ = served
    config = read_config(folder)
    with pytest.raises(UsageError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path, config)
    (tmp_path / "adapter_config.json").write_bytes((adapters["plain"] / "adapter_config.json").read_bytes())
    with pytest.raises(UsageError, match=r"has no adapter_model.safetensors"):
        read_adapter(tmp_path, config)
    good = load_file(adapters["plain"] / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    cases = [
        ({name.replace("q_proj", "w_proj"): good[name]}, ShardlineError, "has lora_A alone"),
        (
            {name.replace("q_proj", "w_proj").replace("_A", f"_{half}"): torch.ones(4, 4) for half in "AB"},
            UsageError,
            "changes model.layers.0.self_attn.w_proj, which this llama model does not have.*v_proj",
        ),
        ({"base_model.model.lm_head.weight": torch.ones(2, 2)}, UsageError, "a tensor base_model.model.lm_head.weight"),
        ({name: good[name][:3]}, UsageError, "has rank 3, and lora_B 4"),
        ({name: good[name][:, :7]}, UsageError, "the adapter maps 7 to"),
        (
            {
                f"base_model.model.lm_head.lora_{half}.weight": torch.ones(48 if half == "A" else 320, 48)[:, :48]
                for half in "AB"
            },
            UsageError,
            "changes lm_head; only the linear maps",
        ),
    ]
    for changes, kind, words in cases:
        save_file(
            {key: value.clone() for key, value in (good | changes).items()}, tmp_path / "adapter_model.safetensors"
        )
        with pytest.raises(kind, match=words):
            make_engine(folder, {"it": tmp_path})
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(ShardlineError, match="truncated or damaged"):
        read_adapter(tmp_path, config)
