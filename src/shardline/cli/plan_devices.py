"""`shardline plan ... --devices`: what is asked in the command's words, for training and for serving."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from shardline.cli.console import make_console
from shardline.config import InfeasibleError, RunConfig, UsageError, load_config
from shardline.config.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table
    from rich.text import Text

    from shardline.hardware.catalogue import Device
    from shardline.models.config import DecoderConfig
    from shardline.planning.cluster.search import Found
    from shardline.planning.cluster.shape import ModelShape
    from shardline.planning.cluster.space import Asked

__all__ = ["add_arguments", "config_model", "run", "say", "unused_flags"]

_MOST = 10_000_000
_PRECISIONS = {"fp32": "fp32", "bf16": "bf16_mixed", "fp16": "fp16_mixed", "bf16_pure": "bf16_pure"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    other = parser.add_argument_group("on other devices, in closed form")
    other.add_argument("--devices", help="how many of what: 8xV100-32GB, 64xH100, cpu:4, this")
    other.add_argument("--nodes", type=int, help="machines that they are in; the default is as the device is sold")
    other.add_argument("--for", dest="purpose", choices=("train", "serve"), default="train", help="(default: train)")
    other.add_argument("--model-shape", help="layers=..,hidden=..,heads=..,kv_heads=..,ffn=..,vocab=..")
    other.add_argument("--params", type=float, help="number of parameters, as 13e9, where that is all that is known")
    other.add_argument(
        "--layout", default="", help="what of the layout is given: tp=2,pp=4,zero=1; the rest is searched"
    )
    other.add_argument("--top", type=int, default=5, help="layouts in the table (default 5)")
    other.add_argument("--html", metavar="FILE", help="write the answer as a page, too")
    other.add_argument(
        "--truth", metavar="CSV", help="predict the runs of a file with the columns of docs/plan-accuracy.md"
    )
    train = parser.add_argument_group("training on them")
    train.add_argument("--sequence-length", "--seq", type=int, help="tokens of a row (default 2048)")
    train.add_argument("--global-batch", type=int, help="rows of a step; the default is 8 for each device")
    train.add_argument("--micro-batch", type=int, help="rows of a pass (default: what is best)")
    train.add_argument("--micro-batches", type=int, help="passes of a data rank in a step (default: what is best)")
    train.add_argument(
        "--precision", help="bf16_mixed, fp16_mixed, fp32, bf16_pure, fp8_mixed, ... (default: of 16 bits)"
    )
    train.add_argument("--optimizer", help="adamw (default), adamw_8bit, sgd, adafactor, muon")
    train.add_argument("--engine", help="who trains: shardline (default), fsdp2, deepspeed, megatron, ...")
    train.add_argument("--recompute", choices=("none", "selective", "full"), help="(default: what is best)")
    train.add_argument(
        "--offload", help="kept in the host: optimizer,parameters,activations, or none (default: what has to be)"
    )
    train.add_argument(
        "--exact", action="store_true", help="count the answer's memory too: Shardline's own step on fake tensors"
    )
    train.add_argument("--tokens", type=float, help="tokens to train on in all, as 2e12: days are calculated")
    train.add_argument("--price", type=float, help="of one device's hour: the cost is calculated")
    serve = parser.add_argument_group("serving on them")
    serve.add_argument("--prompt-tokens", type=int, default=1024, help="of a request (default 1024)")
    serve.add_argument("--output-tokens", type=int, default=256, help="of a reply (default 256)")
    serve.add_argument("--request-rate", type=float, help="requests a second, of all replicas together")
    serve.add_argument("--ttft-limit", type=float, help="longest mean time to the first token, seconds")
    serve.add_argument("--tpot-limit", type=float, help="longest mean time of each further token, seconds")
    serve.add_argument("--weights", help="bf16, fp16, fp32, fp8, int8, int4, nf4 (default: of 16 bits)")
    serve.add_argument("--cache", help="the KV cache's type: bf16, fp16, fp32, fp8, int8 (default: of 16 bits)")
    serve.add_argument("--runtime", default="shardline", help="who serves: shardline (default), vllm, ...")


def unused_flags(args: argparse.Namespace) -> list[str]:
    """Returns the flags given that say nothing without --devices."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    flags = {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}
    return [flags[name] for name, value in defaults.items() if getattr(args, name) != value]


def run(args: argparse.Namespace) -> dict[str, Any]:
    from shardline.hardware.catalogue import parse_devices

    limits = ("nodes", "sequence_length", "global_batch", "micro_batch", "micro_batches", "top")
    for name in (*limits, "prompt_tokens", "output_tokens"):
        _check(name, getattr(args, name), 1, _MOST)
    for name in ("tokens", "price", "request_rate", "ttft_limit", "tpot_limit"):
        _check(name, getattr(args, name), 1e-9, 1e18)
    if args.price is not None and args.tokens is None:
        raise UsageError("--price is of a device's hour; give --tokens too, how many are to be trained on.")
    count, device = parse_devices(args.devices)
    if args.purpose == "serve":
        return _serve(args, count, device)
    return _train(args, count, device)


def _check(name: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:
        flag = name.replace("_", "-")
        raise UsageError(f"--{flag} {value:g} must be from {least:g} to {most:.0f}.")


def _train(args: argparse.Namespace, count: int, device: Device) -> dict[str, Any]:
    from shardline.planning.cluster.explain import found_lines, found_table, found_to_json
    from shardline.planning.cluster.search import search

    found = search(_asked(args, count, device), top=args.top)
    if args.html:
        from shardline.planning.cluster.page import write_page

        write_page(args.html, found, command=_command(args))
    say(args, found_lines(found), found_table(found))
    exact = {"exact": _count(found)} if args.exact else {}
    say(args, (each["text"] for each in exact.values()))
    return {**found_to_json(found), **exact, "exit_code": 0 if found.best is not None else 3}


def say(args: argparse.Namespace, lines: Iterable[str | Text], table: Table | None = None) -> None:
    """Prints lines for people, a table after the first."""
    console = make_console(json_mode=args.json)
    for index, line in enumerate(lines):
        console.print(line, highlight=False, markup=False)
        if index == 0 and table is not None:
            console.print(table)


def _count(found: Found) -> dict[str, Any]:
    """Returns the tensors of the answer's fattest rank, counted on fake tensors, beside what is calculated (GiB)."""
    from shardline.planning.cluster.explain import config_lines, has_config
    from shardline.planning.cluster.memory import estimate_memory
    from shardline.training.exact import exact_memory

    best, decoder = found.best or found.ranked[0], found.asked.shape.decoder
    if decoder is None or not has_config(found.asked):
        raise UsageError("--exact runs Shardline's own step: it takes a model that Shardline trains, and its engine.")
    job, layout = best.job, best.job.layout
    config = msgspec.convert(yaml.safe_load("\n".join(config_lines(best))), RunConfig)
    passes = min(job.num_micro_batches, 2 * layout.pipeline)  # more hold no more
    train = dataclasses.replace(config.train, global_batch=layout.data * job.micro_batch * passes)
    calculated = estimate_memory(job, measure="allocated")
    rank = calculated.pipeline_rank * layout.data * layout.tensor
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        try:
            counted = exact_memory(
                dataclasses.replace(config, train=train), decoder, world_size=job.num_devices, rank=rank
            ).peak_bytes
        except InfeasibleError as error:  # the plan itself stands
            return {"counted_gib": None, "calculated_gib": None, "rank": rank, "text": f"Not counted: {error}"}
    gib = 1 << 30
    text = (
        f"Counted on fake tensors: {counted / gib:.2f} GiB of tensors on that rank, where "
        f"{calculated.expected_bytes / gib:.2f} are calculated."
    )
    calculated_gib = calculated.expected_bytes / gib
    return {"counted_gib": counted / gib, "calculated_gib": calculated_gib, "rank": rank, "text": text}


def _serve(args: argparse.Namespace, count: int, device: Device) -> dict[str, Any]:
    from shardline.planning.cluster.serve_explain import served_lines, served_table, served_to_json
    from shardline.planning.cluster.serve_search import ServeAsked, search_serving
    from shardline.planning.cluster.serving import runtime_types
    from shardline.planning.cluster.space import parse_layout

    half = half_type(device)
    if half not in runtime_types(args.runtime)[0]:
        half = "fp32"
    shape, _ = _model(args)
    fixed = parse_layout(args.layout)
    if set(fixed) - {"tensor"}:
        other = next(name for name in fixed if name != "tensor")
        raise UsageError(
            f"--layout: a served model is laid out over tensor ranks and replicas, not {other}; use tp=..."
        )
    found = search_serving(
        ServeAsked(
            shape=shape,
            device=device,
            num_devices=count,
            num_nodes=args.nodes,
            tensor=fixed.get("tensor"),
            weights=args.weights or half,
            cache=args.cache or half,
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            request_rate=args.request_rate,
            ttft_limit_s=args.ttft_limit,
            tpot_limit_s=args.tpot_limit,
            runtime=args.runtime,
        ),
        top=args.top,
    )
    if args.html:
        from shardline.planning.cluster.serve_page import write_serve_page

        write_serve_page(args.html, found, command=_command(args))
    say(args, served_lines(found), served_table(found))
    return {**served_to_json(found), "exit_code": 0 if found.best is not None else 3}


def _command(args: argparse.Namespace) -> str:
    return shlex.join(["shardline", *args.words])


def half_type(device: Device) -> str:
    """Returns the 16-bit type that the device multiplies, or fp32."""
    return next((name for name in ("bf16", "fp16") if name in device.matmul_flops), "fp32")


def _asked(args: argparse.Namespace, count: int, device: Device) -> Asked:
    from shardline.planning.cluster.engines import engine
    from shardline.planning.cluster.space import Asked, parse_layout

    shape, config = _model(args)
    given = _of_config(config) if config is not None else {}
    half = half_type(device)
    words = {
        "sequence_length": args.sequence_length,
        "global_batch": args.global_batch,
        "micro_batch": args.micro_batch,
        "num_micro_batches": args.micro_batches,
        "precision": args.precision,
        "optimizer": args.optimizer,
        "engine": args.engine,
        "recompute": args.recompute,
        "offload": _offload(args.offload),
    }
    given |= {name: value for name, value in words.items() if value is not None}
    if args.layout:
        given["fixed"] = parse_layout(args.layout)
    given.setdefault("sequence_length", 2048)
    given.setdefault("precision", "fp32" if half == "fp32" else f"{half}_mixed")
    engine(given.get("engine", "shardline"))
    _check_optimizer(given.get("optimizer", "adamw"))
    given["global_batch"] = _global_batch(given, count)
    return Asked(
        shape=shape,
        device=device,
        num_devices=count,
        num_nodes=args.nodes,
        tokens=args.tokens,
        price=args.price,
        **given,
    )


def _check_optimizer(name: str) -> None:
    from shardline.planning.cluster.job import OPTIMIZERS

    if name not in OPTIMIZERS:
        raise UsageError(f"--optimizer {name!r} is not known{nearest(name, OPTIMIZERS)}")


def _global_batch(given: dict[str, Any], count: int) -> int:
    """Returns rows of a step: as given, derived from the others, or 8 a device.

    Raises `UsageError` where global_batch is not micro_batch x micro_batches x data.
    """
    batch, micro, passes = (given.get(name) for name in ("global_batch", "micro_batch", "num_micro_batches"))
    fixed = given.get("fixed", {})
    data = fixed.get("data")
    if data is None and {"tensor", "pipeline"} <= set(fixed):
        data = count // (fixed["tensor"] * fixed["pipeline"] * fixed.get("context", 1))
    if batch is None:
        if micro and passes and not data:
            raise UsageError(
                f"--micro-batch {micro} x --micro-batches {passes} x data ranks is a step; give the data ranks "
                "(--layout dp=...) or --global-batch."
            )
        if data and passes:
            return (micro or 1) * passes * data
        return 8 * count
    known = [(name, size) for name, size in (("micro-batch", micro), ("micro-batches", passes), ("data", data)) if size]
    product = 1
    for _, size in known:
        product *= size
    if batch % product or (len(known) == 3 and batch != product):
        equation = " x ".join(f"{name} {size}" for name, size in known)
        relation = "is not" if len(known) == 3 else "is not a multiple of"
        raise UsageError(
            f"--global-batch {batch} {relation} {equation} = {product}; leave one of them out, and it is derived."
        )
    return batch


def _offload(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    return frozenset() if text == "none" else frozenset(filter(None, text.split(",")))


def _of_config(config: RunConfig) -> dict[str, Any]:
    parallel = config.parallel
    fixed: dict[str, Any] = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "zero": parallel.zero}
    if parallel.data != "auto":
        fixed["data"] = parallel.data
    if parallel.pipeline > 1:
        fixed["schedule"] = parallel.schedule
        if parallel.virtual_stages != "auto":
            fixed["virtual_stages"] = parallel.virtual_stages
    names = {"optimizer": parallel.offload.optimizer != "none", "parameters": parallel.offload.params != "none"}
    return {
        "sequence_length": config.data.sequence_length,
        "global_batch": config.train.global_batch,
        "micro_batch": config.train.micro_batch,
        "precision": _PRECISIONS[config.train.precision],
        "optimizer": config.optimizer.name,
        "recompute": parallel.activation_checkpointing,
        "offload": frozenset(name for name, is_moved in names.items() if is_moved),
        "fixed": fixed,
    }


def _model(args: argparse.Namespace) -> tuple[ModelShape, RunConfig | None]:
    """Returns the model, and the run's config where one is given."""
    from shardline.planning.cluster.shape import ModelShape

    sources = {
        "MODEL": args.file, "--preset": args.preset, "--model-shape": args.model_shape, "--params": args.params,
    }  # fmt: skip
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        said = " and ".join(given) or "none of them"
        raise UsageError(f"--devices needs one of MODEL, --preset, --model-shape and --params; there is {said}.")
    if args.overrides and Path(args.file or "").suffix not in (".yaml", ".yml"):
        raise UsageError(f"{args.overrides[0]} changes a run's config, but none is given; name a YAML file.")
    if args.model_shape is not None:
        return ModelShape.parse(args.model_shape), None
    if args.params is not None:
        return ModelShape.from_parameters(args.params), None
    name = args.file or args.preset
    path = Path(name)
    if args.file is not None and path.suffix in (".yaml", ".yml"):
        config = load_config(name, args.overrides)
        return ModelShape.of(config_model(config), name=config.model.path or config.model.preset), config
    if path.is_file() and path.name == "config.json":
        path = path.parent
    elif args.preset is not None or not (path.is_dir() or "/" in name):
        from shardline.planning.cluster.known_shapes import known_shape

        return known_shape(name), None
    from shardline.checkpoints.hub import CONFIG_FILES, resolve
    from shardline.checkpoints.huggingface import read_config

    return ModelShape.of(read_config(resolve(str(path), patterns=CONFIG_FILES)), name=name), None


def config_model(config: RunConfig) -> DecoderConfig:
    """Returns the architecture that a run's config names."""
    if config.model.path is not None:
        from shardline.checkpoints.hub import CONFIG_FILES, resolve
        from shardline.checkpoints.huggingface import read_config

        return read_config(resolve(config.model.path, patterns=CONFIG_FILES))
    from shardline.models.presets import preset

    return preset(config.model.preset)
