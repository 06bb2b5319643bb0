"""Say what is in a model folder without loading its weights, and what of it breaks in other runtimes.

    shardline inspect FOLDER             # a Hugging Face folder, a checkpoint or a run
    shardline inspect hf://ORG/NAME      # downloaded first
    shardline inspect FOLDER --json      # all facts, and `warnings`: kind, severity, message

Exit code 0 with warnings too: they concern other runtimes.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from shardline.cli.console import make_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shardline.checkpoints.inspection import ChatSample, Inspection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="model folder, hf://ORG/NAME, checkpoint or run directory")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from shardline.checkpoints.inspection import inspect_folder

    found = inspect_folder(args.folder)
    console = make_console(json_mode=args.json)
    console.print(found.folder, style="bold", markup=False)
    console.print(_facts(found))
    if found.chat is not None:
        _print_chat(console, found.chat, num_tokens=len(found.chat.tokens), is_chat=bool(found.chat_template_in))
    _print_findings(console, found)
    return found.to_json()


def _facts(found: Inspection) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(found):
        table.add_row(name, Text(value))
    return table


def _rows(found: Inspection) -> list[tuple[str, str]]:
    count = found.parameters
    parts = {
        "embedding": count.embedding,
        "attention": count.attention,
        "feed-forward": count.feed_forward,
        "norms": count.norms,
        "head": count.head,
        "other": count.other,
    }
    shares = [f"{name} {_count(size)} ({size / count.total:.1%})" for name, size in parts.items() if size]
    active = f", {_count(count.active)} active for a token" if count.active != count.total else ""
    dtypes = found.stored_elements_by_dtype
    windows = f", {found.num_windowed_layers} of {found.num_layers} layers with a window"
    rope = found.rope or {}
    rope_text = ", ".join(f"{name} {value}" for name, value in rope.items() if not isinstance(value, tuple))
    tokens = "no tokenizer" if found.tokenizer_size is None else f"tokenizer {found.tokenizer_size:,}"
    eos = [f"{each.text or '?'} {each.id} (from {', '.join(each.sources)})" for each in found.eos]
    return [
        ("family", f"{found.family}  {' '.join(found.architectures)}"),
        ("parameters", f"{count.total:,}{active}"),
        ("", ", ".join(shares)),
        ("files", f"{found.num_files} with {found.num_tensors} tensors: {', '.join(_dtype_rows(dtypes))}"),
        ("context", f"{found.context_length:,} tokens{windows if found.num_windowed_layers else ''}"),
        *([("rope", rope_text)] if rope_text else []),
        ("vocabulary", f"{found.vocab_size:,} rows, {tokens}"),
        ("head", "tied to the embedding" if found.tied_head else "its own"),
        ("EOS", "; ".join(eos) or "none"),
        ("chat template", f"in {' and '.join(found.chat_template_in)}" if found.chat_template_in else "none"),
        ("weights", ", ".join(f"{name} {_size(size)}" for name, size in found.weight_bytes.items())),
        ("KV a token", ", ".join(f"{name} {_size(size)}" for name, size in found.kv_bytes_per_token.items())),
        ("KV, full context", ", ".join(f"{name} {_size(size)}" for name, size in found.kv_bytes_full_context.items())),
    ]


def _dtype_rows(dtypes: dict[str, int]) -> list[str]:
    return [f"{dtype} ({count:,})" if len(dtypes) > 1 else dtype for dtype, count in dtypes.items()]


def _print_chat(console: Console, chat: ChatSample, *, num_tokens: int, is_chat: bool) -> None:
    """Tokens side by side, quoted and each with its id, so that a space or a doubled BOS can be seen."""
    from rich.text import Text

    console.print(f"\na short {'chat' if is_chat else 'prompt'} is {num_tokens} tokens", style="cyan")
    line = Text()
    for position, (id, text) in enumerate(chat.tokens):
        line.append(json.dumps(text, ensure_ascii=False), style="cyan" if position % 2 else "yellow")
        line.append(f" {id}  ", style="dim")
    console.print(line)


def _print_findings(console: Console, found: Inspection) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print()
    if not found.findings:
        console.print("nothing found that breaks elsewhere", style="green")
        return
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in sorted(found.findings, key=lambda finding: finding.severity != "warning"):
        style = "yellow" if finding.severity == "warning" else "dim"
        table.add_row(Text(finding.severity, style=style), Text(finding.message))
    console.print(table)


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return str(number)


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} B"
