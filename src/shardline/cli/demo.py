"""Run the whole line on this machine and print what it proved: doctor, model, plan, train, verify, serve, report.

    shardline demo                 # SmolLM2-135M on two processes; about five minutes on two cores
    shardline demo --offline       # the tiny preset from scratch, nothing is downloaded

The last line of standard output is one JSON object, also written to RUN/summary.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from shardline.cli.console import make_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder for the new run directory [runs]")
    parser.add_argument("--steps", type=int, default=20, help="training steps [20]")
    parser.add_argument("--offline", action="store_true", help="download nothing: train the tiny preset")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from shardline.line.demo import DemoSettings, run_demo

    console = make_console(json_mode=args.json)
    settings = DemoSettings(steps=args.steps, offline=args.offline)
    summary = dataclasses.asdict(run_demo(args.runs, console=console, settings=settings))
    if not args.json:
        print(json.dumps(summary))
    return summary
