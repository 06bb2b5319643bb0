"""The whole line on this machine: doctor, model, plan, train, verify, serve, report.

    summary = run_demo(Path("runs"), console=console)

Every stage is the same code as its own verb, training and serving as processes of their own. Nothing is resumed:
each demo gets a new run directory. What it proves stands in RUN/summary.json and is returned.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ShardlineError,
    TrainConfig,
    dump_config,
)
from shardline.config.cache import cache_dir
from shardline.hardware.checks import checks_text, examine
from shardline.hardware.matmuls import measure_matmuls
from shardline.hardware.probe import Machine, probe
from shardline.line.smollm2 import ModelUnavailableError, fetch
from shardline.line.verify import heldout_documents, verify
from shardline.planning.explain import plan_lines, plan_table
from shardline.planning.search import make_plan
from shardline.serving.client import stream_chat
from shardline.serving.launch import start_server
from shardline.training.report import write_report
from shardline.training.run import model_config

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["DemoSettings", "Summary", "run_demo"]


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """How long the demo trains, and what it asks. The defaults take about four minutes on two cores."""

    steps: int = 20
    question: str = "What is the capital of France? Answer in one sentence."
    max_tokens: int = 40
    verify_tokens: int = 768
    offline: bool = False


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a demo proved; the fields of its last line of output."""

    heldout_loss_before: float
    heldout_loss_after: float
    hf_max_abs_logit: float
    train_serve_max_abs_logprob: float
    predicted_memory_gib: float
    measured_memory_gib: float
    reply: str
    ttft_s: float
    tokens_per_s: float | None
    wall_s: float


def run_demo(folder: Path, *, console: Console, settings: DemoSettings | None = None) -> Summary:
    """Runs all stages, prints what each finds, and returns the summary. The run directory is a new one in `folder`."""
    settings = settings or DemoSettings()
    started = time.perf_counter()
    run = _new_run(folder)
    machine = _doctor(console, run)
    model = _model(console, offline=settings.offline)
    config = _plan(console, _config(run, model, settings, machine), machine)
    trained = _train(console, config)
    console.rule("[bold]verify[/]", align="left")
    documents = heldout_documents(run, num_tokens=settings.verify_tokens)
    agreement = verify(trained["model"], documents=documents)
    console.print(
        f"transformers opens the saved folder: logits differ by at most {agreement.hf_max_abs_logit:.1e}, "
        f"the same best token at {agreement.hf_argmax_agreement:.2%} of positions\n"
        f"the serving engine gives the trainer's log-probabilities: at most "
        f"{agreement.train_serve_max_abs_logprob:.1e} apart over {agreement.num_tokens} tokens"
    )
    reply, ttft_s, tokens_per_s = _serve(console, trained["model"], settings)
    summary = Summary(
        heldout_loss_before=trained["heldout_loss_before"],
        heldout_loss_after=trained["heldout_loss_after"],
        hf_max_abs_logit=agreement.hf_max_abs_logit,
        train_serve_max_abs_logprob=agreement.train_serve_max_abs_logprob,
        predicted_memory_gib=trained["predicted_memory_gib"],
        measured_memory_gib=trained["measured_memory_gib"],
        reply=reply,
        ttft_s=ttft_s,
        tokens_per_s=tokens_per_s,
        wall_s=time.perf_counter() - started,
    )
    (run / "summary.json").write_text(json.dumps(dataclasses.asdict(summary), indent=2) + "\n", encoding="utf-8")
    console.rule("[bold]report[/]", align="left")
    console.print(str(write_report(run)))
    if not agreement.agrees:
        raise ShardlineError(f"The trainer, transformers and the server do not agree; see {run / 'summary.json'}.")
    return summary


def _new_run(folder: Path) -> Path:
    name = time.strftime("demo-%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        run = folder / f"{name}{suffix}"
        try:
            run.mkdir(parents=True)
        except FileExistsError:
            continue
        return run
    raise ShardlineError(f"{folder} holds a hundred demos of this second already; delete some.")


def _doctor(console: Console, run: Path) -> Machine:
    console.rule("[bold]doctor[/]", align="left")
    machine = probe(folder=run, with_torch=True)
    machine = dataclasses.replace(machine, matmuls=measure_matmuls())
    console.print(checks_text(examine(machine)))
    return machine


def _model(console: Console, *, offline: bool) -> Path | None:
    """Returns SmolLM2's folder, or None where it can't be had."""
    console.rule("[bold]model[/]", align="left")
    shown: set[tuple[str, int]] = set()

    def report(stage: str, fraction: float) -> None:
        quarter = (stage, int(fraction * 4))
        if quarter not in shown:
            shown.add(quarter)
            console.print(f"{stage} {fraction:.0%}")

    try:
        if offline:
            raise ModelUnavailableError("--offline was given.")
        folder = fetch(cache_dir(), progress=report)
    except ModelUnavailableError as error:
        console.print(
            f"SmolLM2-135M-Instruct is not to be had here: {error} The demo trains the `tiny` preset from scratch "
            "instead; it proves the same agreements, but its reply will be no sentence."
        )
        return None
    console.print(f"SmolLM2-135M-Instruct, a Hugging Face folder: {folder}")
    return folder


def _config(run: Path, model: Path | None, settings: DemoSettings, machine: Machine) -> RunConfig:
    processes = min(2, machine.num_cores)
    tiny = model is None
    return RunConfig(
        model=ModelConfig() if tiny else ModelConfig(path=str(model)),
        data=DataConfig(sequence_length=512),
        train=TrainConfig(
            steps=settings.steps * (4 if tiny else 1),
            global_batch=2 * processes if tiny else processes,
            micro_batch=2 if tiny else 1,
            eval_every=0,
            eval_rows=8,
        ),
        optimizer=OptimizerConfig(lr=1e-3 if tiny else 1.5e-4, warmup_steps=3, schedule="cosine"),
        parallel=ParallelConfig(data=processes),
        checkpoint=CheckpointConfig(every=0, keep_last=1),
        run=str(run),
    )


def _plan(console: Console, config: RunConfig, machine: Machine) -> RunConfig:
    """Shows every layout and returns the config with the chosen one."""
    console.rule("[bold]plan[/]", align="left")
    assert isinstance(config.parallel.data, int)
    plan = make_plan(model_config(config), config, num_processes=config.parallel.data, machine=machine)
    console.print(plan_table(plan))
    for line in plan_lines(plan):
        console.print(line)
    if plan.chosen is None:
        plan.require()
    return plan.chosen_config


def _train(console: Console, config: RunConfig) -> dict[str, Any]:
    """`shardline train` in processes of its own; what it prints is shown as it comes, its result is returned."""
    console.rule("[bold]train[/]", align="left")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(dump_config(config))
        file.flush()
        command = [sys.executable, "-m", "shardline", "train", file.name, "--nproc", str(config.parallel.data)]
        with subprocess.Popen(
            [*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        ) as process:
            assert process.stderr is not None
            assert process.stdout is not None
            for line in process.stderr:
                console.print(line.rstrip("\n"), markup=False)
            output = process.stdout.read()
    if process.returncode:
        raise ShardlineError(f"Training stopped with exit code {process.returncode}; its messages are above.")
    return json.loads(output)


def _serve(console: Console, folder: str, settings: DemoSettings) -> tuple[str, float, float | None]:
    console.rule("[bold]serve[/]", align="left")
    with start_server(folder) as server:
        console.print(f"{server.url}/v1/chat/completions")
        console.print(f"user: {settings.question}", markup=False)
        console.print("assistant: ", end="")
        reply = stream_chat(
            server.url,
            [{"role": "user", "content": settings.question}],
            on_text=lambda text: console.print(text, end="", markup=False),
            temperature=0.0,
            max_tokens=settings.max_tokens,
        )
    speed = "" if reply.tokens_per_s is None else f", then {reply.tokens_per_s:.1f} tokens/s"
    console.print(f"\nfirst token after {reply.ttft_s:.2f} s{speed}")
    return reply.text, reply.ttft_s, reply.tokens_per_s
