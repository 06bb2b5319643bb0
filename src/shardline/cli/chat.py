"""Talk to a model folder in the terminal; no server needed.

    shardline chat path/to/model                          # a conversation: /reset starts anew, /exit ends it
    shardline chat path/to/model --prompt "Hello"         # one reply

Ctrl-C stops a reply and keeps the conversation. With --json and --prompt: {"reply": ..., "ttft_s": ..., ...}.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from shardline.cli.console import make_console
from shardline.cli.serve import add_engine_arguments, engine_config
from shardline.config.errors import ShardlineError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from shardline.serving.conversation import Conversation, Turn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="model folder, hf://ORG/NAME, checkpoint or run directory")
    parser.add_argument("--prompt", metavar="TEXT", help="ask this, print the reply, and end")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: generation_config.json's, or 1)")
    parser.add_argument("--top-p", type=float, help="keep the likeliest tokens that add up to this probability")
    parser.add_argument("--top-k", type=int, help="keep this many of the likeliest tokens; 0 keeps all")
    parser.add_argument("--seed", type=int, help="seed of the sampling")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest reply (default: the rest of the context)")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.json and args.prompt is None:
        raise UsageError("--json needs --prompt TEXT: a conversation has no single result.")
    console = make_console(json_mode=args.json)
    from shardline.serving.conversation import Conversation
    from shardline.serving.startup import open_engine

    with console.status(f"opening {args.folder}"):
        opened = open_engine(args.folder, engine_config(args), generation_config=args.generation_config)
    given = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "seed", "max_tokens")}
    sampling = {"max_tokens": None, **opened.defaults, **{k: v for k, v in given.items() if v is not None}}
    conversation = Conversation(opened.engine, sampling=sampling, system=args.system)
    if args.prompt is not None:
        turn = _reply(console, conversation, args.prompt, show=not args.json)
        return turn.to_json()
    console.print(f"sampling   {opened.defaults_reason}", markup=False, style="dim")
    console.print("/reset starts anew, /exit or Ctrl-D ends, Ctrl-C stops a reply.", style="dim")
    num_turns = 0
    while (text := _ask(console)) is not None:
        if text == "/reset":
            conversation.reset()
        elif text.startswith("/"):
            console.print(f"{text} is not a command; there are /reset and /exit.", markup=False)
        elif text:
            try:
                turn = _reply(console, conversation, text, show=True)
            except ShardlineError as error:  # the conversation goes on from where it was
                console.print(str(error), markup=False, style="red")
                continue
            num_turns += 1
            console.print(turn.summary(), markup=False, style="dim")
    return {"turns": num_turns}


def _ask(console: Console) -> str | None:
    """Returns what the user typed; None to end."""
    try:
        text = console.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return None if text in ("/exit", "/quit") else text


def _reply(console: Console, conversation: Conversation, text: str, *, show: bool) -> Turn:
    def print_piece(piece: str) -> None:
        console.print(piece, end="", markup=False)

    turn = conversation.ask(text, on_text=print_piece if show else None)
    if show:
        console.print()
    return turn
