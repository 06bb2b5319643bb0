"""Quantises a decoder's weights, saves them, and opens what was saved.

    quantize_decoder(decoder, "int4")                       # in place
    save_quantized("path/to/model", "path/to/smaller", "int4")
    decoder = load_quantized("path/to/smaller")             # the same bits as quantising at load

What is quantised: every linear map as asked for, but routers not at all; head and embeddings always to 8 bits (in 4,
the head alone costs more quality than all other maps together). Norms, biases and learned positions stay.

The folder is a Hugging Face folder but for its weights. config.json says
`"quantization_config": {"quant_method": "shardline", "format": 1, "bits": 8 or 4, "group_size": null or 32}`, and
model.safetensors has, under the decoder's own names, what is not quantised, and for each weight that is, NAME.values,
NAME.scales and, where it has 4 bits, NAME.zeros:

    8 bits  values [N, K] int8, scales [N] fp32; w = value * scale
    4 bits  values [N, ceil(K / group) * group / 2] uint8, of two neighbours the first in the low half; scales and zeros
            [N, groups] bf16; w = (value - 8) * scale + zero
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardline.checkpoints.atomic import atomic_folder
from shardline.checkpoints.huggingface import load_decoder, read_config, read_generation_config, write_descriptions
from shardline.checkpoints.weights import WEIGHTS, WeightFiles
from shardline.config.errors import ShardlineError, UsageError
from shardline.kernels import Embedding, Int4Weight, Int8Weight, Linear, PackedWeight
from shardline.kernels.quantized import GROUP_SIZE
from shardline.models.decoder import Decoder
from shardline.text.tokenizer import Tokenizer

__all__ = ["Quantization", "load_quantized", "quantization_of", "quantize_decoder", "save_quantized"]

Quantization = Literal["int8", "int4"]
METHOD = "shardline"
FORMAT = 1


@torch.no_grad()
def quantize_decoder(decoder: Decoder, kind: Quantization) -> Decoder:
    """Quantises the weights where they are, one after the other; returns the decoder."""
    for name, module, weight_kind in _places(decoder, kind):
        if not isinstance(module.weight, nn.Parameter) or module.weight.dtype != torch.float32:
            raise ShardlineError(f"{name} is {module.weight.dtype}; only fp32 weights are quantised.")
        made = (Int8Weight if weight_kind == "int8" else Int4Weight).quantize(module.weight)
        _put(module, made)
    return decoder


def save_quantized(source: str | Path, target: str | Path, kind: Quantization) -> None:
    """Writes the folder `source` with quantised weights to `target`, which must not exist; it appears whole."""
    source, target = Path(source), Path(target)
    if target.exists():
        raise UsageError(f"{target} exists; name a new folder.")
    if quantization_of(source) is not None:
        raise UsageError(f"{source} is quantised already; start from the full model.")
    decoder = quantize_decoder(load_decoder(source), kind)
    tensors = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    for name, module, _ in _places(decoder, kind):
        assert isinstance(module.weight, Int8Weight | Int4Weight)
        tensors |= {f"{name}.weight.{part}": tensor.contiguous() for part, tensor in module.weight.tensors.items()}
    with atomic_folder(target) as folder:
        config = read_config(source)
        files = WeightFiles.plan(config, _meta_parameters(config), max_shard_bytes=2**63)
        write_descriptions(
            folder, files=files, tokenizer=Tokenizer.load(source), generation_config=read_generation_config(source)
        )
        path = folder / "config.json"
        raw = json.loads(path.read_text(encoding="utf-8"))
        raw["quantization_config"] = {
            "quant_method": METHOD,
            "format": FORMAT,
            "bits": 8 if kind == "int8" else 4,
            "group_size": None if kind == "int8" else GROUP_SIZE,
        }
        path.write_text(json.dumps(raw, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def quantization_of(folder: str | Path) -> Quantization | None:
    """Returns how a folder's weights are quantised, None where they are not. Raises for other tools' formats."""
    try:
        raw = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # whoever reads the config says what is wrong with it
    found: Any = raw.get("quantization_config") if isinstance(raw, dict) else None
    if not isinstance(found, dict) or found.get("quant_method") != METHOD:
        return None  # read_config refuses what it does not know
    kinds: dict[Any, Quantization] = {8: "int8", 4: "int4"}
    if found.get("format") != FORMAT or found.get("bits") not in kinds:
        raise ShardlineError(
            f"{folder}: quantization_config has format {found.get('format')!r} and bits {found.get('bits')!r}; this "
            f"version reads format {FORMAT} with 8 or 4 bits."
        )
    return kinds[found["bits"]]


@torch.no_grad()
def load_quantized(folder: str | Path) -> Decoder:
    """Returns the decoder of a folder that `save_quantized` wrote."""
    folder = Path(folder)
    kind = quantization_of(folder)
    assert kind is not None, folder
    with torch.device("meta"):
        decoder = Decoder(read_config(folder))
    try:
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError:
        raise ShardlineError(f"{folder / WEIGHTS} is missing; the folder is incomplete, copy it again.") from None
    except SafetensorError as error:
        raise ShardlineError(f"{folder / WEIGHTS} is truncated or damaged ({error}); copy it again.") from None
    for name, module, weight_kind in _places(decoder, kind):
        _put(module, _unpack(folder, name, tensors, module.weight.shape, weight_kind))
    wanted = dict(decoder.named_parameters())
    if set(tensors) != set(wanted) or any(tensors[name].shape != wanted[name].shape for name in wanted):
        odd = sorted(set(tensors) ^ set(wanted)) or [n for n in wanted if tensors[n].shape != wanted[n].shape]
        raise ShardlineError(f"{folder}: the weights do not fit config.json; the first that is at fault is {odd[0]}.")
    decoder.load_state_dict(tensors, assign=True)
    return decoder.requires_grad_(False).eval()


def _unpack(folder: Path, name: str, tensors: dict[str, Tensor], shape: torch.Size, kind: Quantization) -> PackedWeight:
    num_out, num_summed = shape
    num_groups = -(-num_summed // GROUP_SIZE)
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "values": ((num_out, num_summed), torch.int8),
        "scales": ((num_out,), torch.float32),
    }
    if kind == "int4":
        expected = {
            "values": ((num_out, num_groups * GROUP_SIZE // 2), torch.uint8),
            "scales": ((num_out, num_groups), torch.bfloat16),
            "zeros": ((num_out, num_groups), torch.bfloat16),
        }
    parts: dict[str, Tensor] = {}
    for part, (wanted_shape, dtype) in expected.items():
        found = tensors.pop(f"{name}.weight.{part}", None)
        if found is None or tuple(found.shape) != wanted_shape or found.dtype != dtype:
            what = "is missing" if found is None else f"has shape {tuple(found.shape)} in {found.dtype}"
            raise ShardlineError(
                f"{folder}: {name}.weight.{part} {what}, but config.json asks for {wanted_shape} in {dtype}."
            )
        parts[part] = found
    return Int8Weight(**parts) if kind == "int8" else Int4Weight.from_tensors(**parts, num_summed=num_summed)


def _places(decoder: Decoder, kind: Quantization) -> list[tuple[str, Linear | Embedding, Quantization]]:
    """Returns (name, module, how) of every weight that is quantised."""
    places: list[tuple[str, Linear | Embedding, Quantization]] = []
    for name, module in decoder.named_modules():
        is_outer = name in ("model.embed_tokens", "lm_head")
        if is_outer or (isinstance(module, Linear) and not name.endswith(".router")):
            assert isinstance(module, Linear | Embedding)
            places.append((name, module, "int8" if is_outer else kind))
    return places


def _put(module: Linear | Embedding, weight: PackedWeight) -> None:
    del module.weight
    module.weight = weight  # type: ignore[assignment]


def _meta_parameters(config: Any) -> dict[str, Tensor]:
    with torch.device("meta"):
        return dict(Decoder(config).named_parameters())
