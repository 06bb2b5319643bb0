"""Show the resolved config, or the JSON schema of the config file.

shardline config show [FILE.yaml] [--section.field VALUE ...]
shardline config schema > shardline.schema.json
"""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from shardline.config import dump_config, json_schema, load_config

TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["show", "schema"], help="the resolved config, or the JSON schema")
    parser.add_argument("file", nargs="?", help="YAML config; without it the defaults")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.what == "schema":
        schema = json_schema()
        if not args.json:
            print(msgspec.json.format(msgspec.json.encode(schema)).decode())
        return schema
    config = load_config(args.file, args.overrides)
    if not args.json:
        print(dump_config(config), end="")
    return msgspec.to_builtins(config)
