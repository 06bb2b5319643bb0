"""Train a model from a YAML config, in this process, over local processes, or under torchrun or srun.

    shardline train                                        # the tiny preset on the standard library
    shardline train run.yaml --nproc 2 --parallel.zero 2   # two local processes
    shardline train run.yaml --resume                      # continue after a stop or a kill
    torchrun --nproc-per-node 2 -m shardline train run.yaml
    torchrun --nproc-per-node 2 -m -- shardline train --run runs/two    # `--` keeps torchrun off our flags

SIGTERM and SIGUSR1 make a run save after the step it is in and end with exit code 143 or 138. Restarted by torchrun
(--max-restarts) it continues by itself.

Every key of the config can be set as --section.field VALUE; `shardline config show` lists them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

from shardline.cli.console import make_console
from shardline.config import RunConfig, UsageError, load_config

TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="YAML config; without it the defaults")
    parser.add_argument("--nproc", type=int, help="start this many processes on this machine")
    parser.add_argument("--resume", action="store_true", help="continue the run from its newest checkpoint")
    parser.add_argument("--ignore-plan", action="store_true", help="start even if the plan says that it won't fit")


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    try:
        return _run(args)
    except KeyboardInterrupt:
        if "SHARDLINE_LAUNCHER_PID" in os.environ:  # the launcher got the same Ctrl-C, and says it once for all
            sys.exit(130)
        raise KeyboardInterrupt("what was saved is whole; go on from the last checkpoint with --resume") from None


def _run(args: argparse.Namespace) -> dict[str, Any] | None:
    config = load_config(args.file, args.overrides)
    launched = "WORLD_SIZE" in os.environ
    if args.nproc is not None and not launched:
        if args.nproc < 1:
            raise UsageError(f"--nproc {args.nproc} must be at least 1.")
        from shardline.parallel.launch import launch

        _check_layout(config, args.nproc)
        code = launch(args.words, num_processes=args.nproc, log_dir=Path(config.run) / "logs")
        if code:
            sys.exit(code)
        return None  # rank 0 has printed the result
    return _train(args, config)


def _check_layout(config: RunConfig, num_processes: int) -> None:
    """Refuses what can't be laid out before any process is started; a folder's model is looked at by the ranks."""
    from shardline.models.presets import preset
    from shardline.parallel.grid import Layout
    from shardline.planning.layouts import require_layout

    if config.model.path is None:
        require_layout(preset(config.model.preset), config, num_processes=num_processes)
    else:
        Layout.resolve(config.parallel, world_size=num_processes).accumulation(config.train)


def _train(args: argparse.Namespace, config: Any) -> dict[str, Any] | None:
    from shardline.parallel.launch import follow_launcher
    from shardline.parallel.world import start_world
    from shardline.training.run import train

    follow_launcher()
    console = make_console(json_mode=args.json)
    with start_world() as world:
        result = train(
            config,
            world=world,
            console=console,
            resume=args.resume,
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            require_fit=not args.ignore_plan,
        )
    # As a process that died of the signal: what is unfinished must not look done to a scheduler.
    ending = {"exit_code": 128 + signal.Signals[result.stopped]} if result.stopped else {}
    if not world.is_first:
        return ending
    console.print(f"model: {result.model}\nreport: {result.report}")
    return {**dataclasses.asdict(result), **ending}
