"""ChatGLM2 and 3 against an oracle written here: transformers has no class for them, only the folders' own code, which
is never run. The mathematics is that of their published modeling file, in plain tensor operations.

Shapes: B batch, T tokens, D hidden, G key/value groups, H head size, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from serving.tiny_models import make_request
from shardline.checkpoints.huggingface import load_decoder, load_tensors, read_config, save_folder
from shardline.config import ShardlineError, UsageError
from shardline.models.attention import DenseAttention
from shardline.serving.engine import Engine, EngineConfig
from shardline.text.tokenizer import byte_tokenizer

TOLERANCE = 1e-5

# The keys of the published config.json, with small sizes; `auto_map` asks for code from the folder.
CONFIG: dict[str, Any] = {
    "_name_or_path": "a/chatglm",
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "auto_map": {
        "AutoConfig": "configuration_chatglm.ChatGLMConfig",
        "AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration",
        "AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration",
    },
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "ffn_hidden_size": 80,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": 48,
    "kv_channels": 16,
    "layernorm_epsilon": 1e-05,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 6,
    "num_layers": 3,
    "original_rope": True,
    "padded_vocab_size": 320,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 128,
    "use_cache": True,
    "torch_dtype": "float32",
    "transformers_version": "4.27.1",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "chatglm": {},
    "chatglm-rope-ratio": {"rope_ratio": 50, "eos_token_id": [2, 5, 7]},
    "chatglm-no-bias": {"add_qkv_bias": False},
    "chatglm-no-groups": {"multi_query_attention": False, "multi_query_group_num": 1, "kv_channels": 8},
}


def num_groups(config: dict[str, Any]) -> int:
    return config["multi_query_group_num"] if config["multi_query_attention"] else config["num_attention_heads"]


def random_weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Weights under the published names, with norms and biases away from their neutral values."""
    generator = torch.Generator().manual_seed(3)
    hidden, inner = config["hidden_size"], config["ffn_hidden_size"]
    query, group = config["num_attention_heads"] * config["kv_channels"], num_groups(config) * config["kv_channels"]
    vocabulary = config["padded_vocab_size"]

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    def norm() -> Tensor:
        return 1 + torch.randn(hidden, generator=generator) * 0.2

    weights = {"transformer.embedding.word_embeddings.weight": matrix(vocabulary, hidden)}
    for index in range(config["num_layers"]):
        at = f"transformer.encoder.layers.{index}."
        weights[f"{at}input_layernorm.weight"] = norm()
        weights[f"{at}self_attention.query_key_value.weight"] = matrix(query + 2 * group, hidden)
        if config["add_qkv_bias"]:
            weights[f"{at}self_attention.query_key_value.bias"] = matrix(query + 2 * group)
        weights[f"{at}self_attention.dense.weight"] = matrix(hidden, query)
        weights[f"{at}post_attention_layernorm.weight"] = norm()
        weights[f"{at}mlp.dense_h_to_4h.weight"] = matrix(2 * inner, hidden)
        weights[f"{at}mlp.dense_4h_to_h.weight"] = matrix(hidden, inner)
    weights["transformer.encoder.final_layernorm.weight"] = norm()
    weights["transformer.output_layer.weight"] = matrix(vocabulary, hidden)
    return weights


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn_pairs(x_BTNH: Tensor, positions_BT: Tensor, config: dict[str, Any]) -> Tensor:
    """The first half of a head turns: dims 2i and 2i + 1 are a complex number that is multiplied by e^(i angle)."""
    num_dims = config["kv_channels"] // 2
    base = 10000.0 * config.get("rope_ratio", 1)
    per_pair = torch.tensor([base ** (-2 * pair / num_dims) for pair in range(num_dims // 2)])
    angles = (positions_BT.unsqueeze(-1).float() * per_pair).unsqueeze(2)
    pairs = torch.view_as_complex(x_BTNH[..., :num_dims].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return torch.cat((turned, x_BTNH[..., num_dims:]), dim=-1)


def oracle_hidden(config: dict[str, Any], weights: dict[str, Tensor], tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Returns the last hidden states; positions count the tokens that `mask_BT` (1 = real) leaves in each row."""
    heads, groups, size = config["num_attention_heads"], num_groups(config), config["kv_channels"]
    eps, length = config["layernorm_epsilon"], tokens_BT.shape[1]
    positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    seen_BTS = torch.ones(length, length).tril().bool() & mask_BT.bool().unsqueeze(1)
    seen_BTS = seen_BTS | torch.eye(length).bool()  # a padding token sees itself, so that no row is empty
    x = weights["transformer.embedding.word_embeddings.weight"][tokens_BT]
    for index in range(config["num_layers"]):
        layer = {
            name.removeprefix(f"transformer.encoder.layers.{index}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"transformer.encoder.layers.{index}.")
        }
        normed = rms(x, layer["input_layernorm.weight"], eps)
        bias = layer.get("self_attention.query_key_value.bias")
        mixed = F.linear(normed, layer["self_attention.query_key_value.weight"], bias)
        query, key, value = mixed.split([heads * size, groups * size, groups * size], dim=-1)
        query = turn_pairs(query.unflatten(-1, (heads, size)), positions_BT, config)
        key = turn_pairs(key.unflatten(-1, (groups, size)), positions_BT, config)
        # Each group's key and value serve heads / groups neighbouring queries.
        key = key.repeat_interleave(heads // groups, dim=2)
        value = value.unflatten(-1, (groups, size)).repeat_interleave(heads // groups, dim=2)
        scores = torch.einsum("btnh,bsnh->bnts", query, key) / size**0.5
        chances = scores.masked_fill(~seen_BTS.unsqueeze(1), float("-inf")).softmax(-1)
        context = torch.einsum("bnts,bsnh->btnh", chances, value).flatten(2)
        x = x + context @ layer["self_attention.dense.weight"].T
        gate, up = (rms(x, layer["post_attention_layernorm.weight"], eps) @ layer["mlp.dense_h_to_4h.weight"].T).chunk(
            2, dim=-1
        )
        x = x + (gate * gate.sigmoid() * up) @ layer["mlp.dense_4h_to_h.weight"].T
    return rms(x, weights["transformer.encoder.final_layernorm.weight"], eps)


def oracle_logits(
    config: dict[str, Any], weights: dict[str, Tensor], tokens_BT: Tensor, mask_BT: Tensor | None = None
) -> Tensor:
    mask_BT = torch.ones_like(tokens_BT) if mask_BT is None else mask_BT
    return oracle_hidden(config, weights, tokens_BT, mask_BT) @ weights["transformer.output_layer.weight"].T


def save_chatglm(folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Writes a folder as published: config, weights, and code that must not run."""
    config = {**CONFIG, **changes}
    weights = random_weights(config)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("configuration_chatglm.py", "modeling_chatglm.py"):
        (folder / name).write_text("raise SystemExit('code of a folder was run')\n")
    return config, weights


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, *save_chatglm(folder, **VARIANTS[request.param])


def rows(batch: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(3, 320, (batch, length), generator=torch.Generator().manual_seed(7))
    return tokens, torch.arange(length).expand(batch, length)


def test_logits_and_last_hidden_states(saved, record_property):
    folder, config, weights = saved
    decoder = load_decoder(folder)
    tokens, positions = rows(2, 40)
    with torch.no_grad():
        hidden = decoder.hidden_states(tokens, positions_BT=positions, attention=DenseAttention())
        expected = oracle_hidden(config, weights, tokens, torch.ones_like(tokens))
        difference = (decoder.head(hidden) - oracle_logits(config, weights, tokens)).abs().max().item()
    record_property("fp32_logits", difference)
    assert (hidden - expected).abs().max() <= TOLERANCE
    assert difference <= TOLERANCE


def test_left_padded_batch(saved):
    folder, config, weights = saved
    tokens, _ = rows(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = oracle_logits(config, weights, tokens, mask)
        attention = DenseAttention(torch.where(mask.bool(), 0, -1))
        actual = load_decoder(folder)(tokens, positions_BT=positions, attention=attention)
    assert (actual - expected)[mask.bool()].abs().max() <= TOLERANCE
    assert actual.isfinite().all()


def test_packed_documents_do_not_see_each_other(saved):
    folder, config, weights = saved
    lengths = [9, 4, 12]
    tokens, _ = rows(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).unsqueeze(0)
    with torch.no_grad():
        actual = load_decoder(folder)(tokens, positions_BT=positions, attention=DenseAttention(documents))
        expected = torch.cat([oracle_logits(config, weights, part) for part in tokens.split(lengths, dim=1)], dim=1)
    assert (actual - expected).abs().max() <= TOLERANCE


def test_gradient_of_every_parameter(saved, tmp_path):
    """The oracle's gradients are written as if they were weights, so that the table names, splits and sorts them."""
    folder, config, weights = saved
    decoder = load_decoder(folder)
    tokens, positions = rows(2, 10)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    oracle_logits(config, leaves, tokens).square().mean().backward()
    decoder(tokens, positions_BT=positions, attention=DenseAttention()).square().mean().backward()
    save_file({name: leaf.grad for name, leaf in leaves.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = load_tensors(tmp_path)
    assert expected.keys() == dict(decoder.named_parameters()).keys()
    for name, parameter in decoder.named_parameters():
        reference = expected[name]
        assert reference.abs().max() > 0, name
        assert (parameter.grad - reference).abs().max() <= 1e-4 * reference.abs().max(), name


def test_loaded_and_saved_again_is_bit_exact(saved, tmp_path):
    folder, _, weights = saved
    save_folder(tmp_path, config=read_config(folder), tensors=load_tensors(folder))
    again = load_file(tmp_path / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def test_every_key_of_config_json_is_carried_through(saved, tmp_path):
    folder, config, _ = saved
    save_folder(tmp_path, config=read_config(folder), tensors=load_tensors(folder))
    after = json.loads((tmp_path / "config.json").read_text())
    assert {key: after[key] for key in config} == config
    assert read_config(tmp_path) == read_config(folder)


def test_greedy_tokens_and_logprobs(saved):
    """The paged engine, chunked and batched, gives what the oracle's own argmax gives one token at a time."""
    folder, config, weights = saved
    decoder = load_decoder(folder)
    engine = Engine(decoder, byte_tokenizer(), EngineConfig(max_num_seqs=3, max_num_batched_tokens=9, block_size=4))
    prompts = [(5, 9, 200, 31, 7), tuple(range(40, 62)), (11,)]
    requests = [
        make_request(str(i), prompt, ignore_eos=True, logprobs=0, prompt_logprobs=0) for i, prompt in enumerate(prompts)
    ]
    for prompt, answer in zip(prompts, engine.generate(requests), strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(len(answer.token_ids)):
                ids.append(int(oracle_logits(config, weights, torch.tensor([ids]))[0, -1].argmax()))
            expected = oracle_logits(config, weights, torch.tensor([ids]))[0, :-1].log_softmax(-1)
        assert len(answer.token_ids) == 12
        assert answer.token_ids == ids[len(prompt) :]
        expected = expected.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1))[:, 0]
        served = torch.tensor([*answer.prompt_logprobs[1:], *answer.logprobs])
        torch.testing.assert_close(served, expected, atol=TOLERANCE, rtol=0)


def test_what_the_oracle_rests_on_shows_in_the_logits():
    """Guards the tests above: each of these facts, if read wrongly, changes the oracle's logits."""
    tokens, _ = rows(1, 40)
    weights = random_weights(CONFIG)
    plain = oracle_logits(CONFIG, weights, tokens)
    halves = {name: torch.cat(tensor.chunk(2)[::-1]) for name, tensor in weights.items() if "h_to_4h" in name}
    for other in (
        oracle_logits({**CONFIG, "rope_ratio": 50}, weights, tokens),
        oracle_logits(CONFIG, {**weights, **halves}, tokens),
        oracle_logits(CONFIG, {name: t for name, t in weights.items() if "bias" not in name}, tokens),
    ):
        assert (other - plain).abs().max() > 1e-2


def test_only_a_folder_whose_model_type_we_know_is_read(tmp_path):
    """The fixtures' folders all have an auto_map and code that exits; without a known model_type they are refused."""
    save_chatglm(tmp_path, model_type=None)
    with pytest.raises(UsageError, match="needs code from the folder"):
        read_config(tmp_path)
    save_chatglm(tmp_path, model_type="my_remote_model")
    with pytest.raises(UsageError, match="my_remote_model"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("post_layer_norm", False),
        ("rmsnorm", False),
        ("add_bias_linear", True),
        ("apply_residual_connection_post_layernorm", True),
        ("original_rope", False),
        ("tie_word_embeddings", True),
        ("pre_seq_len", 128),
        ("quantization_bit", 4),
    ],
)
def test_what_is_not_understood_is_an_error_that_names_it(key, value, tmp_path):
    save_chatglm(tmp_path, **{key: value})
    with pytest.raises(ShardlineError, match=key):
        load_decoder(tmp_path)
