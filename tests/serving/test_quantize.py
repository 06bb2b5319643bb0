"""Quantised serving: close to the full model, the same from a saved folder, smaller, and refused where it can't be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from serving.tiny_models import make_decoder, make_request, save_tiny_folder, tiny_config
from shardline.checkpoints.huggingface import iter_tensors, load_decoder, save_folder
from shardline.config import ShardlineError, UsageError
from shardline.kernels import Int4Weight, Int8Weight
from shardline.serving.engine import Engine, EngineConfig, load_engine
from shardline.serving.loading import open_decoder
from shardline.serving.quantize import load_quantized, quantize_decoder, save_quantized
from shardline.text.tokenizer import byte_tokenizer


def limits(**changes) -> EngineConfig:
    return EngineConfig(**{"max_model_len": 128, "max_num_seqs": 4, **changes})


def logprobs(engine: Engine) -> list[float]:
    [answer] = engine.generate([make_request("a", "some prompt, scored", max_tokens=8, logprobs=0, prompt_logprobs=0)])
    return [*answer.prompt_logprobs[1:], *answer.logprobs]


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_saved_and_quantised_at_load_are_the_same_bits(kind: str, changes: dict, tmp_path: Path):
    folder = save_tiny_folder(tmp_path / "full", **changes)
    save_quantized(folder, tmp_path / "small", kind)
    at_load = load_engine(folder, limits(quantization=kind))
    saved = load_engine(tmp_path / "small", limits())
    assert logprobs(at_load) == logprobs(saved)
    full = load_engine(folder, limits())
    assert saved.budget.weights_bytes == at_load.budget.weights_bytes < full.budget.weights_bytes / 3
    weight = saved.decoder.model.layers[0].self_attn.q_proj.weight
    assert isinstance(weight, Int8Weight if kind == "int8" else Int4Weight)
    assert isinstance(saved.decoder.model.embed_tokens.weight, Int8Weight)
    stored = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert stored["bits"] == int(kind[3:])


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.05), ("int4", 0.5)])
def test_close_to_the_full_model(kind: str, most: float, tmp_path: Path):
    decoder = make_decoder(tiny_config(byte_tokenizer()))
    full = Engine(decoder, byte_tokenizer(), limits())
    request = make_request("a", "some prompt, scored", max_tokens=0, prompt_logprobs=0)
    [expected] = full.generate([request])
    small = Engine(quantize_decoder(make_decoder(tiny_config(byte_tokenizer())), kind), byte_tokenizer(), limits())
    [found] = small.generate([request])
    differences = [abs(a - b) for a, b in zip(expected.prompt_logprobs[1:], found.prompt_logprobs[1:], strict=True)]
    assert 0 < max(differences) < most


def test_experts_are_quantised_and_routers_not(tmp_path: Path):
    config = tiny_config(byte_tokenizer(), num_experts=4, experts_per_token=2, expert_size=48)
    decoder = quantize_decoder(make_decoder(config), "int4")
    mlp = decoder.model.layers[0].mlp
    assert isinstance(mlp.router.weight, torch.nn.Parameter)
    assert isinstance(mlp.experts[3].down_proj.weight, Int4Weight)
    assert all(map(torch.isfinite, map(torch.tensor, logprobs(Engine(decoder, byte_tokenizer(), limits())))))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_batch_invariant_with_quantised_weights(kind: str):
    decoder = quantize_decoder(make_decoder(tiny_config(byte_tokenizer())), kind)
    requests = [make_request(str(i), "x" * (1 + 9 * i), logprobs=0, prompt_logprobs=0) for i in range(6)]
    config = limits(batch_invariant=True, max_num_batched_tokens=17)
    together = Engine(decoder, byte_tokenizer(), config).generate(requests)
    for request, answer in zip(requests, together, strict=True):
        [alone] = Engine(decoder, byte_tokenizer(), limits(batch_invariant=True)).generate([request])
        assert (answer.token_ids, answer.logprobs, answer.prompt_logprobs) == (
            alone.token_ids,
            alone.logprobs,
            alone.prompt_logprobs,
        )


def test_reload_takes_the_new_weights_quantised(tmp_path: Path):
    old, new = save_tiny_folder(tmp_path / "old"), tmp_path / "new"
    decoder = load_decoder(old)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(parameter * 1.1)
    save_folder(new, config=decoder.config, tensors=decoder.state_dict(), tokenizer=byte_tokenizer())
    engine = load_engine(old, limits(quantization="int8"))
    before = logprobs(engine)
    engine.reload(new)
    assert logprobs(engine) == logprobs(load_engine(new, limits(quantization="int8"))) != before


def test_what_can_not_be_is_one_sentence(tmp_path: Path):
    folder = save_tiny_folder(tmp_path / "full")
    small = tmp_path / "small"
    save_quantized(folder, small, "int4")
    with pytest.raises(UsageError, match="small exists"):
        save_quantized(folder, small, "int4")
    with pytest.raises(UsageError, match="is quantised already"):
        save_quantized(small, tmp_path / "smaller", "int4")
    with pytest.raises(UsageError, match="holds int4 weights; --quantization int8 needs the full model"):
        open_decoder(small, limits(quantization="int8"))
    with pytest.raises(UsageError, match="served with --dtype fp32"):
        open_decoder(folder, limits(quantization="int8", dtype="bf16"))
    with pytest.raises(UsageError, match="--tensor-parallel-size 1"):
        open_decoder(folder, limits(quantization="int8", tensor_parallel_size=2))
    with pytest.raises(ShardlineError, match="not trained or converted"):
        list(iter_tensors(small))


def test_a_damaged_folder_is_one_sentence(tmp_path: Path):
    small = tmp_path / "small"
    save_quantized(save_tiny_folder(tmp_path / "full"), small, "int4")
    config = small / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"bits": 4', '"bits": 8'))
    with pytest.raises(ShardlineError, match=r"\.values has shape .* but config.json asks for"):
        load_quantized(small)
    config.write_text(text.replace('"bits": 4', '"bits": 3'))
    with pytest.raises(ShardlineError, match="bits 3; this version reads format 1"):
        load_quantized(small)
    config.write_text(text)
    weights = small / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(ShardlineError, match="truncated or damaged"):
        load_quantized(small)
    weights.unlink()
    with pytest.raises(ShardlineError, match="is missing"):
        load_quantized(small)


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 0.05), ("int8", 0.05)])
@pytest.mark.parametrize("batched", [512, 13], ids=["whole", "chunked"])
def test_kv_cache_dtypes_are_close_and_smaller(dtype: str, most: float, batched: int):
    decoder = make_decoder(tiny_config(byte_tokenizer(), num_heads=4, num_kv_heads=2))
    requests = [make_request(str(i), "y" * (5 + 11 * i), max_tokens=9, logprobs=0, prompt_logprobs=0) for i in range(4)]
    plain = Engine(decoder, byte_tokenizer(), limits())
    small = Engine(decoder, byte_tokenizer(), limits(kv_cache_dtype=dtype, max_num_batched_tokens=batched))
    head_bytes = 16 * 2 if dtype == "bf16" else 16 + 4
    assert small.budget.bytes_per_token == 2 * 3 * 2 * head_bytes
    worst = 0.0
    for expected, found in zip(plain.generate(requests), small.generate(requests), strict=True):
        pairs = zip(expected.prompt_logprobs[1:], found.prompt_logprobs[1:], strict=True)
        worst = max(worst, *(abs(a - b) for a, b in pairs))
    assert 0 < worst < most


@pytest.mark.parametrize("changes", [{"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"quantization": "int4"}])
def test_a_poisoned_request_fails_alone_in_small_forms_too(changes: dict[str, str]):
    decoder = make_decoder(tiny_config(byte_tokenizer(), tie_word_embeddings=False))
    if "quantization" in changes:
        quantize_decoder(decoder, changes["quantization"])
        decoder.model.embed_tokens.weight.tensors["scales"][200] = float("nan")
    else:
        with torch.no_grad():
            decoder.model.embed_tokens.weight[200] = float("nan")
    good = make_request("good", "fine", max_tokens=20, ignore_eos=True, logit_bias={200: -100})
    config = limits(num_blocks=12, kv_cache_dtype=changes.get("kv_cache_dtype", "auto"), max_num_seqs=2)
    [alone] = Engine(decoder, byte_tokenizer(), config).generate([good])
    engine = Engine(decoder, byte_tokenizer(), config)
    bad, again = engine.generate([make_request("bad", (1, 2, 200, 3)), dataclasses.replace(good, request_id="again")])
    assert "not finite" in (bad.error or "")
    assert again.token_ids == alone.token_ids
    later = engine.generate([dataclasses.replace(good, request_id=str(i)) for i in range(6)])
    assert [answer.token_ids for answer in later] == [alone.token_ids] * 6


def test_what_a_cache_loses_does_not_depend_on_chunks():
    """Also a prompt's own chunk reads what was stored, so where it is cut makes no difference."""
    decoder = make_decoder(tiny_config(byte_tokenizer()))
    request = make_request("a", "z" * 60, max_tokens=6, logprobs=0, prompt_logprobs=0)
    config = {"kv_cache_dtype": "int8", "batch_invariant": True}
    [whole] = Engine(decoder, byte_tokenizer(), limits(**config)).generate([request])
    [cut] = Engine(decoder, byte_tokenizer(), limits(**config, max_num_batched_tokens=7)).generate([request])
    assert (whole.prompt_logprobs, whole.logprobs) == (cut.prompt_logprobs, cut.logprobs)
