"""Opens the weights that an engine serves, and takes others in their place.

decoder = open_decoder("path/to/model", config)
draft = open_draft(config)
replace_weights(decoder, "path/to/newer", config)
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from shardline.checkpoints.huggingface import load_decoder, read_config
from shardline.checkpoints.native import find_model_folder
from shardline.config.errors import ShardlineError, UsageError
from shardline.kernels import PackedWeight, ReorderedWeight
from shardline.models.decoder import Decoder
from shardline.serving.engine_config import DTYPES, EngineConfig
from shardline.serving.quantize import load_quantized, quantization_of, quantize_decoder
from shardline.serving.reorder import reorder_decoder
from shardline.serving.tensor_parallel import TensorParallelDecoder, start_tensor_parallel

__all__ = ["open_decoder", "open_draft", "replace_weights"]


def open_decoder(folder: str | Path, config: EngineConfig) -> Decoder | TensorParallelDecoder:
    """Returns a folder's decoder as `config` wants it served; with tensor parallelism this starts processes."""
    decoder = _open(folder, config)
    return decoder if isinstance(decoder, TensorParallelDecoder) else _reordered(decoder, config)


def _open(folder: str | Path, config: EngineConfig) -> Decoder | TensorParallelDecoder:
    folder = find_model_folder(folder)
    stored = quantization_of(folder)
    if config.quantization != "none" and stored not in (None, config.quantization):
        raise UsageError(f"{folder} holds {stored} weights; --quantization {config.quantization} needs the full model.")
    kind = stored or config.quantization
    if kind != "none" and config.dtype != "fp32":
        raise UsageError(f"Weights in {kind} are served with --dtype fp32; leave out --dtype {config.dtype}.")
    if kind != "none" and config.tensor_parallel_size > 1:
        raise UsageError(f"Weights in {kind} can't be shared by processes; use --tensor-parallel-size 1.")
    if config.batch_invariant and config.tensor_parallel_size > 1:
        raise UsageError("--batch-invariant needs --tensor-parallel-size 1: several processes share a row's sums.")
    if stored is not None:
        return load_quantized(folder)
    if config.tensor_parallel_size > 1:
        return start_tensor_parallel(folder, size=config.tensor_parallel_size, dtype=DTYPES[config.dtype])
    decoder = load_decoder(folder, dtype=DTYPES[config.dtype])
    return decoder if kind == "none" else quantize_decoder(decoder, kind)


def _reordered(decoder: Decoder, config: EngineConfig) -> Decoder:
    """In the batch-invariant mode products are the trainer's; an adapter needs the maps that it adds to."""
    return decoder if config.batch_invariant else reorder_decoder(decoder, join=not config.adapters)


def open_draft(config: EngineConfig) -> Decoder | None:
    """Returns the model that guesses, where there is one."""
    if config.speculative != "draft" or config.speculative_model is None:
        return None
    draft = load_decoder(find_model_folder(config.speculative_model), dtype=DTYPES[config.dtype])
    return _reordered(draft, config)


@torch.no_grad()
def replace_weights(decoder: Decoder | TensorParallelDecoder, folder: str | Path, config: EngineConfig) -> None:
    """Fills the decoder with the weights of another folder of the same shape.

    Raises `ShardlineError` where the folder is another model's or can't be read, and then nothing has changed.
    """
    folder = find_model_folder(folder)
    theirs = read_config(folder)
    differing = [
        field.name
        for field in fields(theirs)
        if field.compare and getattr(theirs, field.name) != getattr(decoder.config, field.name)
    ]
    if differing:
        raise ShardlineError(
            f"{folder} holds another model than the one being served ({', '.join(differing)} differ); "
            "start a server for it."
        )
    if isinstance(decoder, TensorParallelDecoder):
        decoder.load(folder)
        return
    fresh = _open(folder, config)
    assert isinstance(fresh, Decoder), "the decoder that is served is not shared by processes"
    if any(isinstance(module, ReorderedWeight) for module in decoder.modules()):
        fresh = _reordered(fresh, config)
    packed = {name: module for name, module in fresh.named_modules() if isinstance(module, PackedWeight)}
    parameters = dict(fresh.named_parameters())
    if parameters.keys() != dict(decoder.named_parameters()).keys():
        raise ShardlineError(f"{folder} is quantised in another way than what is served; start a server for it.")
    for name, parameter in decoder.named_parameters():
        parameter.copy_(parameters[name])
    for name, weight in packed.items():
        decoder.get_submodule(name.rpartition(".")[0]).weight = weight
