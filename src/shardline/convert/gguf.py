"""A GGUF file (llama.cpp's format) into a Hugging Face folder, every weight dequantised to fp32.

    convert_gguf(Path("model.gguf"), Path("model-folder"))

Read: the architectures `llama` (Llama, Mistral, SmolLM2), `qwen2` and `qwen3`, with a byte-level BPE vocabulary, and
every type that the `gguf` package can dequantise (F32, F16, BF16, Q4_0 ... Q8_0, the K and IQ kinds). Format: the GGUF
specification, version 3; names of keys and tensors: the `gguf` package's constants.

A foreign, truncated or unsupported file raises `ShardlineError` with what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardline.checkpoints.atomic import atomic_folder
from shardline.checkpoints.huggingface import save_folder
from shardline.config.errors import ShardlineError, UsageError
from shardline.convert.gguf_tokenizer import build_tokenizer
from shardline.models.config import DecoderConfig
from shardline.models.families import read_model_config
from shardline.text.tokenizer import Tokenizer

__all__ = ["GgufFile", "convert_gguf"]

Progress = Callable[[float], None]

_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"
# The only values that Llama 3 was released with; a file holds the divisors that follow from them, not the values.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def convert_gguf(path: str | Path, folder: str | Path, *, progress: Progress | None = None) -> DecoderConfig:
    """Writes the model in `path` to `folder`, whole or not at all, and returns its architecture.

    All weights are held in memory once, in fp32. `progress` is called with the fraction of the weights read.
    """
    file = GgufFile(path)
    config, tokenizer = file.config(), file.tokenizer()
    tensors: dict[str, Tensor] = {}
    total = sum(tensor.n_elements for tensor in file.reader.tensors)
    done = 0
    for name, tensor in file.tensors(config):
        tensors[name] = tensor
        done += tensor.numel()
        if progress:
            progress(min(1.0, done / total))
    with atomic_folder(Path(folder)) as scratch:
        save_folder(scratch, config=config, tensors=tensors, tokenizer=tokenizer)
    return config


class GgufFile:
    """One GGUF file, mapped into memory: its architecture, its weights one at a time, its tokenizer."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.reader = _open(self.path)
        architecture = self._get("general.architecture", str, default="none")
        if architecture not in _FAMILIES:
            raise UsageError(
                f"{self.path} holds the architecture {architecture!r}; those that can be read from GGUF are "
                f"{', '.join(_FAMILIES)}."
            )
        self.architecture: str = architecture

    def config(self) -> DecoderConfig:
        """Returns the architecture, by way of the config.json that the model's Hugging Face folder would hold."""
        shapes = {tensor.name: tuple(int(n) for n in tensor.shape) for tensor in self.reader.tensors}
        if "token_embd.weight" not in shapes:
            raise ShardlineError(f"{self.path} has no tensor token_embd.weight, so it holds no language model.")
        hidden_size, num_heads = self._own("embedding_length", int), self._own("attention.head_count", int)
        head_dim = self._own("attention.key_length", int, default=hidden_size // num_heads)
        self._reject_foreign_mathematics(head_dim)
        context = self._own("context_length", int)
        raw = {
            "model_type": _FAMILIES[self.architecture],
            "vocab_size": shapes["token_embd.weight"][1],
            "hidden_size": hidden_size,
            "intermediate_size": self._own("feed_forward_length", int),
            "num_hidden_layers": self._own("block_count", int),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._own("attention.head_count_kv", int, default=num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": context,
            "rms_norm_eps": _shortest(self._own("attention.layer_norm_rms_epsilon", float)),
            "rope_theta": _shortest(self._own("rope.freq_base", float, default=10000.0)),
            "rope_scaling": self._rope_scaling(head_dim, context),
            "tie_word_embeddings": "output.weight" not in shapes,
            "attention_bias": "blk.0.attn_q.bias" in shapes and self.architecture != "qwen2",
            "mlp_bias": "blk.0.ffn_down.bias" in shapes,
            "bos_token_id": self._get("tokenizer.ggml.bos_token_id", int, default=None),
            "eos_token_id": self._eos_token_ids() or None,
            "pad_token_id": self._get("tokenizer.ggml.padding_token_id", int, default=None),
        }
        return read_model_config(raw)

    def tensors(self, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
        """Yields (our name, fp32 tensor) one at a time. llama.cpp's order of q and k rows is undone."""
        from gguf.quants import dequantize

        for tensor in self.reader.tensors:
            if tensor.name == _ROPE_DIVISORS:
                continue
            name = self._our_name(tensor.name)
            try:
                array = dequantize(tensor.data, tensor.tensor_type)
            except (NotImplementedError, ValueError) as error:
                raise ShardlineError(f"{self.path}: {tensor.name} can't be dequantised: {error}.") from error
            array = array.astype(np.float32, copy=False).reshape([int(n) for n in reversed(tensor.shape)])
            if self.architecture == "llama" and ".self_attn.q_proj." in name:
                array = _undo_rope_order(array, config.num_heads)
            elif self.architecture == "llama" and ".self_attn.k_proj." in name:
                array = _undo_rope_order(array, config.num_kv_heads)
            # dequantize may return a view of the read-only file: torch tensors must own what they hold.
            yield name, torch.from_numpy(np.array(array, order="C"))

    def tokenizer(self) -> Tokenizer:
        """Returns the vocabulary and the chat template that the file carries."""
        fields = {
            key.removeprefix("tokenizer."): field.contents()
            for key, field in self.reader.fields.items()
            if key.startswith("tokenizer.")
        }
        return build_tokenizer(fields, eos_token_ids=self._eos_token_ids(), name=str(self.path))

    def _eos_token_ids(self) -> list[int]:
        """The id that ends a text, then the one that ends a turn, where the two differ."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        found = [self._get(key, int, default=None) for key in keys]
        return list(dict.fromkeys(id for id in found if id is not None))

    def _rope_scaling(self, head_dim: int, context: int) -> dict[str, Any] | None:
        kind = self._own("rope.scaling.type", str, default="none")
        divisors = next((tensor.data for tensor in self.reader.tensors if tensor.name == _ROPE_DIVISORS), None)
        if divisors is not None:
            theta = self._own("rope.freq_base", float, default=10000.0)
            return self._llama3_scaling(np.asarray(divisors, dtype=np.float64), theta, head_dim)
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise UsageError(
                f"{self.path} scales its rotary embedding by {kind!r}; what can be read is none, linear and yarn."
            )
        factor = self._own("rope.scaling.factor", float)
        if kind == "linear":
            return {"rope_type": "linear", "factor": _shortest(factor)}
        original = self._own("rope.scaling.original_context_length", int, default=round(context / factor))
        return {"rope_type": "yarn", "factor": _shortest(factor), "original_max_position_embeddings": original}

    def _llama3_scaling(self, divisors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
        """Llama 3.1's scaling is stored as one divisor a frequency; the factor is the largest of them."""
        scaling = {"factor": _shortest(float(divisors.max())), **_LLAMA3_ROPE}
        wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        ratio = scaling["original_max_position_embeddings"] / wavelengths
        span = scaling["high_freq_factor"] - scaling["low_freq_factor"]
        smooth = np.clip((ratio - scaling["low_freq_factor"]) / span, 0, 1)
        expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
        if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
            raise UsageError(
                f"{self.path}: the divisors in {_ROPE_DIVISORS} are not those of Llama 3's rope with low_freq_factor "
                "1, high_freq_factor 4 and 8192 original positions; start from the model's Hugging Face folder instead."
            )
        return {"rope_type": "llama3", **scaling}

    def _reject_foreign_mathematics(self, head_dim: int) -> None:
        rotated = self._own("rope.dimension_count", int, default=head_dim)
        if rotated != head_dim:
            raise UsageError(
                f"{self.path} rotates {rotated} of a head's {head_dim} dimensions; only all are supported."
            )
        experts = self._own("expert_count", int, default=0)
        if experts:
            raise UsageError(f"{self.path} is a mixture of {experts} experts; only dense models are supported.")
        window = self._own("attention.sliding_window", int, default=0)
        if window and window < self._own("context_length", int):
            raise UsageError(f"{self.path} has a sliding window of {window} tokens; it is read without one only.")

    def _our_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if kind in ("weight", "bias"):
            if stem in _TOP_NAMES:
                return f"{_TOP_NAMES[stem]}.{kind}"
            block, _, rest = stem.partition(".")
            layer, _, part = rest.partition(".")
            if block == "blk" and layer.isdecimal() and part in _LAYER_NAMES:
                return f"model.layers.{int(layer)}.{_LAYER_NAMES[part]}.{kind}"
        raise UsageError(
            f"{self.path} holds the tensor {name}, which no {self.architecture} model of ours has; "
            "leaving it out would change what the model computes."
        )

    def _own(self, key: str, kind: type, **default: Any) -> Any:
        return self._get(f"{self.architecture}.{key}", kind, **default)

    def _get(self, key: str, kind: type, **default: Any) -> Any:
        field = self.reader.fields.get(key)
        if field is None:
            if "default" in default:
                return default["default"]
            raise ShardlineError(f"{self.path} has no key {key}, which a model can't be built without.")
        value = field.contents()
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UsageError(f"{self.path}: {key} = {value!r}, where one {kind.__name__} for all layers is supported.")
        return value


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise UsageError("Reading GGUF needs the gguf package: pip install 'shardline[gguf]'.") from None
    if not path.is_file():
        raise UsageError(f"There is no file {path}; pass the path of a .gguf file.")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ShardlineError(f"{path} is not a GGUF file: it does not begin with the letters GGUF.")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        # What the package raises when a length in a damaged file leads beyond its end.
        raise ShardlineError(f"{path} is truncated or damaged ({error}); download it again.") from error


def _undo_rope_order(array: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp turns neighbouring rows, we turn halves: rows 0, 2, 4, ... of a head come first, then 1, 3, 5, ..."""
    rows = array.shape[0] // num_heads
    return array.reshape(num_heads, rows // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same fp32 number: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
