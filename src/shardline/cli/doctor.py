"""Say what this machine has and what is wrong with it: six lines, each ok, warn or fail with the fix.

    shardline doctor
    shardline doctor --json

A small fp32 matrix product really runs, so the speed is measured. Exit code 1 when a line says fail.
"""

from __future__ import annotations

import argparse
from typing import Any

from shardline.cli.console import make_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", default=".", help="where a run would be written: this disk is measured")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from shardline.hardware.checks import checks_text, examine, to_json
    from shardline.hardware.peak import measure_matmul_flops
    from shardline.hardware.probe import probe

    machine = probe(folder=args.run, with_torch=True)
    flops = measure_matmul_flops()
    checks = examine(machine, matmul_flops=flops)
    make_console(json_mode=args.json).print(checks_text(checks))
    failed = [check.name for check in checks if check.verdict == "fail"]
    return {
        "verdict": "fail" if failed else "warn" if any(c.verdict == "warn" for c in checks) else "ok",
        "checks": to_json(checks),
        "machine": machine.to_json(),
        "matmul_gflops": None if flops is None else flops / 1e9,
        "exit_code": 1 if failed else 0,
    }
