"""The whole configuration of a run, as frozen dataclasses. The defaults train the `tiny` preset on the
Python standard library, in one process.

Each field's `doc` is one line for people: it becomes the help text and the JSON schema's description.
Values that depend on one field only are checked by their type (`Literal`, `Annotated`); equations that
join several fields are checked by `validate`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from shardline.config.errors import InfeasibleError, UsageError

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ParameterGroupConfig",
    "RunConfig",
    "TrainConfig",
    "validate",
]

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]


def _field(default: Any, doc: str) -> Any:
    return dataclasses.field(default=default, metadata={"doc": doc})


def _section(section: type, doc: str) -> Any:
    return dataclasses.field(default_factory=section, metadata={"doc": doc})


def _required(doc: str) -> Any:
    return dataclasses.field(metadata={"doc": doc})


def _list_of(section: type, doc: str) -> Any:
    return dataclasses.field(default=(), metadata={"doc": doc, "element": section})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained. `path` wins over `preset`."""

    preset: str = _field("tiny", "named architecture, trained from scratch (the list is at the end of docs/config.md)")
    path: str | None = _field(
        None, "Hugging Face folder, or hf://ORG/NAME[@REVISION], to start from instead of a preset"
    )
    tokenizer: str | None = _field(
        None, "folder or hf:// name of the tokenizer; null takes that of path, or bytes for a preset"
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    source: str = _field("stdlib", "`stdlib`, a folder of text or code, a .txt file, or a .jsonl file of text or chats")
    sequence_length: Positive = _field(512, "tokens in one packed row")
    heldout_fraction: Annotated[float, Meta(ge=0, lt=1)] = _field(0.02, "share of the documents kept for evaluation")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: NonNegative = _field(200, "optimizer steps")
    global_batch: Positive = _field(8, "rows in one optimizer step, over all data ranks")
    micro_batch: Positive = _field(2, "rows in one forward pass on one rank")
    precision: Literal["fp32", "bf16", "bf16_pure", "fp16"] = _field(
        "fp32",
        "fp32; bf16 or fp16 compute with fp32 master weights (fp16 with loss scaling); bf16_pure: bf16 weights and "
        "optimizer state with stochastic rounding",
    )
    seed: NonNegative = _field(0, "seed of the weights and of the data order")
    eval_every: NonNegative = _field(50, "steps between held-out evaluations; 0 turns them off but the first and last")
    eval_rows: Positive = _field(8, "rows of held-out text in one evaluation")
    compile: bool = _field(False, "compile each layer with torch.compile")


@dataclass(frozen=True, kw_only=True)
class ParameterGroupConfig:
    """What holds for parameters of one kind of name, in place of the optimizer's own values."""

    pattern: str = _required("shell pattern on parameter names, as *.embed_tokens.*; the first that matches counts")
    lr_scale: NonNegativeFloat = _field(1.0, "factor on the learning rate")
    weight_decay: NonNegativeFloat | None = _field(None, "decoupled weight decay; null: the optimizer's rule")
    freeze: bool = _field(False, "leave them as they are: no gradient, no optimizer state")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Literal["adamw", "adafactor", "muon", "adamw_8bit"] = _field(
        "adamw",
        "optimizer; muon steps the hidden matrices and AdamW the rest; adamw_8bit needs the torchao package",
    )
    lr: NonNegativeFloat = _field(3.0e-4, "peak learning rate")
    betas: tuple[float, float] = _field((0.9, 0.95), "decay of the first and second moment")
    eps: NonNegativeFloat = _field(1.0e-8, "AdamW's epsilon")
    muon_lr: NonNegativeFloat | None = _field(None, "muon: peak learning rate of the hidden matrices; null: lr")
    momentum: Annotated[float, Meta(ge=0, lt=1)] = _field(0.95, "muon: Nesterov momentum")
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = _field(
        "match_rms_adamw",
        "muon: how a matrix's shape scales its rate; match_rms_adamw: as large as AdamW's lr; original: about 0.02",
    )
    beta2_decay: Annotated[float, Meta(lt=0)] = _field(-0.8, "adafactor: exponent of the second moment's decay")
    groups: tuple[ParameterGroupConfig, ...] = _list_of(
        ParameterGroupConfig, "parameter groups by name, with their own learning rate, decay, or frozen"
    )
    weight_decay: NonNegativeFloat = _field(0.1, "decoupled weight decay, of matrices only")
    clip: NonNegativeFloat = _field(1.0, "largest global gradient norm; 0 turns clipping off")
    schedule: Literal["cosine", "wsd", "constant"] = _field(
        "cosine", "cosine, wsd (warm-up, stable, decay) or constant, each after the warm-up"
    )
    warmup_steps: NonNegative = _field(10, "steps of linear warm-up")
    decay_fraction: Annotated[float, Meta(ge=0, le=1)] = _field(0.2, "wsd: share of the steps that decay")
    min_lr_fraction: Annotated[float, Meta(ge=0, le=1)] = _field(0.1, "final learning rate as a share of the peak")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    optimizer: Literal["none", "cpu", "disk"] = _field(
        "none", "where optimizer state lives: cpu (streamed from a GPU) or disk (memory-mapped files)"
    )
    params: Literal["none", "cpu"] = _field("none", "where ZeRO-3's parameter shards live between their uses")
    optimizer_fraction: Annotated[float, Meta(gt=0, le=1)] = _field(
        1.0, "share of the optimizer state that `offload.optimizer` moves"
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    data: Positive | Literal["auto"] = _field("auto", "data-parallel ranks; auto takes what is left of the processes")
    tensor: Positive = _field(1, "tensor-parallel ranks")
    pipeline: Positive = _field(1, "pipeline stages")
    zero: Literal[0, 1, 2, 3] = _field(0, "ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also parameters")
    zero_group: Positive | Literal["auto"] = _field(
        "auto", "data ranks that ZeRO-2 and 3 shard over; fewer than all: hybrid sharding, replicas of the shards"
    )
    sequence_parallel: bool = _field(False, "with tensor > 1: norms and the residual stream are cut along the sequence")
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble_v"] = _field(
        "1f1b", "order of a pipeline's forward and backward passes"
    )
    virtual_stages: Positive | Literal["auto"] = _field(
        "auto", "stages that one pipeline rank holds; auto: 2 for interleaved and zero_bubble_v, otherwise 1"
    )
    micro_batches: Positive | Literal["auto"] = _field(
        "auto", "micro-batches that a data rank runs in a step; auto: what global_batch and micro_batch leave"
    )
    activation_checkpointing: Literal["none", "selective", "full"] = _field(
        "none", "what backward recomputes: nothing, the cheap parts of each layer, or each layer whole"
    )
    offload: OffloadConfig = _section(OffloadConfig, "what lives outside the device's memory")
    timeout_s: Positive = _field(600, "seconds after which a collective that a rank does not join ends the run")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: NonNegative = _field(50, "steps between checkpoints; 0 saves only at the end")
    keep_last: Positive = _field(3, "checkpoints kept; older ones are deleted after a newer one is complete")
    keep_every: NonNegative = _field(0, "checkpoints at multiples of this step are kept for good; 0: none")
    asynchronous: bool = _field(False, "write in the background while training goes on; takes a copy of the state")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One YAML file: the same for 1 process and for 1,000."""

    model: ModelConfig = _section(ModelConfig, "what is trained")
    data: DataConfig = _section(DataConfig, "what it is trained on")
    train: TrainConfig = _section(TrainConfig, "the loop")
    optimizer: OptimizerConfig = _section(OptimizerConfig, "optimizer and learning rate")
    parallel: ParallelConfig = _section(ParallelConfig, "how it is laid out over processes")
    checkpoint: CheckpointConfig = _section(CheckpointConfig, "what is saved, and when")
    run: str = _field("runs/my-run", "run directory")


def validate(config: RunConfig) -> None:
    """Raises `UsageError` or `InfeasibleError` where fields contradict one another, however many processes run."""
    train, optimizer, parallel = config.train, config.optimizer, config.parallel
    if train.global_batch % train.micro_batch:
        fits = max(size for size in range(1, train.micro_batch) if train.global_batch % size == 0)
        raise UsageError(
            f"train.global_batch = {train.global_batch} is not a multiple of train.micro_batch = {train.micro_batch}; "
            f"set train.micro_batch to {fits} or another divisor of {train.global_batch}."
        )
    if any(not 0 <= beta < 1 for beta in optimizer.betas):
        raise UsageError(f"optimizer.betas = {list(optimizer.betas)} must each lie in [0, 1).")
    if parallel.offload.params == "cpu" and parallel.zero != 3:
        raise InfeasibleError(
            f"parallel.offload.params = cpu moves the shards that ZeRO-3 gathers layer by layer, but parallel.zero = "
            f"{parallel.zero} keeps whole parameters on the device; set parallel.zero to 3 (one data rank will do), or "
            "parallel.offload.optimizer to cpu instead."
        )
    if optimizer.name == "adamw_8bit" and parallel.offload.optimizer != "none":
        raise InfeasibleError(
            f"parallel.offload.optimizer = {parallel.offload.optimizer} moves fp32 state, and optimizer.name = "
            "adamw_8bit has none worth moving (2 bytes a parameter); set optimizer.name to adamw, or "
            "parallel.offload.optimizer to none."
        )
