"""What a family is: a table of config keys, a table of tensors, and what neither can say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardline.config import UsageError
from shardline.models.config import Activation, DecoderConfig
from shardline.models.families.ops import IDENTITY, Op

__all__ = ["Family", "TensorRule", "eos_ids", "read_activation", "rule", "take", "write_eos"]

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


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """One tensor of a file: its name there, and what it becomes."""

    theirs: str
    ours: tuple[str, ...]
    op: Op = IDENTITY


def rule(theirs: str, *ours: str, op: Op = IDENTITY) -> TensorRule:
    """Returns a rule; without `ours` both names are the same."""
    return TensorRule(theirs=theirs, ours=ours or (theirs,), op=op)


@dataclass(frozen=True, kw_only=True)
class Family:
    """keys          our field -> their key, copied both ways; a key with a default in `defaults` may be missing
    fixed         our fields that are the same in every model of the family
    read_rest     their config.json -> more of our fields
    write_rest    our config -> more of their keys
    understood    keys among `_MATHEMATICS` that `read_rest` takes care of
    required      further keys that change the mathematics, with the only value that is understood
    tensors       the tensors of a model, in the files' order
    skipped       endings of tensor names that hold no parameter
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    read_rest: Callable[[dict[str, Any]], dict[str, Any]]
    write_rest: Callable[[DecoderConfig], dict[str, Any]]
    understood: frozenset[str] = frozenset()
    required: Mapping[str, Any] = field(default_factory=dict)
    tensors: Callable[[DecoderConfig], Iterable[TensorRule]]
    skipped: tuple[str, ...] = ("rotary_emb.inv_freq",)

    def read(self, raw: dict[str, Any]) -> DecoderConfig:
        """Returns our config; raises `UsageError` for a missing key or one that is not understood."""
        self._check_mathematics(raw)
        values: dict[str, Any] = {}
        for ours, theirs in self.keys.items():
            value = raw.get(theirs)
            if value is None:
                value = self.defaults[ours] if ours in self.defaults else take(raw, theirs)
            values[ours] = value
        values |= {
            **self.fixed,
            "initializer_range": raw.get("initializer_range", 0.02),
            "bos_token_id": raw.get("bos_token_id"),
            "eos_token_ids": eos_ids(raw.get("eos_token_id")),
            "pad_token_id": raw.get("pad_token_id"),
        }
        return DecoderConfig(family=self.model_type, raw=dict(raw), **(values | self.read_rest(raw)))

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        """Returns the keys of config.json that describe our config."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{theirs: getattr(config, ours) for ours, theirs in self.keys.items()},
            "initializer_range": config.initializer_range,
            "bos_token_id": config.bos_token_id,
            "eos_token_id": write_eos(config.eos_token_ids),
            "pad_token_id": config.pad_token_id,
            **self.required,
            **self.write_rest(config),
        }

    def _check_mathematics(self, raw: dict[str, Any]) -> None:
        own = {*self.keys.values(), *self.understood}
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


def read_activation(raw: dict[str, Any], key: str, allowed: Mapping[str, Activation]) -> Activation:
    """Returns the activation that `key` names; `allowed` are the family's, its default first."""
    name = raw.get(key) or next(iter(allowed))
    if name not in allowed:
        raise UsageError(
            f"config.json: {key} = {name!r}; the {raw['model_type']} family computes {', '.join(allowed)}."
        )
    return allowed[name]


def eos_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Returns all ids that end a text; config.json has one, a list, or none."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def write_eos(ids: tuple[int, ...]) -> int | list[int] | None:
    return list(ids) if len(ids) > 1 else next(iter(ids), None)
