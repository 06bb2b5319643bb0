"""What is wrong with a model folder, heading by heading, as the doctor says it.

    path, checks = examine_folder("path/to/model")
    for check in checks: print(check.verdict, check.name, check.reason, check.fix)

What `inspection` finds becomes a verdict here; besides, a folder that can't be inspected at all is still looked at as
far as that goes. Pickle files and a folder's own code are named as the risks that they are, and never loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardline.checkpoints.inspection import SAMPLE, Inspection, inspect_folder
from shardline.checkpoints.native import find_model_folder
from shardline.config import ShardlineError, UsageError
from shardline.hardware.checks import Check, Verdict
from shardline.text.tokenizer import Tokenizer

__all__ = ["LINE_OF", "examine_folder"]

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".pdparams")
"""Formats whose readers run what the file says."""

# The heading of each finding of `checkpoints.portability`.
LINE_OF = {
    "weight-file-missing": "files",
    "index-entry-without-tensor": "index",
    "tensor-without-index-entry": "index",
    "index-names-wrong-file": "index",
    "two-sets-of-weights": "files",
    "further-weight-files": "files",
    "no-format-in-header": "files",
    "parameters-differ": "config",
    "untied-without-head": "head",
    "tied-head-stored": "head",
    "tied-head-differs": "head",
    "rope-in-new-keys-only": "config",
    "rope-in-old-keys-only": "config",
    "dtype-in-one-key-only": "dtype",
    "dtype-differs": "dtype",
    "tokenizer-unreadable": "tokenizer",
    "tokenizer-larger-than-vocabulary": "tokenizer",
    "padded-vocabulary": "tokenizer",
    "template-missing": "template",
    "template-in-tokenizer-config-only": "template",
    "template-in-jinja-file-only": "template",
    "templates-differ": "template",
    "double-bos": "bos",
    "no-eos": "eos",
    "end-of-turn-is-no-eos": "eos",
    "files-for-their-owner-only": "files",
}
# Findings with which the model does not load, or computes something else.
_FAILS = {
    "weight-file-missing",
    "index-entry-without-tensor",
    "index-names-wrong-file",
    "parameters-differ",
    "untied-without-head",
    "tokenizer-larger-than-vocabulary",
    "tokenizer-unreadable",
    "no-eos",
}
_ORDER = ("files", "index", "config", "head", "dtype", "tokenizer", "template", "bos", "eos", "safety")


def examine_folder(place: str | Path) -> tuple[Path, tuple[Check, ...]]:
    """Returns the folder that `place` means, and its checks; `UsageError` where there is no folder to look at."""
    path = _find(place)
    found: list[Check] = [*_safety(path)]
    facts: dict[str, str] = {}
    try:
        inspection = inspect_folder(path)
    except ShardlineError as error:
        line = "config" if isinstance(error, UsageError) else "files"
        found.append(_check(line, "fail", str(error), kind="unreadable"))
        found += _template(path)
    else:
        if inspection.chat is not None and inspection.chat_template_in and inspection.chat.text == SAMPLE:
            found += _template(path)  # it was not rendered; to load the tokenizer again takes half a second
        facts = _facts(inspection)
        for finding in inspection.findings:
            verdict: Verdict = "ok" if finding.severity == "note" else "warn"
            verdict = "fail" if finding.kind in _FAILS else verdict
            found.append(_check(LINE_OF.get(finding.kind, "files"), verdict, finding.message, kind=finding.kind))
    return path, tuple(_in_order(found, facts))


def _find(place: str | Path) -> Path:
    try:
        return find_model_folder(place)
    except UsageError:
        if str(place).startswith("hf://"):
            raise  # says what is wrong with the name
        path = Path(place)
        if path.is_dir() and any(file.suffix in (*PICKLES, ".safetensors", ".json") for file in path.iterdir()):
            return path  # a model's folder, or the rest of one
        if not path.exists():
            raise UsageError(
                f"There is no {place}; pass a model folder, a checkpoint, a run or hf://ORG/NAME."
            ) from None
        raise


def _in_order(found: list[Check], facts: dict[str, str]) -> Iterator[Check]:
    import dataclasses

    rank = {"fail": 0, "warn": 1, "ok": 2}
    for line in _ORDER:
        checks = sorted((check for check in found if check.name == line), key=lambda check: rank[check.verdict])
        if not checks and line in facts:
            yield Check(name=line, verdict="ok", facts=facts[line])
        for check in checks:
            yield dataclasses.replace(check, facts=check.facts or facts.get(line, ""))


def _check(line: str, verdict: Verdict, message: str, *, kind: str) -> Check:
    """A finding's message says what is wrong and, after its last semicolon, what to do."""
    reason, _, fix = message.rstrip().removesuffix(".").rpartition("; ")
    reason, fix = (reason, f"{fix[:1].upper()}{fix[1:]}.") if reason else (fix, "")
    return Check(name=line, verdict=verdict, facts="", reason=reason, fix=fix, rule=kind)


def _facts(found: Inspection) -> dict[str, str]:
    def shown(id: int, text: str) -> str:
        return f"{text or '?'} ({id})"

    counts = found.stored_elements_by_dtype
    dtypes = ", ".join(f"{dtype} ({count:,})" if len(counts) > 1 else dtype for dtype, count in counts.items())
    ids = [id for id, _ in (found.chat.tokens if found.chat else ())]
    leading = next((number for number, id in enumerate(ids) if id != found.bos_token_id), len(ids))
    begins = {0: "without it", 1: "with it"}.get(leading, f"with {leading} of it")
    kind = "chat" if found.chat_template_in else "prompt"
    bos = "none" if found.bos_token_id is None else f"id {found.bos_token_id}; a {kind} begins {begins}"
    return {
        "files": f"{found.num_files} with {found.num_tensors} tensors",
        **({"index": f"lists all tensors of {found.num_files} files"} if found.num_files > 1 else {}),
        "config": f"{found.family}, {found.parameters.total:,} parameters, context {found.context_length:,}",
        "head": "tied to the embedding" if found.tied_head else "its own",
        "dtype": dtypes,
        "tokenizer": f"{found.tokenizer_size or 0:,} tokens for {found.vocab_size:,} rows",
        "template": f"in {' and '.join(found.chat_template_in)}" if found.chat_template_in else "none",
        "bos": bos,
        "eos": "; ".join(f"{shown(each.id, each.text)} from {', '.join(each.sources)}" for each in found.eos) or "none",
    }


def _template(path: Path) -> Iterator[Check]:
    """A template that is a broken program: nothing else says so, since a template may refuse some chats by right."""
    try:
        tokenizer = Tokenizer.load(path)
    except UsageError:
        return  # told by the inspection
    if not tokenizer.has_chat_template:
        return
    try:
        tokenizer.render_chat([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    except UsageError as error:
        reason = str(error).partition("rejects these messages: ")[2] or str(error)
        yield Check(
            name="template",
            verdict="fail",
            facts="",
            reason=f"the chat template does not render a chat of one user's message: {reason.rstrip('.')}",
            fix="Take chat_template.jinja again from where the model was published.",
            rule="template-fails",
        )


def _safety(path: Path) -> Iterator[Check]:
    pickles = sorted(file.name for file in path.iterdir() if file.is_file() and file.suffix in PICKLES)
    code = sorted(file.name for file in path.iterdir() if file.suffix == ".py")
    named = [name for name in ("config.json", "tokenizer_config.json") if _read(path / name).get("auto_map")]
    if pickles:
        alone = not any(path.glob("*.safetensors"))
        what = f"{pickles[0]}" + (f" and {len(pickles) - 1} more" if len(pickles) > 1 else "")
        yield Check(
            name="safety",
            verdict="fail" if alone else "warn",
            facts="",
            reason=f"{what} can run any code when it is loaded; nothing of Shardline opens it"
            + (", and the folder has no safetensors file" if alone else ""),
            fix="Download the safetensors revision, or convert the file where nothing can be lost (a container without "
            "network)."
            if alone
            else "Delete it: the safetensors files hold the weights.",
            rule="pickle",
        )
    if code or named:
        where = " and ".join(named) or code[0]
        yield Check(
            name="safety",
            verdict="warn",
            facts="",
            reason=f"{where} {'names' if named else 'is'} code of the model's author, which transformers runs under "
            "trust_remote_code; Shardline never runs it",
            fix="Read it before you trust it, or use a family that transformers has built in.",
            rule="own-code",
        )
    if not pickles and not code and not named:
        yield Check(name="safety", verdict="ok", facts="no pickle files, no code")


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
