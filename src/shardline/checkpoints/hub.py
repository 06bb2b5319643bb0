"""Models of the Hugging Face hub by name, wherever a folder is accepted: `hf://ORG/NAME` or `hf://ORG/NAME@REVISION`.

    folder = resolve("hf://HuggingFaceTB/SmolLM2-135M-Instruct")     # downloaded into the hub's own cache
    folder = resolve("path/to/folder")                              # a local folder is itself
    resolve(name, patterns=CONFIG_FILES)                            # without the weights

Only data is fetched: JSON, safetensors, Jinja and vocabularies; never code and never pickles. huggingface_hub does the
work, so that its cache, its login, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE count. A model that can be opened only with
code of its own is refused, local or not. Every failure is a `ShardlineError` that says what to do next.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from shardline.config.errors import ShardlineError, UsageError

__all__ = ["CONFIG_FILES", "MODEL_FILES", "TOKENIZER_FILES", "hub_name", "is_hub_name", "pin", "resolve"]

CONFIG_FILES = ("*.json",)
TOKENIZER_FILES = (*CONFIG_FILES, "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors")
# Other frameworks' copies lie in subfolders; `consolidated` is a second copy of the weights under other names.
_IGNORED = ("*/*", "consolidated*.safetensors")

_SCHEME = "hf://"
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"(?P<name>{_WORD}/{_WORD})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?")


def is_hub_name(place: str | Path) -> bool:
    """True for `hf://...`, also after a `Path` has made one slash of two."""
    return str(place).startswith((_SCHEME, "hf:/"))


def hub_name(place: str | Path) -> tuple[str, str | None]:
    """Returns (ORG/NAME, revision or None) of an `hf://` name; raises `UsageError` for one that is malformed."""
    match = _NAME.fullmatch(re.sub(r"^hf:/+", "", str(place)))
    if match is None or ".." in str(place):
        raise UsageError(f"{place} is not a name on the hub; write hf://ORG/NAME or hf://ORG/NAME@REVISION.")
    return match["name"], match["revision"]


def resolve(place: str | Path, *, patterns: tuple[str, ...] = MODEL_FILES) -> Path:
    """Returns the local folder that `place` means; downloads what of `patterns` is not in the hub's cache yet.

    A local path is returned as it is, whether it exists or not: who reads it says what is missing.
    """
    folder = Path(_download(place, patterns)) if is_hub_name(place) else Path(place)
    _refuse_remote_code(folder, str(place))
    return folder


def pin(place: str, *, patterns: tuple[str, ...] = MODEL_FILES) -> str:
    """Downloads `place` and returns it with the commit as its revision, so that others get the same files.

    A local path is returned as it is.
    """
    if not is_hub_name(place):
        return place
    return f"{_SCHEME}{hub_name(place)[0]}@{resolve(place, patterns=patterns).name}"


def _download(place: str | Path, patterns: tuple[str, ...]) -> str:
    name, revision = hub_name(place)
    shown = f"{_SCHEME}{name}" + (f"@{revision}" if revision else "")
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError:
        raise ShardlineError(f"{shown} needs huggingface_hub; run: pip install 'shardline[hub]'") from None
    page = f"{constants.ENDPOINT}/{name}"
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_IGNORED)
        )
    except errors.GatedRepoError:
        raise ShardlineError(
            f"{shown} is gated: ask for access at {page}, then run `hf auth login` (or set HF_TOKEN) and try again."
        ) from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"{shown} does not exist on the hub, or is private; check the spelling at {page}, and run `hf auth login` "
            "(or set HF_TOKEN) if it is private."
        ) from None
    except errors.RevisionNotFoundError:
        raise UsageError(
            f"{shown}: there is no revision {revision!r}; choose a branch, tag or commit of {page}/commits/main."
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise ShardlineError(f"{shown} {_why_not_there(error, offline=constants.is_offline_mode())}") from None
    except Exception as error:  # the network's edge: httpx, xet and the disk each raise their own
        text = " ".join(str(error).split())[:300]
        raise ShardlineError(
            f"{shown} could not be downloaded ({type(error).__name__}: {text}); what is complete is kept, run it again."
        ) from error
    if "*.safetensors" in patterns and not any(Path(folder).glob("*.safetensors")):
        raise ShardlineError(
            f"{shown} has no .safetensors weights; .bin files are pickles, which Shardline doesn't download: choose a "
            "revision or a copy of the model that has safetensors (the hub's convert space can make one)."
        )
    return folder


def _why_not_there(error: Exception, *, offline: bool) -> str:
    if offline:
        return "is not complete in the hub's cache and HF_HUB_OFFLINE is set; unset it, or pass a local folder."
    cause = " ".join(str(error.__cause__ or error).split())[:200]
    return (
        f"is not complete in the hub's cache, and the hub did not give it ({cause}); check the network or HF_ENDPOINT "
        "and run it again (what has arrived is kept), or download it elsewhere (`hf download`) and pass the folder."
    )


def _refuse_remote_code(folder: Path, shown: str) -> None:
    """Raises `UsageError` when config.json names code of the folder's for a family that isn't ours."""
    from shardline.models.families import FAMILIES

    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # who reads the folder says what is wrong with it
    if isinstance(raw, dict) and raw.get("auto_map") and raw.get("model_type") not in FAMILIES:
        code = next(iter(raw["auto_map"].values())) if isinstance(raw["auto_map"], dict) else raw["auto_map"]
        raise UsageError(
            f"{shown} (model_type {raw.get('model_type')!r}) needs code from the folder ({code}), which Shardline "
            f"never runs; choose a model whose model_type is one of {', '.join(sorted(FAMILIES))}."
        )
