"""What a folder's weight files hold, by their headers alone: names, dtypes, shapes. No weight is loaded.

    stored = read_stored(folder)
    stored.tensors["model.norm.weight"].dtype       # "bfloat16"
    stored.index                                    # {tensor: file} of the index; None where there is no index

Unlike a load, this goes on where index and files disagree: `inspect` is there to say so.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from shardline.config import ShardlineError

__all__ = ["INDEX", "StoredTensor", "StoredWeights", "read_stored", "same_values"]

INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """files: names that exist, the ones that the index names (or the single file); formats: what each header says it
    was written for ("pt"), None where it doesn't; missing_files: named by the index and not there."""

    tensors: dict[str, StoredTensor]
    files: tuple[str, ...]
    formats: dict[str, str | None]
    index: dict[str, str] | None
    missing_files: tuple[str, ...]
    other_files: tuple[str, ...]

    @property
    def elements_by_dtype(self) -> dict[str, int]:
        """Returns {dtype: number of elements}, the largest first."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.num_elements
        return dict(sorted(counts.items(), key=lambda item: -item[1]))


def read_stored(folder: Path) -> StoredWeights:
    """Reads the headers of a folder's safetensors files; `ShardlineError` for a damaged one, or where there is none."""
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    index = _read_index(folder / INDEX)
    named = [_SINGLE] if index is None else sorted(set(index.values()))
    files = [name for name in named if name in present]
    if not files:
        wanted = f"none of the files that {INDEX} names" if index is not None else f"no {_SINGLE} and no {INDEX}"
        raise ShardlineError(f"{folder} holds {wanted}; download it again, or save its weights as safetensors first.")
    tensors: dict[str, StoredTensor] = {}
    formats: dict[str, str | None] = {}
    for name in files:
        try:
            with safe_open(folder / name, framework="pt") as archive:
                formats[name] = (archive.metadata() or {}).get("format")
                for key in archive.keys():  # noqa: SIM118
                    view = archive.get_slice(key)
                    dtype = str(view.get_dtype())
                    shape = tuple(view.get_shape())
                    tensors[key] = StoredTensor(file=name, dtype=_DTYPES.get(dtype, dtype.lower()), shape=shape)
        except (SafetensorError, OSError) as error:
            raise ShardlineError(f"{folder / name} is truncated or damaged ({error}); copy it again.") from None
    return StoredWeights(
        tensors=tensors,
        files=tuple(files),
        formats=formats,
        index=index,
        missing_files=tuple(name for name in named if name not in present),
        other_files=tuple(name for name in present if name not in files),
    )


def same_values(folder: Path, first: StoredTensor, first_name: str, second: StoredTensor, second_name: str) -> bool:
    """Returns whether two stored matrices are equal number for number, reading a few thousand rows at a time."""
    if first.shape != second.shape:
        return False
    with (
        safe_open(folder / first.file, framework="pt") as one,
        safe_open(folder / second.file, framework="pt") as two,
    ):
        ours, theirs = one.get_slice(first_name), two.get_slice(second_name)
        return all(
            bool((ours[row : row + _ROWS_AT_A_TIME] == theirs[row : row + _ROWS_AT_A_TIME]).all())
            for row in range(0, first.shape[0], _ROWS_AT_A_TIME)
        )


def _read_index(path: Path) -> dict[str, str] | None:
    if not path.exists():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ShardlineError(f"{path} can't be read or has no weight_map; copy it again.") from None
    names = weight_map.values() if isinstance(weight_map, dict) else [None]
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise ShardlineError(f"{path} names the file {outside[0]!r}, which is not inside the folder.")
    return weight_map
