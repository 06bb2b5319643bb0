"""Predict what fits on this machine, and choose a layout.

shardline plan                                   # the default config
shardline plan CONFIG.yaml --nproc 2
shardline plan --preset smollm2-135m --data.sequence_length 1024
shardline plan CONFIG.yaml --json                # exit code 3 when nothing fits
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from shardline.cli.console import make_console
from shardline.config import ModelConfig, RunConfig, UsageError, load_config

if TYPE_CHECKING:
    from shardline.hardware.probe import Machine
    from shardline.models.config import DecoderConfig

TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="YAML config; without it the defaults")
    parser.add_argument("--nproc", type=int, help="processes on this machine; the default is as many as it has cores")
    parser.add_argument("--preset", help="named architecture, in place of the config's model")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from shardline.hardware.probe import probe
    from shardline.planning.explain import plan_lines, plan_table
    from shardline.planning.search import make_plan

    config = load_config(args.file, args.overrides)
    if args.preset is not None:
        config = dataclasses.replace(config, model=ModelConfig(preset=args.preset))
    machine = probe(folder=config.run)
    num_processes, why = _num_processes(args.nproc, config, machine)
    plan = make_plan(_model(config), config, num_processes=num_processes, machine=machine)
    first, *rest = plan_lines(plan)
    console = make_console(json_mode=args.json)
    console.print(f"{_name(config)}: {first} ({why})")
    console.print(plan_table(plan))
    for line in rest:
        console.print(line)
    if plan.chosen is None:
        plan.require()
    return plan.to_json()


def _num_processes(nproc: int | None, config: RunConfig, machine: Machine) -> tuple[int, str]:
    """Returns (processes, reason)."""
    if nproc is not None:
        if nproc < 1:
            raise UsageError(f"--nproc {nproc} must be at least 1.")
        return nproc, "--nproc"
    parallel = config.parallel
    fixed = parallel.tensor * parallel.pipeline
    if parallel.data != "auto":
        return parallel.data * fixed, "the config's data x tensor x pipeline ranks"
    steps = config.train.global_batch // config.train.micro_batch
    most = max(1, min(machine.num_cores // fixed, steps))
    data = next(n for n in range(most, 0, -1) if steps % n == 0)
    if fixed > 1:
        return data * fixed, f"{data} x the {fixed} tensor and pipeline ranks of the config"
    return data, "as many as this machine has cores, where that divides the batch"


def _model(config: RunConfig) -> DecoderConfig:
    if config.model.path is not None:
        from shardline.checkpoints.hub import CONFIG_FILES, resolve
        from shardline.checkpoints.huggingface import read_config

        return read_config(resolve(config.model.path, patterns=CONFIG_FILES))
    from shardline.models.presets import preset

    return preset(config.model.preset)


def _name(config: RunConfig) -> str:
    return config.model.path or config.model.preset
