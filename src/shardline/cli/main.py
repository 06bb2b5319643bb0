"""The command line: `shardline VERB ...`. It knows the verbs' names; each verb's module knows the rest.

A verb's module has `add_arguments(parser)` and `run(args) -> dict | None`. `main` prints that dict as one JSON object
on standard output under `--json`, and turns errors into one sentence and an exit code: 0 done, 1 failed, 2 bad usage,
3 infeasible; an `exit_code` in the dict becomes ours. With `TAKES_OVERRIDES = True` the config keys among the words
(`--section.field VALUE`) arrive in `args.overrides`; `OWN_FLAGS` are named like a section but are the verb's own.
`args.words` are all words as typed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence

from shardline import __version__
from shardline.config.errors import ShardlineError, nearest

__all__ = ["VERBS", "main"]

VERBS = {
    "doctor": "say what this machine has and what is wrong with it",
    "plan": "predict what fits on this machine, and choose a layout",
    "train": "train a model from a YAML config",
    "launch": "write the submission file of a run on many machines",
    "verify": "check that the saved model, transformers and the serving engine agree",
    "inspect": "say what is in a model folder, and what of it breaks elsewhere",
    "quantize": "write a model folder again with weights in 8 or 4 bits",
    "serve": "serve a model folder over an OpenAI-compatible HTTP API",
    "chat": "talk to a model folder in the terminal",
    "batch": "answer a file of requests in OpenAI's batch format",
    "demo": "run the whole line on this machine and print what it proved",
    "config": "show the resolved config or its JSON schema",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"shardline {__version__}")
        return 0
    verb, *rest = words
    if verb not in VERBS:
        print(f"shardline: unknown verb {verb!r}{nearest(verb, VERBS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"shardline.cli.{verb}")
    parser = argparse.ArgumentParser(
        prog=f"shardline {verb}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on standard output")
    module.add_arguments(parser)
    overrides: list[str] = []
    if getattr(module, "TAKES_OVERRIDES", False):
        from shardline.cli.overrides import describe_overrides, split_overrides

        rest, overrides = split_overrides(rest, flags=getattr(module, "OWN_FLAGS", ()))
        parser.epilog = describe_overrides()
    try:
        args = parser.parse_args(rest, argparse.Namespace(words=words, overrides=overrides))
    except SystemExit as stop:
        return int(stop.code or 0)
    return _run(verb, module, args)


def _run(verb: str, module: object, args: argparse.Namespace) -> int:
    try:
        result = module.run(args) or {}  # type: ignore[attr-defined]
        code = result.pop("exit_code", 0)  # a verb whose answer is "no" still gives all its facts
        if args.json and result:  # `serve` has printed its object when it was ready, rank 0 of `train` its own
            print(json.dumps(result), flush=True)
    except ShardlineError as error:
        print(f"shardline {verb}: {error}", file=sys.stderr)
        if args.json:
            print(json.dumps({"error": {"message": str(error), "exit_code": error.exit_code}}))
        return error.exit_code
    except KeyboardInterrupt as stop:
        print(f"shardline {verb}: interrupted{f'; {stop}' if str(stop) else ''}.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `shardline ... | head` closed our output; that is not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb.ljust(width)}  {text}" for verb, text in VERBS.items()]
    return "\n".join(
        [
            "usage: shardline VERB [options]    (shardline VERB --help tells a verb's options)",
            "",
            "One PyTorch code base from the first training shard to the last served token.",
            "",
            *lines,
        ]
    )
