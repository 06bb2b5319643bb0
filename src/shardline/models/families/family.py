"""What a family is: a table of config keys and a table of tensors, each read both ways, and what neither can say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardline.config import UsageError
from shardline.models.config import Activation, DecoderConfig
from shardline.models.families.ops import IDENTITY, Op
from shardline.models.families.rope_keys import read_rope, write_rope

__all__ = ["Family", "Key", "Row", "TensorRule", "expand", "take"]

# Each changes what the model computes. A family that understands one has it among its own keys; for all others only
# the value given here (or null) is the same as its absence, and anything else would serve a wrong model.
_MATHEMATICS: Mapping[str, Any] = {
    "quantization_config": None,
    "num_experts": 0,
    "num_local_experts": 0,
    "n_routed_experts": 0,
    "shared_expert_intermediate_size": 0,
    "kv_lora_rank": None,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "use_bidirectional_attention": False,
    "attention_bias": False,
    "mlp_bias": False,
    "qk_layernorm": False,
    "router_jitter_noise": 0.0,
}
_NEEDED = object()
_COMMON_KEYS = {
    "initializer_range": ("initializer_range", 0.02),
    "bos_token_id": ("bos_token_id", None),
    "pad_token_id": ("pad_token_id", None),
}

Key = str | tuple[str, Any]
"""Their key, and what it is where it is missing: a value, or a function of config.json (which null asks for too)."""


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """One tensor of a file: its name there, and what it becomes."""

    theirs: str
    ours: tuple[str, ...]
    op: Op = IDENTITY


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a tensor table: a module's name there and here, and whether it has a bias beside its weight."""

    theirs: str
    ours: tuple[str, ...]
    op: Op = IDENTITY
    bias: bool = False


def expand(rows: Iterable[Row], *, theirs: str = "", ours: str = "") -> Iterator[TensorRule]:
    """Yields the rules of a table's lines, names put behind the two prefixes."""
    for row in rows:
        for kind in ("weight", "bias") if row.bias else ("weight",):
            names = tuple(f"{ours}{name}.{kind}" for name in row.ours)
            yield TensorRule(theirs=f"{theirs}{row.theirs}.{kind}", ours=names, op=row.op)


@dataclass(frozen=True, kw_only=True)
class Family:
    """keys          our field -> their key, copied both ways
    fixed         our fields that are the same in every model of the family
    activations   their names for what the feed-forward computes, the default first, under `activation_key` (None: one
                  of `fixed`, said nowhere in the file)
    rope          None, or the family's defaults for `read_rope`
    read_rest     their config.json -> our fields that no table can give
    write_rest    our config -> their keys that no table can give
    understood    keys among `_MATHEMATICS` that `read_rest` takes care of
    required      further keys that change the mathematics, with the only value that is understood
    tensors       the tensors of a model, in the files' order
    skipped       endings of tensor names that hold no parameter
    """

    model_type: str
    architecture: str
    keys: Mapping[str, Key]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    activations: Mapping[str, Activation] = field(default_factory=dict)
    activation_key: str | None = "hidden_act"
    rope: Mapping[str, float] | None = None
    read_rest: Callable[[dict[str, Any]], dict[str, Any]] = lambda raw: {}
    write_rest: Callable[[DecoderConfig], dict[str, Any]] = lambda config: {}
    understood: frozenset[str] = frozenset()
    required: Mapping[str, Any] = field(default_factory=dict)
    tensors: Callable[[DecoderConfig], Iterable[TensorRule]]
    skipped: tuple[str, ...] = ("rotary_emb.inv_freq",)

    def read(self, raw: dict[str, Any]) -> DecoderConfig:
        """Returns our config; raises `UsageError` for a missing key or one that is not understood."""
        self._check_mathematics(raw)
        values = {ours: _read_key(raw, key) for ours, key in {**_COMMON_KEYS, **self.keys}.items()}
        eos = raw.get("eos_token_id")
        values["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        values |= {**self._read_activation(raw), **self.fixed}
        if self.rope is not None:
            values["rope"] = read_rope(raw, **self.rope)
        return DecoderConfig(family=self.model_type, raw=dict(raw), **(values | self.read_rest(raw)))

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        """Returns the keys of config.json that describe our config."""
        eos = config.eos_token_ids
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{
                theirs: _write_key(config.raw, getattr(config, ours), theirs, default)
                for ours, (theirs, default) in _normal({**_COMMON_KEYS, **self.keys}).items()
            },
            **self._write_activation(config),
            "eos_token_id": list(eos) if len(eos) > 1 else next(iter(eos), None),
            **self.required,
            **(write_rope(config.rope) if self.rope is not None else {}),
            **self.write_rest(config),
        }

    def _read_activation(self, raw: dict[str, Any]) -> dict[str, Activation]:
        if self.activation_key is None:
            return {}
        name = raw.get(self.activation_key) or next(iter(self.activations))
        if name not in self.activations:
            raise UsageError(
                f"config.json: {self.activation_key} = {name!r}; the {self.model_type} family computes "
                f"{', '.join(self.activations)}."
            )
        return {"activation": self.activations[name]}

    def _write_activation(self, config: DecoderConfig) -> dict[str, str]:
        if self.activation_key is None:
            return {}
        name = next(name for name, ours in self.activations.items() if ours == config.activation)
        return {self.activation_key: config.raw.get(self.activation_key) or name}

    def _check_mathematics(self, raw: dict[str, Any]) -> None:
        own = {*self.understood, *(theirs for theirs, _ in _normal(self.keys).values())}
        for key, neutral in {**_MATHEMATICS, **self.required}.items():
            if key not in own and raw.get(key) is not None and raw[key] != neutral:
                raise UsageError(
                    f"config.json: {key} = {raw[key]!r} changes what the model computes and is not understood for "
                    f"model_type {self.model_type!r}."
                )


def take(raw: dict[str, Any], key: str) -> Any:
    """Returns a key that the architecture can't do without."""
    if raw.get(key) is None:
        raise UsageError(f"config.json has no {key!r}, which the model_type {raw.get('model_type')!r} needs.")
    return raw[key]


def _normal(keys: Mapping[str, Key]) -> dict[str, tuple[str, Any]]:
    return {ours: (key, _NEEDED) if isinstance(key, str) else key for ours, key in keys.items()}


def _read_key(raw: dict[str, Any], key: Key) -> Any:
    theirs, default = (key, _NEEDED) if isinstance(key, str) else key
    if default is _NEEDED:
        return take(raw, theirs)
    if callable(default):
        return default(raw) if raw.get(theirs) is None else raw[theirs]
    return raw.get(theirs, default)


def _write_key(raw: dict[str, Any], value: Any, theirs: str, default: Any) -> Any:
    """A null that stood for what `default` computes stays a null."""
    if callable(default) and raw.get(theirs, value) is None and default(raw) == value:
        return None
    return value
