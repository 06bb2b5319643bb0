"""Configuration: frozen dataclasses, a strict YAML loader, and the errors that users see."""

from shardline.config.errors import InfeasibleError, ShardlineError, UsageError, nearest
from shardline.config.loader import dump_config, iter_fields, json_schema, load_config
from shardline.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    ParallelConfig,
    ParameterGroupConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "InfeasibleError",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ParameterGroupConfig",
    "RunConfig",
    "ShardlineError",
    "TrainConfig",
    "UsageError",
    "dump_config",
    "iter_fields",
    "json_schema",
    "load_config",
    "nearest",
]
