"""Serve a model folder over an OpenAI-compatible HTTP API, with a chat page at /.

    shardline serve path/to/model
    shardline serve runs/my-run --port 0 --max-model-len 2048 --kv-cache-memory 2

The folder is a Hugging Face folder, a checkpoint, a run, whose newest checkpoint is taken, or hf://ORG/NAME. With
--json, standard output gets one object once the server is ready: {"url": ..., "model": ..., ...}.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.checkpoints.hub import hub_name, is_hub_name
from shardline.cli.console import make_console
from shardline.config.errors import UsageError

if TYPE_CHECKING:
    from shardline.serving.engine import EngineConfig
    from shardline.serving.launch import ServerProcess

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="model folder, hf://ORG/NAME, checkpoint or run directory")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default 8000)")
    parser.add_argument("--served-model-name", metavar="NAME", help="name for clients (default: the folder's name)")
    parser.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="key that clients must send; may be repeated"
    )
    parser.add_argument(
        "--admin-key", metavar="KEY", help="key for /admin/reload, /admin/sleep and /admin/wake (default: they are off)"
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of this origin call the API; may be repeated (default: none may)",
    )
    add_engine_arguments(parser)
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="LoRA adapter in PEFT's format, which clients ask for as the model NAME; may be repeated",
    )
    parser.add_argument(
        "--tool-call-parser",
        choices=["auto", "hermes", "llama3_json"],
        default="auto",
        help="how the model writes tool calls (default auto: as its chat template says)",
    )
    parser.add_argument(
        "--data-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="servers of the model behind this address, each with weights, cache and processes of its own (default 1)",
    )
    parser.add_argument("--end-with-stdin", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory-share", type=float, default=1.0, help=argparse.SUPPRESS)  # of what is free
    parser.add_argument(
        "--max-num-waiting",
        type=int,
        default=512,
        help="requests that may wait before others are refused with 429 (default 512)",
    )
    parser.add_argument(
        "--step-timeout", type=float, default=300.0, metavar="S", help="seconds before /health calls a step hung"
    )
    parser.add_argument(
        "--request-timeout", type=float, metavar="S", help="seconds that a reply may take (default: no limit)"
    )
    parser.add_argument(
        "--max-stored-responses",
        type=int,
        default=1000,
        metavar="N",
        help="replies of /v1/responses kept in memory (default 1000)",
    )
    parser.add_argument(
        "--drain-timeout", type=int, default=30, metavar="S", help="seconds that requests get to finish on SIGTERM"
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `serve` and `chat` share."""
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of prompt and reply together")
    parser.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="requests in a batch (default 64)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=512, metavar="N", help="tokens in a step (default 512)"
    )
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens in a KV block (default 16)")
    parser.add_argument("--kv-cache-memory", type=float, metavar="GIB", help="memory for the KV cache, in GiB")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="weights and KV cache (default fp32)")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="processes that share the model (default 1)"
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="the same bits for a request whatever shares its batch, and those of the trainer's evaluation",
    )
    parser.add_argument(
        "--quantization", choices=["none", "int8", "int4"], default="none", help="bits of the weights (default none)"
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=["auto", "fp32", "bf16", "int8"],
        default="auto",
        help="how keys and values are stored (default auto: as --dtype says)",
    )
    parser.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the KV blocks of finished requests for later ones that begin alike (default: on)",
    )
    parser.add_argument(
        "--speculative",
        choices=["none", "ngram", "draft"],
        default="none",
        help="guess tokens and check them in one step: ngram looks in the text so far, draft asks a smaller model",
    )
    parser.add_argument("--speculative-model", metavar="FOLDER", help="the smaller model of --speculative draft")
    parser.add_argument(
        "--num-speculative-tokens", type=int, default=4, metavar="N", help="tokens guessed at a time (default 4)"
    )
    parser.add_argument(
        "--logprobs-mode",
        choices=["raw", "processed"],
        default="raw",
        help="raw: log-probabilities of the model; processed: of what tokens are drawn from (default raw)",
    )
    parser.add_argument(
        "--generation-config",
        choices=["auto", "none"],
        default="auto",
        help="auto: the sampling values of generation_config.json are the defaults; none: OpenAI's are",
    )


def _adapters(words: list[str]) -> tuple[tuple[str, str], ...]:
    pairs = [(name, folder) for name, _, folder in (word.partition("=") for word in words)]
    for word, (name, folder) in zip(words, pairs, strict=True):
        if not name or not folder:
            raise UsageError(f"--lora {word} must be NAME=FOLDER, as in --lora poems=path/to/adapter.")
        if sum(name == other for other, _ in pairs) > 1:
            raise UsageError(f"--lora names {name!r} twice; give each adapter a name of its own.")
    return tuple(pairs)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Returns the engine's limits from the flags."""
    from shardline.serving.engine import EngineConfig

    return EngineConfig(
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        kv_cache_bytes=None if args.kv_cache_memory is None else int(args.kv_cache_memory * GIB),
        dtype=args.dtype,
        tensor_parallel_size=args.tensor_parallel_size,
        memory_share=getattr(args, "memory_share", 1.0),
        batch_invariant=args.batch_invariant,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        adapters=_adapters(getattr(args, "lora", [])),
        enable_prefix_caching=args.enable_prefix_caching,
        logprobs_mode=args.logprobs_mode,
        speculative=args.speculative,
        speculative_model=args.speculative_model,
        num_speculative_tokens=args.num_speculative_tokens,
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Serves until it is stopped. Returns {}: under --json the one object was printed when it was ready."""
    started_s = time.monotonic()
    console = make_console(json_mode=args.json)
    _check_limits(args)
    if args.end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    if is_hub_name(args.folder):
        own_name, _ = hub_name(args.folder)
    elif Path(args.folder).is_dir():
        own_name = Path(args.folder).resolve().name
    else:  # said before seconds of imports
        raise UsageError(f"There is no folder {args.folder}; pass the path of a Hugging Face folder, or hf://ORG/NAME.")
    from shardline.serving.server import bind, serve

    listener = bind(host=args.host, port=args.port)
    if args.data_parallel_size > 1:
        with listener:
            _serve_replicas(args, listener, started_s=started_s, model_name=args.served_model_name or own_name)
        return {}
    with listener:
        from shardline.serving.http import ServerConfig, make_app
        from shardline.serving.startup import open_engine

        imports_s = time.monotonic() - started_s
        model_name = args.served_model_name or own_name
        opened = open_engine(args.folder, engine_config(args), generation_config=args.generation_config)
        app = make_app(
            opened.engine,
            ServerConfig(
                model_name=model_name,
                folder=args.folder,
                defaults=opened.defaults,
                tool_call_parser=args.tool_call_parser,
                api_keys=tuple(args.api_key),
                admin_key=args.admin_key,
                allow_origins=tuple(args.allow_origin),
                max_num_waiting=args.max_num_waiting,
                max_stored_responses=args.max_stored_responses,
                step_timeout_s=args.step_timeout,
                request_timeout_s=args.request_timeout,
            ),
        )
        for line in opened.lines(imports_s=imports_s):
            console.print(line, markup=False)

        def announce(url: str) -> None:
            ready_s = time.monotonic() - started_s
            console.print(
                f"ready      {url} serves {model_name!r} after {ready_s:.1f} s; Ctrl-C stops it", markup=False
            )
            if args.json:
                budget = opened.engine.budget
                ready = {
                    "url": url,
                    "model": model_name,
                    "max_model_len": budget.max_model_len,
                    "kv_cache_tokens": budget.num_tokens,
                    "startup_s": round(ready_s, 3),
                }
                print(json.dumps(ready), flush=True)

        serve(app, listener, host=args.host, on_ready=announce, drain_timeout_s=args.drain_timeout)
    return {}


def _serve_replicas(args: argparse.Namespace, listener: socket.socket, *, started_s: float, model_name: str) -> None:
    """Serves through a router; the engines are in processes of their own, which get the same flags."""
    from concurrent.futures import ThreadPoolExecutor

    from shardline.serving.launch import start_server
    from shardline.serving.router import make_router
    from shardline.serving.server import serve

    console, count = make_console(json_mode=args.json), args.data_parallel_size
    flags = _replica_flags(args)
    threads = str(max(1, (os.cpu_count() or 1) // count))
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}

    def launch() -> ServerProcess:
        return start_server(args.folder, arguments=flags, environment=environment)

    with ThreadPoolExecutor(count) as pool:
        processes = list(pool.map(lambda _: launch(), range(count)))

    def announce(url: str) -> None:
        ready_s = time.monotonic() - started_s
        console.print(
            f"ready      {url} serves {model_name!r} by {count} replicas after {ready_s:.1f} s; Ctrl-C stops it",
            markup=False,
        )
        if args.json:
            ready = {**processes[0].ready, "url": url, "replicas": count, "startup_s": round(ready_s, 3)}
            print(json.dumps(ready), flush=True)

    app = make_router(processes, launch=launch)
    serve(app, listener, host=args.host, on_ready=announce, drain_timeout_s=args.drain_timeout)


def _end_with_stdin() -> None:
    """Waits until whoever started this process lets go of its standard input, and then drains."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _replica_flags(args: argparse.Namespace) -> list[str]:
    """Returns the flags that make one replica what the whole was asked to be."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    own = {
        "help",
        "folder",
        "end_with_stdin",
        "host",
        "port",
        "data_parallel_size",
        "memory_share",
        "served_model_name",
    }
    name = args.served_model_name or (
        hub_name(args.folder)[0] if is_hub_name(args.folder) else Path(args.folder).resolve().name
    )
    flags = ["--served-model-name", name, "--memory-share", str(args.memory_share / args.data_parallel_size)]
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if action.dest in own or value == action.default:
            continue
        flag = action.option_strings[0]
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            flags += [f"{flag}={item}" for item in value]
        else:
            flags.append(f"{flag}={value}")
    return flags


def _check_limits(args: argparse.Namespace) -> None:
    if args.data_parallel_size < 1:
        raise UsageError(f"--data-parallel-size {args.data_parallel_size} must be at least 1.")
    if args.request_timeout is not None and args.request_timeout <= 0:
        raise UsageError(
            f"--request-timeout {args.request_timeout:g} must be greater than 0; leave it out for no limit."
        )
    for flag, value in (("admin-key", [args.admin_key]), ("api-key", args.api_key)):
        if any(key is not None and not key.strip() for key in value):
            raise UsageError(f"--{flag} is empty; pass a key, or leave the flag out.")
