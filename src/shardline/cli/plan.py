"""Predict what fits on this machine or on others, and choose a layout. Exit code 3 when nothing fits.

shardline plan                                   # the default config, on this machine
shardline plan CONFIG.yaml --nproc 2
shardline plan --preset smollm2-135m --data.sequence_length 1024
shardline plan llama-3.1-8b --devices 8xH100     # a preset, a model folder or a config.json on other devices
shardline plan CONFIG.yaml --devices 64xA100-80GB --html plan.html
shardline plan llama-3.1-8b --devices 8xL4 --for serve --request-rate 4 --ttft-limit 2
shardline plan --params 13e9 --devices 8xV100-32GB --sequence-length 2048 --engine megatron --layout tp=8
shardline plan --goal throughput --devices 8xMI300X   # which framework and runtime, and why
shardline plan --truth RUNS.csv --json           # published runs, predicted
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.cli import plan_devices
from shardline.cli.console import make_console
from shardline.cli.plan_devices import config_model
from shardline.config import ModelConfig, RunConfig, UsageError, load_config

if TYPE_CHECKING:
    from shardline.hardware.probe import Machine

TAKES_OVERRIDES = True
OWN_FLAGS = ("--optimizer",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="YAML config, without it the defaults; with --devices, the model")
    parser.add_argument("--nproc", type=int, help="processes on this machine; the default is as many as it has cores")
    parser.add_argument("--preset", help="named architecture, in place of the config's model")
    advice = parser.add_argument_group("which framework and runtime")
    advice.add_argument(
        "--goal",
        help="research, cheapest, throughput, latency, mobile, browser, tpu, amd or legacy-tensorflow: what to train "
        "and serve with, and why; with --devices, on those",
    )
    advice.add_argument(
        "--measured", metavar="FILE", help="speeds that you measured (JSON): they order frameworks where speed decides"
    )
    advice.add_argument("--offline", action="store_true", help="do not ask the package index how packages are")
    plan_devices.add_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.truth is not None:
        from shardline.planning.cluster.scoring import predict_file

        found = predict_file(args.truth)
        make_console(json_mode=args.json).print(_score(found["summary"]))
        return found
    if args.goal is not None:
        return _advise(args)
    if args.devices is not None:
        return plan_devices.run(args)
    unused = plan_devices.unused_flags(args)
    if unused:
        raise UsageError(f"{', '.join(unused)}: for a plan on other devices; add --devices, as in --devices 8xH100.")
    return _on_this_machine(args)


def _advise(args: argparse.Namespace) -> dict[str, Any]:
    from shardline.hardware.catalogue import parse_devices
    from shardline.hardware.health import find_health
    from shardline.hardware.package_index import find_index
    from shardline.planning.advice.advice import advise, packages_of
    from shardline.planning.advice.measured import read_measurements
    from shardline.planning.advice.text import advice_lines, advice_to_json

    device = None if args.devices is None else parse_devices(args.devices)[1]
    names = packages_of(args.goal)
    health = find_health(names, find=(lambda: None) if args.offline else find_index)
    measured = () if args.measured is None else read_measurements(args.measured)
    advice = advise(args.goal, health=health, device=device, measured=measured)
    console = make_console(json_mode=args.json)
    plan_devices.say(args, advice_lines(advice, width=console.width if console.is_terminal else None))
    return advice_to_json(advice)


def _score(summary: dict[str, Any]) -> str:
    parts = [f"{summary['num_rows']} rows, {summary['skipped']} not predicted"]
    for kind, name in (("memory", "memory"), ("tokens_per_s", "tokens/s")):
        shares = summary[kind]["all"]
        if shares["count"]:
            within = f"{shares['within_10']:.0%} within 10 %, {shares['within_20']:.0%} within 20 %"
            parts.append(f"{name} of {shares['count']}: {within}")
    parts.append(f"{len(summary['wrongly_fits'])} of {summary['num_out_of_memory']} out-of-memory rows said to fit")
    return "; ".join(parts) + "."


def _on_this_machine(args: argparse.Namespace) -> dict[str, Any]:
    from shardline.hardware.probe import probe
    from shardline.planning.cluster.known_shapes import known_shape_names
    from shardline.planning.explain import plan_lines, plan_table
    from shardline.planning.search import make_plan

    if args.file is not None and not Path(args.file).exists() and args.file in known_shape_names():
        raise UsageError(
            f"{args.file} is a model, and a run's config is wanted: add --devices this to plan it here in closed form, "
            f"or give --preset {args.file} for a run of it."
        )
    config = load_config(args.file, args.overrides)
    if args.preset is not None:
        config = dataclasses.replace(config, model=ModelConfig(preset=args.preset))
    machine = probe(folder=config.run)
    num_processes, why = _num_processes(args.nproc, config, machine)
    plan = make_plan(config_model(config), config, num_processes=num_processes, machine=machine)
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


def _name(config: RunConfig) -> str:
    return config.model.path or config.model.preset
