"""LoRA adapters in PEFT's folder format (Hu et al., 2021, arXiv:2106.09685), several of them in one batch.

    adapters = Adapters(decoder, {"poems": "path/to/adapter"})
    with adapters.active(["poems", None, None]):            # the adapter of each row of the step
        x_TD = decoder.hidden_states(...)

An adapter adds scale * B (A x) to linear maps of the decoder. It sits beside them (forward hooks), so the decoder's
code and weights are those without adapters; in a step, the rows of each adapter are gathered, go through its two small
maps, and are added where they belong. Names and fused matrices of families are resolved by the table that loads their
weights.

Shapes: T rows of a step, R rank, N outputs, K inputs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from shardline.config.errors import ShardlineError, UsageError, nearest
from shardline.kernels import Linear, linear
from shardline.models.config import DecoderConfig
from shardline.models.decoder import Decoder
from shardline.models.families import TensorRule, family_of

__all__ = ["Adapters", "read_adapter"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."

# What of adapter_config.json does not change what an adapter computes, or is read below.
_READ = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "peft_type", "init_lora_weights"}
_HARMLESS = {
    "alpha",
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",  # the file holds the matched modules by name
    "task_type",
}
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # the base weights stay what they were

Pair = tuple[Tensor, Tensor]  # A [R, K], scale * B [N, R]


class Adapters:
    """Adapters by name, attached to one decoder."""

    def __init__(self, decoder: Decoder, folders: Mapping[str, str | Path]) -> None:
        dtype = next(decoder.parameters()).dtype
        self._pairs: dict[str, dict[str, Pair]] = {}
        for name, folder in folders.items():
            found = read_adapter(folder, decoder.config)
            _check_shapes(Path(folder), found, decoder)
            self._pairs[name] = {place: (a.to(dtype), b.to(dtype)) for place, (a, b) in found.items()}
        self._groups: list[tuple[dict[str, Pair], Tensor | None]] = []
        for place in {place for pairs in self._pairs.values() for place in pairs}:
            decoder.get_submodule(place).register_forward_hook(self._hook(place))

    @property
    def names(self) -> list[str]:
        return list(self._pairs)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for pairs in self._pairs.values() for pair in pairs.values() for tensor in pair)

    @contextmanager
    def active(self, names_T: Sequence[str | None]) -> Generator[None]:
        """Inside, row t of what the decoder computes goes through adapter names_T[t]; None: through none."""
        for name in {name for name in names_T if name is not None}:
            rows = [row for row, each in enumerate(names_T) if each == name]
            self._groups.append((self._pairs[name], None if len(rows) == len(names_T) else torch.tensor(rows)))
        try:
            yield
        finally:
            self._groups = []

    def _hook(self, place: str) -> Any:
        def add(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
            if not self._groups:
                return out
            x_TK, out_TN = inputs[0].flatten(0, -2), out.flatten(0, -2)
            for pairs, rows in self._groups:
                if place not in pairs:
                    continue
                a_RK, b_NR = pairs[place]
                part = x_TK if rows is None else x_TK.index_select(0, rows)
                delta = linear(linear(part, a_RK), b_NR)
                out_TN = out_TN + delta if rows is None else out_TN.index_add(0, rows, delta)
            return out_TN.view_as(out)

        return add


def read_adapter(folder: str | Path, config: DecoderConfig) -> dict[str, Pair]:
    """Returns {name of the decoder's linear map: (A, scale * B)}, fp32.

    Raises `UsageError` for what is no adapter of such a model, or asks for what is not supported.
    """
    folder = Path(folder)
    described = _read_config(folder)
    rules = {rule.theirs: rule for rule in family_of(config.family).tensors(config)}
    pairs: dict[str, Pair] = {}
    for module, (a_RK, b_NR) in _read_tensors(folder).items():
        rule = rules.get(f"{module}.weight")
        if rule is None:
            raise UsageError(
                f"{folder}: the adapter changes {module}, which this {config.family} model does not have"
                f"{nearest(module, [name.removesuffix('.weight') for name in rules])}"
            )
        if len(a_RK) != b_NR.shape[1]:
            raise UsageError(f"{folder}: lora_A of {module} has rank {len(a_RK)}, and lora_B {b_NR.shape[1]}.")
        scaled = b_NR * _scale(described, module, rank=len(a_RK))
        for ours, part in zip(rule.ours, _parts(rule, scaled, config), strict=True):
            pairs[ours.removesuffix(".weight")] = a_RK, part
    return pairs


def _parts(rule: TensorRule, b_NR: Tensor, config: DecoderConfig) -> tuple[Tensor, ...]:
    """B has the outputs as its rows, also where a family's file has its weights the other way round."""
    return dataclasses.replace(rule.op, transposed=False).load(b_NR, config)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        described = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{folder} has no {CONFIG}; pass the folder that PEFT's save_pretrained wrote.") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder / CONFIG} can't be read as JSON ({error}).") from None
    if not isinstance(described, dict) or described.get("peft_type") != "LORA":
        kind = described.get("peft_type") if isinstance(described, dict) else type(described).__name__
        raise UsageError(f"{folder}: peft_type is {kind!r}; only LORA adapters are served.")
    refused = {key: value for key, value in described.items() if value and key not in _READ | _HARMLESS}
    if described.get("bias", "none") != "none":
        refused["bias"] = described["bias"]
    if described.get("init_lora_weights") not in _PLAIN_STARTS:
        refused["init_lora_weights"] = described["init_lora_weights"]
    if refused:
        key, value = next(iter(refused.items()))
        raise UsageError(
            f"{folder}: the adapter has {key} = {value!r}, which is not supported; merge it into its model with PEFT's "
            "merge_and_unload and serve that."
        )
    return described


def _read_tensors(folder: Path) -> dict[str, Pair]:
    """Returns {the model's own module name: (A, B)}."""
    try:
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError:
        raise UsageError(f"{folder} has no {WEIGHTS}; save the adapter with safe_serialization=True.") from None
    except SafetensorError as error:
        raise ShardlineError(f"{folder / WEIGHTS} is truncated or damaged ({error}); copy it again.") from None
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.+)\.lora_(A|B)\.weight", name.removeprefix(_PREFIX))
        if found is None or tensor.ndim != 2:
            raise UsageError(
                f"{folder}: the adapter has a tensor {name}, which is not supported; only lora_A and lora_B are."
            )
        halves.setdefault(found[1], {})[found[2]] = tensor.float()
    for module, pair in halves.items():
        if len(pair) != 2:
            raise ShardlineError(f"{folder}: {module} has lora_{next(iter(pair))} alone; the file is incomplete.")
    if not halves:
        raise UsageError(f"{folder / WEIGHTS} holds no tensor.")
    return {module: (pair["A"], pair["B"]) for module, pair in halves.items()}


def _scale(described: Mapping[str, Any], module: str, *, rank: int) -> float:
    """Returns alpha / rank, or alpha / sqrt(rank) with rslora (Kalajdzievski, 2023, arXiv:2312.03732)."""
    alpha = described.get("lora_alpha", 8)
    for pattern, value in (described.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):  # as PEFT reads it: the first that fits the name's end
            alpha = value
            break
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise UsageError(f"The adapter's lora_alpha = {alpha!r} must be a number.")
    return alpha / math.sqrt(rank) if described.get("use_rslora") else alpha / rank


def _check_shapes(folder: Path, pairs: Mapping[str, Pair], decoder: Decoder) -> None:
    for place, (a_RK, b_NR) in pairs.items():
        module = decoder.get_submodule(place)
        if not isinstance(module, Linear) or place == "lm_head" or ".experts." in place or place.endswith(".router"):
            raise UsageError(
                f"{folder}: the adapter changes {place}; only the linear maps of attention and of feed-forwards "
                "without experts can be changed while serving."
            )
        if (b_NR.shape[0], a_RK.shape[1]) != (module.out_features, module.in_features):
            raise UsageError(
                f"{folder}: the adapter maps {a_RK.shape[1]} to {b_NR.shape[0]} numbers at {place}, but the model "
                f"{module.in_features} to {module.out_features}; the adapter belongs to another model."
            )
