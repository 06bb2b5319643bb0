"""What is in a model folder, without loading its weights, and what of it breaks in other runtimes.

    found = inspect_folder("path/to/model")     # a folder, an hf:// name, a checkpoint or a run
    found.parameters.total, found.kv_bytes_per_token["bf16"]
    for finding in found.findings: print(finding.message)

Parameters are counted on the decoder that config.json describes, built on torch's meta device; dtypes, files and
tensors come from the headers of the safetensors files.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardline.checkpoints.huggingface import read_config, read_generation_config
from shardline.checkpoints.native import find_model_folder
from shardline.checkpoints.portability import Finding, Folder, find_problems, token_text
from shardline.checkpoints.stored import read_stored
from shardline.config import UsageError
from shardline.models.config import DecoderConfig
from shardline.models.decoder import Decoder
from shardline.text.tokenizer import Tokenizer

__all__ = ["ChatSample", "EosToken", "Inspection", "Parameters", "inspect_folder"]

PRECISIONS = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a weight. Quantised formats store scales besides, some 3 to 6 % more for int4 in groups of 32 to 128."""

SAMPLE = "Hello, how are you?"


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Counts of elements. `active` leaves out the experts that a token is not routed to. A tied head counts 0."""

    total: int
    active: int
    embedding: int
    attention: int
    feed_forward: int
    norms: int
    head: int
    other: int


@dataclass(frozen=True, kw_only=True)
class EosToken:
    id: int
    text: str
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ChatSample:
    """A short chat as the model is given it: the rendered text, and (id, text) of each token."""

    text: str
    tokens: tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """`context_length` in tokens; memory in bytes; `chat` is None without a tokenizer, a plain prompt without template.

    kv_bytes_per_token     for a token that every layer keeps
    kv_bytes_full_context  for one sequence of `context_length`, layers with a window keeping that many tokens only
    """

    folder: str
    family: str
    architectures: tuple[str, ...]
    parameters: Parameters
    num_tensors: int
    num_files: int
    stored_elements_by_dtype: dict[str, int]
    context_length: int
    rope: dict[str, Any] | None
    num_layers: int
    num_windowed_layers: int
    vocab_size: int
    tokenizer_size: int | None
    tied_head: bool
    bos_token_id: int | None
    eos: tuple[EosToken, ...]
    chat_template_in: tuple[str, ...]
    chat: ChatSample | None
    weight_bytes: dict[str, int]
    kv_bytes_per_token: dict[str, int]
    kv_bytes_full_context: dict[str, int]
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values; the findings are called `warnings`."""
        facts = dataclasses.asdict(self)
        facts["warnings"] = facts.pop("findings")
        if facts["chat"] is not None:
            facts["chat"]["tokens"] = [{"id": id, "text": text} for id, text in facts["chat"]["tokens"]]
        return facts


def inspect_folder(place: str | Path) -> Inspection:
    """Returns what the model folder, `hf://` name, checkpoint or run at `place` holds.

    Raises `ShardlineError` where that can't be said: no folder, an unknown family, a damaged file.
    """
    path = find_model_folder(place)
    config = read_config(path)
    parameters = count_parts(config)
    tokenizer, reason = _load_tokenizer(path)
    folder = Folder(
        path=path,
        config=config,
        num_parameters=parameters.total,
        generation=read_generation_config(path),
        stored=read_stored(path),
        tokenizer=tokenizer,
        tokenizer_reason=reason,
    )
    keys_and_values = [2 * config.num_kv_heads * config.head_dim] * config.num_layers
    kept = [
        min(window or config.max_position_embeddings, config.max_position_embeddings)
        for window in config.sliding_windows
    ]
    full = sum(size * tokens for size, tokens in zip(keys_and_values, kept, strict=True))
    return Inspection(
        folder=str(path),
        family=config.family,
        architectures=tuple(config.raw.get("architectures") or ()),
        parameters=parameters,
        num_tensors=len(folder.stored.tensors),
        num_files=len(folder.stored.files),
        stored_elements_by_dtype=folder.stored.elements_by_dtype,
        context_length=config.max_position_embeddings,
        rope=_rope(config),
        num_layers=config.num_layers,
        num_windowed_layers=sum(window is not None for window in config.sliding_windows),
        vocab_size=config.vocab_size,
        tokenizer_size=tokenizer.vocab_size if tokenizer else None,
        tied_head=config.tie_word_embeddings,
        bos_token_id=tokenizer.bos_token_id if tokenizer else config.bos_token_id,
        eos=_eos(folder),
        chat_template_in=folder.chat_template_in,
        chat=_sample(tokenizer) if tokenizer else None,
        weight_bytes={name: int(parameters.total * size) for name, size in PRECISIONS.items()},
        kv_bytes_per_token={name: sum(keys_and_values) * size for name, size in (("fp32", 4), ("bf16", 2))},
        kv_bytes_full_context={name: full * size for name, size in (("fp32", 4), ("bf16", 2))},
        findings=tuple(find_problems(folder)),
    )


def count_parts(config: DecoderConfig) -> Parameters:
    """Returns the parameters of the decoder that `config` describes, by part."""
    with torch.device("meta"):
        decoder = Decoder(config)
    counts = dict.fromkeys((field.name for field in dataclasses.fields(Parameters)), 0)
    experts = 0
    for name, parameter in decoder.named_parameters():
        counts["total"] += parameter.numel()
        counts[_part(name)] += parameter.numel()
        experts += parameter.numel() if ".experts." in name else 0
    routed_to = experts * config.experts_per_token // max(config.num_experts, 1)
    counts["active"] = counts["total"] - experts + routed_to
    return Parameters(**counts)


def _part(name: str) -> str:
    """Returns the field of `Parameters` for one of our names: norms first, since attention has some of its own."""
    for part, marks in (
        ("norms", ("norm",)),
        ("head", ("lm_head",)),
        ("embedding", ("embed", "project_in", "project_out")),
        ("attention", ("attn", "attention")),
        ("feed_forward", ("mlp", "feed", "expert", "router")),
    ):
        if any(mark in name for mark in marks):
            return part
    return "other"


def _rope(config: DecoderConfig) -> dict[str, Any] | None:
    """Returns the rope's fields that are not at their default; None for a family without rope."""
    if config.position != "rope":
        return None
    rope = dataclasses.asdict(config.rope)
    defaults = dataclasses.asdict(type(config.rope)())
    shown = {name: value for name, value in rope.items() if name in ("theta", "kind") or value != defaults[name]}
    return shown if config.local_rope is None else {**shown, "theta_of_windowed_layers": config.local_rope.theta}


def _load_tokenizer(path: Path) -> tuple[Tokenizer | None, str]:
    try:
        return Tokenizer.load(path), ""
    except UsageError as error:  # the rest of the folder can still be looked at
        return None, str(error)


def _eos(folder: Folder) -> tuple[EosToken, ...]:
    sources: dict[int, list[str]] = {}
    for source, ids in folder.eos_by_source.items():
        for id in ids:
            sources.setdefault(id, []).append(source)
    return tuple(
        EosToken(id=id, text=token_text(folder.tokenizer, id), sources=tuple(names)) for id, names in sources.items()
    )


def _sample(tokenizer: Tokenizer) -> ChatSample | None:
    try:
        messages = [{"role": "user", "content": SAMPLE}]
        text = tokenizer.render_chat(messages, add_generation_prompt=True)
        ids = tokenizer.encode_chat(messages, add_generation_prompt=True)
    except UsageError:  # no template, or one that fails, which the findings tell
        text, ids = SAMPLE, tokenizer.encode_prompt(SAMPLE)
    return ChatSample(text=text, tokens=tuple((id, token_text(tokenizer, id)) for id in ids))
