"""What of a model folder breaks in other runtimes: each finding is a sentence with the values and the fix.

    for finding in find_problems(folder): print(finding.severity, finding.message)

A `warning` changes what some runtime computes, or stops it; a `note` is well-formed, but one kind of reader trips on
it. Nothing here is an error of Shardline's own: what keeps a folder from being loaded is said by the loader too.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from shardline.checkpoints.stored import INDEX, StoredTensor, StoredWeights, same_values
from shardline.config import UsageError
from shardline.models.config import DecoderConfig
from shardline.models.families import family_of
from shardline.text.tokenizer import Tokenizer

__all__ = ["Finding", "Folder", "find_problems", "token_text"]

_HEADS = ("lm_head.weight", "output_layer.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
_OLD_ROPE = ("rope_theta", "rope_scaling", "rope_local_base_freq")
_ANSWER = "The answer is 42."


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`kind` is stable, for scripts; `message` is for people."""

    kind: str
    severity: Literal["warning", "note"]
    message: str


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder as read: `num_parameters` is what config.json describes, `stored` what the files hold."""

    path: Path
    config: DecoderConfig
    num_parameters: int
    generation: dict[str, Any]
    stored: StoredWeights
    tokenizer: Tokenizer | None
    tokenizer_reason: str

    @property
    def raw(self) -> dict[str, Any]:
        return self.config.raw

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json; {} where it is absent or no object, which the tokenizer's loader tells."""
        try:
            value = json.loads((self.path / "tokenizer_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    @cached_property
    def template_file(self) -> str | None:
        path = self.path / "chat_template.jinja"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None

    @property
    def chat_template_in(self) -> tuple[str, ...]:
        """The files that hold a chat template."""
        found = {
            "chat_template.jinja": self.template_file is not None,
            "tokenizer_config.json": bool(self.tokenizer_config.get("chat_template")),
        }
        return tuple(name for name, is_there in found.items() if is_there)

    @cached_property
    def eos_by_source(self) -> dict[str, tuple[int, ...]]:
        """Returns {file: EOS ids that it names}, without files that name none."""
        own = self.tokenizer.eos_token_id if self.tokenizer else None
        found = {
            "generation_config.json": _ids(self.generation.get("eos_token_id")),
            "config.json": _ids(self.raw.get("eos_token_id")),
            "tokenizer": _ids(own),
        }
        return {source: ids for source, ids in found.items() if ids}


def find_problems(folder: Folder) -> Iterator[Finding]:
    """Yields the findings, file by file."""
    yield from _weight_files(folder)
    yield from _head(folder)
    yield from _config_keys(folder)
    yield from _vocabulary(folder)
    yield from _template(folder)
    yield from _stop_tokens(folder)
    yield from _permissions(folder)


def token_text(tokenizer: Tokenizer | None, id: int) -> str:
    """Returns a token's text, `\\xNN` for bytes that are a part of a character; "" where there is no such token."""
    return "" if tokenizer is None else tokenizer.token_bytes(id).decode("utf-8", errors="backslashreplace")


def _warning(kind: str, message: str) -> Finding:
    return Finding(kind=kind, severity="warning", message=message)


def _note(kind: str, message: str) -> Finding:
    return Finding(kind=kind, severity="note", message=message)


def _weight_files(folder: Folder) -> Iterator[Finding]:
    stored = folder.stored
    if stored.missing_files:
        yield _warning(
            "weight-file-missing",
            f"{INDEX} names {_some(stored.missing_files)}, not in the folder; download it again.",
        )
    if stored.index is not None:
        held = {name for name, tensor in stored.tensors.items()}
        ghosts = [n for n, file in stored.index.items() if file in stored.files and n not in held]
        unlisted = sorted(held - set(stored.index))
        moved = [n for n, file in stored.index.items() if n in held and stored.tensors[n].file != file]
        fix = "save the folder again (load and save with transformers or Shardline), which writes a new index."
        if ghosts:
            yield _warning(
                "index-entry-without-tensor",
                f"{INDEX} lists {_some(ghosts)}, but the file named does not hold it; {fix}",
            )
        if unlisted:
            yield _warning(
                "tensor-without-index-entry",
                f"The files hold {_some(unlisted)} without an entry in {INDEX}: readers of the index never load it "
                f"and llama.cpp's converter stops; {fix}",
            )
        if moved:
            where = stored.tensors[moved[0]].file
            yield _warning(
                "index-names-wrong-file",
                f"{INDEX} says that {moved[0]} is in {stored.index[moved[0]]}, but {where} holds it; {fix}",
            )
    if stored.index is not None and "model.safetensors" in stored.other_files:
        yield _warning(
            "two-sets-of-weights",
            f"Both model.safetensors and {INDEX} are there: transformers reads the first, Shardline and others the "
            "shards of the second; delete the one that is stale.",
        )
    others = [name for name in stored.other_files if name != "model.safetensors" or stored.index is None]
    if others:
        yield _note(
            "further-weight-files",
            f"{_some(others)} is not part of the model as its index describes it; servers that load every .safetensors "
            "file read it too: move it out of the folder if it is not needed.",
        )
    for file, kind in stored.formats.items():
        if kind is None:
            yield _warning(
                "no-format-in-header",
                f"{file} does not say metadata format = 'pt' in its header, which transformers 4 refuses to load; save "
                'it again with metadata={"format": "pt"}.',
            )
    yield from _sizes(folder)


def _sizes(folder: Folder) -> Iterator[Finding]:
    tensors = folder.stored.tensors
    buffers = tuple(f".{ending}" for ending in family_of(folder.config.family).skipped)  # not GPT-2's c_attn.bias
    spare = {name for name in tensors if name.endswith(buffers)}
    if folder.config.tie_word_embeddings:
        spare |= {name for name in tensors if name.endswith(_HEADS)}
    count = sum(tensor.num_elements for name, tensor in tensors.items() if name not in spare)
    lacks_head = not folder.config.tie_word_embeddings and _find(tensors, _HEADS) is None
    if count != folder.num_parameters and not lacks_head and not folder.stored.missing_files:
        yield _warning(
            "parameters-differ",
            f"The files hold {count:,} parameters, but config.json describes a model of {folder.num_parameters:,}; "
            "they belong to different models or tensors are missing: take config.json and the weights from one place.",
        )


def _head(folder: Folder) -> Iterator[Finding]:
    tensors, tied = folder.stored.tensors, folder.config.tie_word_embeddings
    head, embedding = _find(tensors, _HEADS), _find(tensors, _EMBEDDINGS)
    if not tied and head is None and not folder.stored.missing_files:
        yield _warning(
            "untied-without-head",
            "config.json says tie_word_embeddings = false, but the files hold no lm_head.weight: some runtimes tie "
            "them in silence, others start with a random head; set it to true only if the model was trained with tied "
            "embeddings, otherwise get the missing tensor.",
        )
    if not tied or head is None or embedding is None:
        return
    if same_values(folder.path, tensors[head], head, tensors[embedding], embedding):
        yield _note(
            "tied-head-stored",
            f"config.json says tie_word_embeddings = true, and {head} is stored all the same, equal to {embedding}; it "
            "costs its size on disk, and saving the folder again leaves it out.",
        )
    else:
        yield _warning(
            "tied-head-differs",
            f"config.json says tie_word_embeddings = true, but {head} is stored and differs from {embedding}: "
            "runtimes that tie drop it and those that load it answer otherwise; set tie_word_embeddings to false if "
            "the head was trained apart, or delete the tensor.",
        )


def _config_keys(folder: Folder) -> Iterator[Finding]:
    raw, rope = folder.raw, folder.config.rope
    old = [key for key in _OLD_ROPE if raw.get(key) is not None]
    new = raw.get("rope_parameters")
    stretched = rope.kind != "default"
    plain = rope.theta == 10000.0 and not stretched  # then what a reader falls back to is right
    shown = f"theta {rope.theta:g}" + (f" and {rope.kind} scaling by {rope.factor:g}" if stretched else "")
    if new and not old and not plain:
        yield _warning(
            "rope-in-new-keys-only",
            f"config.json has its rope ({shown}) in rope_parameters only: readers older than transformers 5 fall back "
            "to theta 10000 without scaling, in silence; add rope_theta and rope_scaling too (Shardline writes both).",
        )
    if old and not new and not plain:
        yield _note(
            "rope-in-old-keys-only",
            f"config.json has its rope ({shown}) in {' and '.join(old)} only: readers of rope_parameters alone miss "
            "it; add rope_parameters too (Shardline writes both).",
        )
    dtypes = {key: raw[key] for key in ("dtype", "torch_dtype") if raw.get(key) is not None}
    if len(dtypes) == 1:
        ((key, value),) = dtypes.items()
        other, reader = (
            ("torch_dtype", "older than transformers 4.56") if key == "dtype" else ("dtype", "of the new key")
        )
        say = _warning if key == "dtype" and value != "float32" else _note
        yield say(
            "dtype-in-one-key-only",
            f"config.json has {key} = {value!r} and no {other}: readers {reader} load fp32 instead; add {other}.",
        )
    largest = next(iter(folder.stored.elements_by_dtype))
    wrong = {key: value for key, value in dtypes.items() if str(value).removeprefix("torch.") != largest}
    if wrong:
        key, value = next(iter(wrong.items()))
        yield _warning(
            "dtype-differs",
            f"config.json says {key} = {value!r}, but the files hold {largest}: servers convert on load, and float16 "
            f"overflows where bfloat16 doesn't; set {' and '.join(wrong)} to {largest!r}.",
        )


def _vocabulary(folder: Folder) -> Iterator[Finding]:
    if folder.tokenizer is None:
        yield _warning("tokenizer-unreadable", folder.tokenizer_reason)
        return
    rows, tokens = folder.config.vocab_size, folder.tokenizer.vocab_size
    if tokens > rows:
        yield _warning(
            "tokenizer-larger-than-vocabulary",
            f"The tokenizer has ids up to {tokens - 1}, but the embedding has {rows} rows: a text with such a token "
            "crashes the model; take the tokenizer that belongs to it, or resize the embedding.",
        )
    elif tokens < rows:
        yield _note(
            "padded-vocabulary",
            f"The embedding has {rows} rows for {tokens} tokens: {rows - tokens} ids have no text, so that a sampled "
            "one prints nothing, and converters that cut the vocabulary change the shapes; mask ids from "
            f"{tokens} on where a runtime doesn't.",
        )


def _template(folder: Folder) -> Iterator[Finding]:
    inside, file = folder.tokenizer_config.get("chat_template"), folder.template_file
    if not folder.chat_template_in:
        if folder.tokenizer is not None:
            yield _note(
                "template-missing",
                "There is no chat template: servers refuse chats or make up a format; if the model was trained on "
                "chats, save its template as chat_template.jinja, otherwise use plain completions.",
            )
    elif file is None:
        yield _note(
            "template-in-tokenizer-config-only",
            "The chat template is only in tokenizer_config.json, and not in chat_template.jinja, where transformers 5 "
            "writes it; readers of that file alone see none: write it there too (Shardline saves both).",
        )
    elif not inside:
        yield _warning(
            "template-in-jinja-file-only",
            "The chat template is only in chat_template.jinja: runtimes that read tokenizer_config.json see none; put "
            "it there as chat_template too (Shardline saves both).",
        )
    elif isinstance(inside, str) and inside.strip() != file.strip():
        yield _warning(
            "templates-differ",
            "chat_template.jinja and tokenizer_config.json hold different chat templates, so that runtimes write "
            "different prompts; keep the one that the model was trained with in both.",
        )
    yield from _double_bos(folder)


def _double_bos(folder: Folder) -> Iterator[Finding]:
    rendered = _rendered(folder, [{"role": "user", "content": "Hello"}])
    tokenizer = folder.tokenizer
    if tokenizer is None or rendered is None or tokenizer.bos_token_id is None:
        return
    bos = tokenizer.bos_token_id
    shown = f"{token_text(tokenizer, bos)} ({bos})"
    if tokenizer.encode(rendered)[:2] == [bos, bos]:
        yield _warning(
            "double-bos", f"The chat template writes the BOS {shown} twice itself; delete one from the template."
        )
    elif tokenizer.encode(rendered, add_special_tokens=True)[:2] == [bos, bos]:
        yield _warning(
            "double-bos",
            f"The chat template writes the BOS {shown}, and the tokenizer adds another: a runtime that renders the "
            "chat to text and encodes that with special tokens sends two; encode rendered chats with "
            "add_special_tokens = false (Shardline does).",
        )


def _stop_tokens(folder: Folder) -> Iterator[Finding]:
    sources = folder.eos_by_source
    if not sources:
        yield _warning(
            "no-eos", "No file names an EOS token, so that replies run to the limit; set eos_token_id in config.json."
        )
    end = _end_of_turn(folder)
    if end is None or folder.tokenizer is None:
        return
    source = next((name for name in ("generation_config.json", "config.json") if name in sources), None)
    listed = sources.get(source, ()) if source else ()
    if end not in listed:
        has = f"{source} has eos_token_id = {list(listed)}" if source else "no config file names an EOS"
        yield _warning(
            "end-of-turn-is-no-eos",
            f"The chat template ends a turn with {token_text(folder.tokenizer, end)} ({end}), but {has}: servers go on "
            f"past the end of a reply; set eos_token_id in generation_config.json to {sorted({*listed, end})}.",
        )


def _end_of_turn(folder: Folder) -> int | None:
    """The first special token after an assistant's words, as the template writes them; None where it writes none."""
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER}]
    rendered = _rendered(folder, messages)
    if rendered is None or _ANSWER not in rendered or folder.tokenizer is None:
        return None
    after = folder.tokenizer.encode(rendered.rpartition(_ANSWER)[2])
    return next((id for id in after if folder.tokenizer.is_special(id)), None)


def _rendered(folder: Folder, messages: list[dict[str, Any]]) -> str | None:
    if folder.tokenizer is None or not folder.tokenizer.has_chat_template:
        return None
    try:
        return folder.tokenizer.render_chat(messages, add_generation_prompt=False)
    except UsageError:  # a template may insist on other roles, which is its right
        return None


def _permissions(folder: Folder) -> Iterator[Finding]:
    if os.name != "posix":
        return
    others = stat.S_IRGRP | stat.S_IROTH
    closed = sorted(path.name for path in folder.path.iterdir() if path.is_file() and not path.stat().st_mode & others)
    if closed:
        mode = stat.S_IMODE((folder.path / closed[0]).stat().st_mode)
        yield _warning(
            "files-for-their-owner-only",
            f"{_some(closed)} has mode {mode:04o}, so that a server under another user can't read it; run: "
            f"chmod a+r {folder.path}/*",
        )


def _find(tensors: dict[str, StoredTensor], endings: tuple[str, ...]) -> str | None:
    return next((name for name in tensors if name.endswith(endings) and ".layers." not in name), None)


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(id for id in values if isinstance(id, int))


def _some(names: tuple[str, ...] | list[str]) -> str:
    """`a`, or `a and 3 more`."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
