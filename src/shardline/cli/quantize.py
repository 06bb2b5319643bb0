"""Write a model folder again with weights in 8 or 4 bits.

    shardline quantize FOLDER SMALL --quantization int4
    shardline serve SMALL

The new folder is served as it is; what it costs says `shardline verify SMALL --against FOLDER`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shardline.cli.console import make_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="model folder, hf://ORG/NAME, checkpoint or run directory")
    parser.add_argument("target", type=Path, help="folder to write; it must not exist")
    parser.add_argument("--quantization", choices=["int8", "int4"], default="int8", help="bits of the weights [int8]")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from shardline.checkpoints.hub import resolve
    from shardline.checkpoints.native import find_model_folder
    from shardline.serving.quantize import save_quantized

    source = find_model_folder(resolve(args.folder))
    save_quantized(source, args.target, args.quantization)
    before, after = (
        sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in (source, args.target)
    )
    make_console(json_mode=args.json).print(
        f"{args.target}: {after / 2**20:.1f} MiB of weights, {after / before:.1%} of {source}", markup=False
    )
    return {"folder": str(args.target), "weights_bytes": after, "source_weights_bytes": before}
