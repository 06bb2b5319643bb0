"""Check that the saved model, transformers and the serving engine compute the same, on real text.

    shardline verify FOLDER            # a Hugging Face folder
    shardline verify RUN               # a run's newest checkpoint, on the run's own held-out text
    shardline verify FOLDER --text FILE
    shardline verify FOLDER --batch-invariant      # served log-probabilities equal the trainer's, bit for bit
    shardline verify FOLDER --quantization int4    # what smaller weights cost: KL, argmax flips, perplexity, memory
    shardline verify SMALL --against FOLDER        # the same for a folder that `shardline quantize` wrote

Exit code 1 when a difference is over its tolerance (fp32: logits 1e-3, log-probabilities 1e-4).
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.cli.console import make_console
from shardline.config import UsageError

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="model folder, hf://ORG/NAME, checkpoint or run directory")
    parser.add_argument("--text", type=Path, help="UTF-8 file to compare on, instead of held-out text")
    parser.add_argument("--num-tokens", type=int, default=1024, help="tokens of text to compare on [1024]")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="compare in batch-invariant mode, where nothing may differ"
    )
    parser.add_argument("--quantization", choices=["none", "int8", "int4"], default="none", help="bits of the weights")
    parser.add_argument(
        "--kv-cache-dtype",
        choices=["auto", "fp32", "bf16", "int8"],
        default="auto",
        help="how keys and values are stored",
    )
    parser.add_argument("--against", metavar="FOLDER", help="full model that a quantised folder is measured against")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from shardline.checkpoints.hub import resolve
    from shardline.checkpoints.native import find_model_folder
    from shardline.line.verify import HF_TOLERANCE, SERVE_TOLERANCE, heldout_documents, verify
    from shardline.serving.quantize import quantization_of

    if args.num_tokens < 2:
        raise UsageError(f"--num-tokens {args.num_tokens} must be at least 2.")
    source = resolve(args.folder)
    folder = find_model_folder(source)
    documents = heldout_documents(source, num_tokens=args.num_tokens, text=args.text)
    console = make_console(json_mode=args.json)
    smaller = args.quantization != "none" or args.kv_cache_dtype != "auto" or args.against is not None
    if smaller or quantization_of(folder) is not None:
        return _measure(args, folder, documents, console)
    report = verify(folder, documents=documents, in_batch_invariant_mode=args.batch_invariant)
    console.print(f"{folder}: {report.num_tokens} tokens compared")
    console.print(
        f"transformers  max |logit difference| {report.hf_max_abs_logit:.2e} (tolerance {HF_TOLERANCE:g}), "
        f"argmax equal at {report.hf_argmax_agreement:.2%}"
    )
    limit = "must be 0" if report.batch_invariant else f"tolerance {SERVE_TOLERANCE:g}"
    console.print(
        f"serving       max |log-probability difference| {report.train_serve_max_abs_logprob:.2e} ({limit}), "
        f"mean {report.train_serve_mean_abs_logprob:.2e}"
    )
    console.print("they agree" if report.agrees else "[bold red]they do not agree[/]")
    return {**dataclasses.asdict(report), "exit_code": 0 if report.agrees else 1}


def _measure(args: argparse.Namespace, folder: Path, documents: list[list[int]], console: Console) -> dict[str, Any]:
    """What a smaller form costs is a measurement: it has no tolerance."""
    from shardline.checkpoints.hub import resolve
    from shardline.checkpoints.native import find_model_folder
    from shardline.line.quality import measure_quality
    from shardline.serving.engine import EngineConfig

    config = EngineConfig(
        quantization=args.quantization, kv_cache_dtype=args.kv_cache_dtype, batch_invariant=args.batch_invariant
    )
    full = None if args.against is None else find_model_folder(resolve(args.against))
    quality = measure_quality(folder, documents=documents, config=config, full=full)
    console.print(f"{folder}: served with weights {args.quantization}, KV cache {args.kv_cache_dtype}", markup=False)
    for line in quality.lines():
        console.print(line, markup=False)
    return dataclasses.asdict(quality)
