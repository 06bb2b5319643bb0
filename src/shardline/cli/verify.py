"""Check that the saved model, transformers and the serving engine compute the same, on real text.

    shardline verify FOLDER            # a Hugging Face folder
    shardline verify RUN               # a run's newest checkpoint, on the run's own held-out text
    shardline verify FOLDER --text FILE

Exit code 1 when a difference is over its tolerance (fp32: logits 1e-3, log-probabilities 1e-4).
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from shardline.cli.console import make_console
from shardline.config import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="model folder, hf://ORG/NAME, checkpoint or run directory")
    parser.add_argument("--text", type=Path, help="UTF-8 file to compare on, instead of held-out text")
    parser.add_argument("--num-tokens", type=int, default=1024, help="tokens of text to compare on [1024]")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from shardline.checkpoints.hub import resolve
    from shardline.checkpoints.native import find_model_folder
    from shardline.line.verify import HF_TOLERANCE, SERVE_TOLERANCE, heldout_documents, verify

    if args.num_tokens < 2:
        raise UsageError(f"--num-tokens {args.num_tokens} must be at least 2.")
    source = resolve(args.folder)
    folder = find_model_folder(source)
    documents = heldout_documents(source, num_tokens=args.num_tokens, text=args.text)
    report = verify(folder, documents=documents)
    console = make_console(json_mode=args.json)
    console.print(f"{folder}: {report.num_tokens} tokens compared")
    console.print(
        f"transformers  max |logit difference| {report.hf_max_abs_logit:.2e} (tolerance {HF_TOLERANCE:g}), "
        f"argmax equal at {report.hf_argmax_agreement:.2%}"
    )
    console.print(
        f"serving       max |log-probability difference| {report.train_serve_max_abs_logprob:.2e} "
        f"(tolerance {SERVE_TOLERANCE:g}), mean {report.train_serve_mean_abs_logprob:.2e}"
    )
    console.print("they agree" if report.agrees else "[bold red]they do not agree[/]")
    return {**dataclasses.asdict(report), "exit_code": 0 if report.agrees else 1}
