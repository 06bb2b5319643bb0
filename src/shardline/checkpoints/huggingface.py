"""Hugging Face folders: config.json, generation_config.json, safetensors in one file or several, tokenizer files.

    config = read_config(folder)                        # DecoderConfig
    decoder = load_decoder(folder, dtype=torch.float32) # ready to run
    save_folder(folder, config=config, tensors=tensors, tokenizer=tokenizer)

What was loaded and saved again is bit-exact. A folder that is incomplete, truncated or contradicts itself raises
`ShardlineError` with the file's name; no code from a folder is ever run.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardline.checkpoints.weights import INDEX, WEIGHTS, WeightFiles
from shardline.config import ShardlineError, UsageError
from shardline.models.config import DecoderConfig
from shardline.models.decoder import Decoder
from shardline.models.families import TensorRule, family_of, read_model_config, write_model_config
from shardline.text.tokenizer import Tokenizer

__all__ = [
    "MAX_SHARD_BYTES",
    "iter_tensors",
    "load_decoder",
    "load_tensors",
    "read_config",
    "read_generation_config",
    "save_folder",
    "write_descriptions",
]

MAX_SHARD_BYTES = 5 * 10**9

_PREFIXES = ("model.", "transformer.")


def read_config(folder: str | Path) -> DecoderConfig:
    """Returns the architecture of a folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"There is no model folder at {folder}; pass a folder that holds config.json.")
    raw = _read_json(folder / "config.json")
    if "auto_map" in raw and raw.get("model_type") is None:
        raise UsageError(f"{folder}/config.json needs code from the folder (auto_map), which Shardline never runs.")
    if _is_quantized(raw):  # the architecture is the same; `serving.quantize` reads the weights
        raw = {key: value for key, value in raw.items() if key != "quantization_config"}
    return read_model_config(raw)


def read_generation_config(folder: str | Path) -> dict[str, Any]:
    """Returns generation_config.json, or {} where there is none."""
    path = Path(folder) / "generation_config.json"
    return _read_json(path) if path.exists() else {}


def iter_tensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yields (our name, tensor) in the files' dtype, one of the files' tensors at a time.

    Names and shapes are checked against config.json first.
    """
    folder = Path(folder)
    config = read_config(folder)
    if _is_quantized(_read_json(folder / "config.json")):
        raise ShardlineError(
            f"{folder} holds quantised weights, which can be served and verified but not trained or converted; use the "
            "folder that they were made from."
        )
    family = family_of(config.family)
    rules = {rule.theirs: rule for rule in family.tensors(config)}
    files = _weight_files(folder)
    names = {name: _full_name(name, rules) for name in files}
    _check_names(folder, set(rules), set(names.values()), config)
    if config.tie_word_embeddings:
        _check_tied_head(folder, files, rules, names)
    shapes = _file_shapes(config)
    for path in sorted(set(files.values())):
        try:
            with safe_open(path, framework="pt") as archive:
                for stored in sorted(name for name, file in files.items() if file == path):
                    theirs = names[stored]
                    if theirs not in rules:
                        continue
                    tensor = archive.get_tensor(stored)
                    if tensor.shape != shapes[theirs]:
                        raise ShardlineError(
                            f"{path}: {stored} has shape {tuple(tensor.shape)}, but config.json asks for "
                            f"{tuple(shapes[theirs])}; the files belong to different models."
                        )
                    yield from zip(rules[theirs].ours, rules[theirs].op.load(tensor, config), strict=True)
        except SafetensorError as error:
            raise _damaged(path, error) from None


def load_tensors(folder: str | Path) -> dict[str, Tensor]:
    """Returns all tensors under our names, in the files' dtype."""
    return dict(iter_tensors(folder))


def load_decoder(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Decoder:
    """Returns the folder's decoder with its weights in `dtype`, in evaluation mode."""
    decoder = _meta_decoder(read_config(folder))
    decoder.load_state_dict({name: tensor.to(dtype) for name, tensor in iter_tensors(folder)}, assign=True)
    return decoder.requires_grad_(True).eval()


def save_folder(
    folder: str | Path,
    *,
    config: DecoderConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a folder that transformers and the serving engines open directly.

    tensors            full tensors on the CPU under our names, each in the dtype it is to be stored in
    generation_config  what a loaded folder had; its EOS list and sampling defaults are carried through

    Raises `ShardlineError` when tensors are missing. The caller decides atomicity (`atomic_folder`).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = WeightFiles.plan(config, tensors, max_shard_bytes=max_shard_bytes)
    for name in files.names:
        files.write(folder / name, lambda names: [tensors[name] for name in names])
    write_descriptions(folder, files=files, tokenizer=tokenizer, generation_config=generation_config)


def write_descriptions(
    folder: Path,
    *,
    files: WeightFiles,
    tokenizer: Tokenizer | None,
    generation_config: Mapping[str, Any] | None,
) -> None:
    """Writes all of a folder but its weights: config, generation config, index, tokenizer."""
    config = files.config
    files.write_index(folder)
    _write_json(folder / "config.json", write_model_config(config, dtype=files.dtype))
    _write_json(folder / "generation_config.json", _generation_config(config, generation_config))
    if tokenizer is not None:
        tokenizer.save(folder)


def _is_quantized(raw: Mapping[str, Any]) -> bool:
    """Whether config.json names the quantised form that is our own; any other is refused where the config is read."""
    found = raw.get("quantization_config")
    return isinstance(found, dict) and found.get("quant_method") == "shardline"


def _meta_decoder(config: DecoderConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config)


def _file_shapes(config: DecoderConfig) -> dict[str, torch.Size]:
    """Returns the shape that each tensor has in a file: ours, joined on the meta device."""
    ours = dict(_meta_decoder(config).named_parameters())
    return {
        rule.theirs: rule.op.save([ours[name] for name in rule.ours], config).shape
        for rule in family_of(config.family).tensors(config)
    }


def _full_name(stored: str, known: Container[str]) -> str:
    """A folder saved from a model without its head lacks the first part of each name (GPT-2's and BLOOM's own do)."""
    if stored in known:
        return stored
    return next((prefix + stored for prefix in _PREFIXES if prefix + stored in known), stored)


def _weight_files(folder: Path) -> dict[str, Path]:
    """Returns {tensor name: file} from the index or the single file's header."""
    if (folder / INDEX).exists():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ShardlineError(f"{folder / INDEX} has no weight_map; the folder is incomplete.")
        outside = [name for name in weight_map.values() if not isinstance(name, str) or Path(name).name != name]
        if outside:
            raise ShardlineError(f"{folder / INDEX} names the file {outside[0]!r}, which is not inside the folder.")
        files = {tensor: folder / name for tensor, name in weight_map.items()}
        for path in sorted(set(files.values())):
            held = _header(path)
            listed = {tensor for tensor, file in files.items() if file == path}
            if listed - held:
                raise ShardlineError(
                    f"{folder / INDEX} says that {path.name} holds {min(listed - held)}, but it does not; "
                    "copy the folder again."
                )
        return files
    if (folder / WEIGHTS).exists():
        return dict.fromkeys(_header(folder / WEIGHTS), folder / WEIGHTS)
    raise ShardlineError(
        f"{folder} holds no {WEIGHTS} and no {INDEX}; if its weights are .bin files, save them as safetensors first."
    )


def _header(path: Path) -> set[str]:
    if not path.exists():
        raise ShardlineError(f"{path} is missing; the folder is incomplete, copy it again.")
    try:
        with safe_open(path, framework="pt") as archive:
            return set(archive.keys())
    except SafetensorError as error:
        raise _damaged(path, error) from None


def _check_names(folder: Path, expected: set[str], found: set[str], config: DecoderConfig) -> None:
    missing = sorted(expected - found)
    if missing == ["lm_head.weight"]:
        raise ShardlineError(
            f"{folder}: config.json says tie_word_embeddings = false, but there is no lm_head.weight; set it to true "
            "only if the model was trained with tied embeddings."
        )
    if missing:
        raise ShardlineError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}.")
    # Buffers that old exporters wrote, and the copy of a tied head, are the only extras that change nothing.
    skipped = family_of(config.family).skipped
    extra = sorted(
        name
        for name in found - expected
        if not name.endswith(skipped) and not (name == "lm_head.weight" and config.tie_word_embeddings)
    )
    if extra:
        raise ShardlineError(
            f"{folder}: {len(extra)} tensors are not part of a {config.family} model as config.json describes it, "
            f"the first is {extra[0]}."
        )


def _check_tied_head(
    folder: Path, files: Mapping[str, Path], rules: Mapping[str, TensorRule], names: Mapping[str, str]
) -> None:
    """A tied folder may hold its head again, but only the same: another one would be dropped in silence."""
    heads = [stored for stored in files if stored == "lm_head.weight"]
    embeddings = [
        stored for stored, full in names.items() if full in rules and rules[full].ours == ("model.embed_tokens.weight",)
    ]
    for head in heads:
        pair = []
        for name in (head, *embeddings):
            with safe_open(files[name], framework="pt") as archive:
                pair.append(archive.get_tensor(name))
        if not torch.equal(*pair):
            raise ShardlineError(
                f"{folder}: config.json says tie_word_embeddings = true, but {head} differs from {embeddings[0]}; set "
                "it to false if the model was trained with a head of its own, or delete the tensor."
            )


def _generation_config(config: DecoderConfig, source: Mapping[str, Any] | None) -> dict[str, Any]:
    eos = list(config.eos_token_ids)
    own = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos if len(eos) > 1 else next(iter(eos), None),
        "pad_token_id": config.pad_token_id,
    }
    return {**{key: value for key, value in own.items() if value is not None}, **(source or {})}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ShardlineError(f"{path} is missing; pass a complete Hugging Face folder.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ShardlineError(f"{path} can't be read as JSON ({error}); copy the folder again.") from None
    if not isinstance(value, dict):
        raise ShardlineError(f"{path} holds a {type(value).__name__} where a JSON object is expected.")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _damaged(path: Path, error: Exception) -> ShardlineError:
    return ShardlineError(f"{path} is truncated or damaged ({error}); copy it again.")
