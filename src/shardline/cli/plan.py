"""Predict what fits on this machine or on others, and choose a layout. Exit code 3 when nothing fits.

shardline plan                                   # the default config, on this machine
shardline plan CONFIG.yaml --nproc 2
shardline plan --preset smollm2-135m --data.sequence_length 1024
shardline plan llama-3.1-8b --devices 8xH100     # a preset, a model folder or a config.json on other devices
shardline plan --params 13e9 --devices 8xV100-32GB --sequence-length 2048 --engine megatron --layout tp=8
shardline plan --truth RUNS.csv --json           # published runs, predicted
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.cli.console import make_console
from shardline.config import ModelConfig, RunConfig, UsageError, load_config

if TYPE_CHECKING:
    from shardline.hardware.probe import Machine
    from shardline.models.config import DecoderConfig
    from shardline.planning.cluster.shape import ModelShape

TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="YAML config, without it the defaults; with --devices, the model")
    parser.add_argument("--nproc", type=int, help="processes on this machine; the default is as many as it has cores")
    parser.add_argument("--preset", help="named architecture, in place of the config's model")
    other = parser.add_argument_group("on other devices, in closed form")
    other.add_argument("--devices", help="how many of what: 8xV100-32GB, 64xH100, cpu:4, this")
    other.add_argument("--nodes", type=int, help="machines that they are in; the default is as the device is sold")
    other.add_argument("--model-shape", help="layers=..,hidden=..,heads=..,kv_heads=..,ffn=..,vocab=..")
    other.add_argument("--params", type=float, help="number of parameters, as 13e9, where that is all that is known")
    other.add_argument("--sequence-length", "--seq", type=int, default=2048, help="tokens of a row (default 2048)")
    other.add_argument("--global-batch", type=int, help="rows of a step; the default is 8 for each device")
    other.add_argument("--micro-batch", type=int, help="rows of a pass (default: what is best)")
    other.add_argument(
        "--precision", default="bf16_mixed", help="bf16_mixed (default), fp16_mixed, fp32, bf16_pure, ..."
    )
    other.add_argument("--optimizer", default="adamw", help="adamw (default), adamw_8bit, sgd, adafactor, muon")
    other.add_argument(
        "--engine", default="shardline", help="who trains: shardline (default), fsdp2, deepspeed, megatron, ..."
    )
    other.add_argument(
        "--layout", default="", help="what of the layout is given: tp=2,pp=4,zero=1 (the rest is searched)"
    )
    other.add_argument("--recompute", choices=("none", "selective", "full"), help="(default: what is best)")
    other.add_argument("--offload", default="", help="kept in the host: optimizer,parameters,activations")
    other.add_argument("--top", type=int, default=5, help="layouts in the table (default 5)")
    other.add_argument(
        "--truth", metavar="CSV", help="predict the runs of a file with the columns of docs/plan-accuracy.md"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.truth is not None:
        from shardline.planning.cluster.scoring import predict_file

        found = predict_file(args.truth)
        make_console(json_mode=args.json).print(_score(found["summary"]))
        return found
    if args.devices is not None:
        return _on_devices(args)
    return _on_this_machine(args)


def _score(summary: dict[str, Any]) -> str:
    parts = [f"{summary['num_rows']} rows, {summary['skipped']} not predicted"]
    for kind, name in (("memory", "memory"), ("tokens_per_s", "tokens/s")):
        shares = summary[kind]["all"]
        if shares["count"]:
            within = f"{shares['within_10']:.0%} within 10 %, {shares['within_20']:.0%} within 20 %"
            parts.append(f"{name} of {shares['count']}: {within}")
    parts.append(f"{len(summary['wrongly_fits'])} of {summary['num_out_of_memory']} out-of-memory rows said to fit")
    return "; ".join(parts) + "."


def _on_devices(args: argparse.Namespace) -> dict[str, Any]:
    from shardline.hardware.catalogue import parse_devices
    from shardline.planning.cluster.engines import engine
    from shardline.planning.cluster.explain import found_lines, found_table, found_to_json
    from shardline.planning.cluster.search import Asked, parse_layout, search

    count, device = parse_devices(args.devices)
    for name in ("nodes", "sequence_length", "global_batch", "micro_batch", "top"):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= 10_000_000:
            raise UsageError(f"--{name.replace('_', '-')} {value} must be from 1 to 10000000.")
    engine(args.engine)
    found = search(
        Asked(
            shape=_shape(args),
            device=device,
            num_devices=count,
            num_nodes=args.nodes,
            sequence_length=args.sequence_length,
            global_batch=args.global_batch or 8 * count,
            precision=args.precision,
            optimizer=args.optimizer,
            engine=args.engine,
            micro_batch=args.micro_batch,
            recompute=args.recompute,
            offload=frozenset(filter(None, args.offload.split(","))),
            fixed=parse_layout(args.layout),
        ),
        top=args.top,
    )
    first, *rest = found_lines(found)
    console = make_console(json_mode=args.json)
    console.print(first, highlight=False)
    console.print(found_table(found))
    for line in rest:
        console.print(line, highlight=False)
    return {**found_to_json(found), "exit_code": 0 if found.best is not None else 3}


def _shape(args: argparse.Namespace) -> ModelShape:
    from shardline.planning.cluster.shape import ModelShape

    sources = {"MODEL": args.file or args.preset, "--model-shape": args.model_shape, "--params": args.params}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        said = " and ".join(given) or "none of them"
        raise UsageError(f"--devices needs one of MODEL, --model-shape and --params; there is {said}.")
    if args.model_shape is not None:
        return ModelShape.parse(args.model_shape)
    if args.params is not None:
        return ModelShape.from_parameters(args.params)
    name = args.file or args.preset
    path = Path(name)
    if args.preset is None and path.is_file() and path.name == "config.json":
        path = path.parent
    elif args.preset is not None or not (path.is_dir() or "/" in name):
        from shardline.models.presets import preset

        return ModelShape.of(preset(name), name=name)
    from shardline.checkpoints.hub import CONFIG_FILES, resolve
    from shardline.checkpoints.huggingface import read_config

    return ModelShape.of(read_config(resolve(str(path), patterns=CONFIG_FILES)), name=name)


def _on_this_machine(args: argparse.Namespace) -> dict[str, Any]:
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
