"""Answer a file of requests in OpenAI's batch format, without a server.

    shardline batch in.jsonl out.jsonl --model path/to/model

Each line of the input is a request for /v1/chat/completions, /v1/completions or /v1/embeddings:

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello", "max_tokens": 8}}

Lines that the output file answers already are skipped, so a run that was cut short goes on when it is started again.
The exit code is 1 when a line failed. With --json: {"num_succeeded": ..., "num_failed": ..., "num_skipped": ..., ...}.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shardline.checkpoints.hub import hub_name, is_hub_name
from shardline.cli.console import make_console
from shardline.cli.serve import add_engine_arguments, engine_config

UNBOUNDED = 1_000_000  # requests that may wait: the file is the queue


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help="file with one request a line")
    parser.add_argument("output", help="file for the answers; what it holds already is not computed again")
    parser.add_argument(
        "--model", required=True, metavar="FOLDER", help="model folder, hf://ORG/NAME, checkpoint or run"
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="name that the lines use for the model (default: the folder's)"
    )
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    console = make_console(json_mode=args.json)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from shardline.serving.batch import BatchReport, run_batch
    from shardline.serving.http import ServerConfig, make_app
    from shardline.serving.startup import open_engine

    own_name = hub_name(args.model)[0] if is_hub_name(args.model) else Path(args.model).resolve().name
    with console.status(f"opening {args.model}"):
        config = engine_config(args)
        opened = open_engine(args.model, config, generation_config=args.generation_config)
    app = make_app(
        opened.engine,
        ServerConfig(
            model_name=args.served_model_name or own_name, defaults=opened.defaults, max_num_waiting=UNBOUNDED
        ),
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("answered", total=None)

        def show(report: BatchReport) -> None:
            progress.update(task, completed=report.num_succeeded + report.num_failed + report.num_skipped)

        report = run_batch(app, Path(args.input), Path(args.output), num_at_once=2 * config.max_num_seqs, on_line=show)
    speed = report.completion_tokens / report.wall_s if report.wall_s else 0.0
    console.print(
        f"{report.num_succeeded} answered, {report.num_failed} failed, {report.num_skipped} skipped; "
        f"{report.completion_tokens} tokens in {report.wall_s:.1f} s ({speed:.1f} tokens/s)",
        markup=False,
    )
    return {**report.to_json(), "exit_code": 1 if report.num_failed else 0}
