"""The manual names what there is: every flag, metric and request field, and nothing else."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import shardline.cli.serve
from shardline.serving.metrics import Metrics
from shardline.serving.protocol import ChatBody, CompletionBody

MANUAL = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    [text] = re.findall(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", MANUAL, flags=re.MULTILINE | re.DOTALL)
    return text


def test_every_flag_is_in_the_table():
    parser = argparse.ArgumentParser(add_help=False)
    shardline.cli.serve.add_arguments(parser)
    shown = (action for action in parser._actions if action.help != argparse.SUPPRESS)
    flags = {flag for action in shown for flag in action.option_strings}
    rows = "\n".join(
        line.split("|")[1] for line in section("Flags of `serve`").splitlines() if line.startswith("| `--")
    )
    assert set(re.findall(r"--[\w-]+", rows)) == flags


def test_every_metric_is_in_the_table():
    text = Metrics("m").render().decode()
    names = {
        line.split()[2].removeprefix("shardline:")
        for line in text.splitlines()
        if line.startswith("# TYPE") and not line.split()[2].endswith("_created")
    }
    listed = {
        name
        for line in section("Metrics").splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert listed == names


def test_every_request_field_is_named():
    listed = set(re.findall(r"`([a-z_]+)", section("Request fields").split("\n\n")[0]))
    fields = set(CompletionBody.__struct_fields__) | set(ChatBody.__struct_fields__)
    assert listed == fields - {"model", "prompt", "messages"}
