"""Say what is wrong with this machine, a recorded one, a run or a model folder: a line each, ok, warn or fail.

    shardline doctor                       # this machine
    shardline doctor MODEL_FOLDER          # a Hugging Face folder, a checkpoint, or hf://ORG/NAME
    shardline doctor --run RUN             # which rank of a run is slow, silent or broken
    shardline doctor --record node7.yaml   # write this machine's facts ...
    shardline doctor --machine node7.yaml  # ... and judge them anywhere
    shardline doctor --json --redact       # without names, to show to others

Every fault comes with the command or the page that mends it. A small matrix product in each dtype really runs. The
package index that pip is configured to use is asked for the last release of what is installed, once a day; --offline
takes the vendored table. Exit code 1 when a line says fail.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from shardline.cli.console import make_console
from shardline.config.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardline.hardware.checks import Check
    from shardline.hardware.machine import Machine
    from shardline.hardware.redact import Redactor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", metavar="MODEL_FOLDER", help="a model folder to look into")
    parser.add_argument("--run", metavar="RUN", help="a run directory: read its heartbeats and logs")
    parser.add_argument("--machine", metavar="FILE", help="a recorded machine to judge in place of this one")
    parser.add_argument("--record", metavar="FILE", help="write this machine's facts to FILE, as YAML")
    parser.add_argument("--disk", metavar="FOLDER", default=".", help="where a run would be written: measure this disk")
    parser.add_argument("--offline", action="store_true", help="do not ask the package index")
    parser.add_argument(
        "--redact", action="store_true", help="leave out host and user names, home folders, UUIDs, serials, addresses"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    subjects = {"MODEL_FOLDER": args.folder, "--run": args.run, "--machine": args.machine}
    given = [name for name, value in subjects.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} are different questions; ask for one of them at a time.")
    if args.record is not None and given:
        raise UsageError(
            f"--record writes this machine's facts and does not go with {given[0]}; leave one of them out."
        )
    if args.folder is not None:
        return _folder(args)
    if args.run is not None:
        return _run(args)
    return _machine(args)


def _folder(args: argparse.Namespace) -> dict[str, Any]:
    from shardline.checkpoints.diagnosis import examine_folder

    path, checks = examine_folder(args.folder)
    return _answer(args, checks, {"folder": str(path)}, _redactor(args))


def _run(args: argparse.Namespace) -> dict[str, Any]:
    from shardline.training.diagnosis import examine_run

    found = examine_run(args.run)
    redactor = _redactor(args, hosts=[rank.host for rank in found.ranks])
    return _answer(args, found.checks, {"run": args.run, **found.to_json()}, redactor)


def _machine(args: argparse.Namespace) -> dict[str, Any]:
    from shardline.hardware.checks import examine
    from shardline.hardware.health import begin_health
    from shardline.hardware.machine import read_machine, write_machine
    from shardline.hardware.package_index import find_index
    from shardline.hardware.packages import PACKAGES, installed

    recorded = None if args.machine is None else read_machine(args.machine)
    packages = installed(PACKAGES) if recorded is None else recorded.packages
    names = [name for name, version in packages.items() if version is not None]
    judge_health = begin_health(names, find=(lambda: None) if args.offline else find_index)
    machine = recorded or _probe(args)  # the index answers meanwhile
    health = judge_health(None)
    redactor = _redactor(args, machine=machine)
    facts = machine.to_json()
    if redactor is not None:
        facts = redactor.values(facts)
    if args.record is not None:
        write_machine(machine, args.record, values=facts)
    flops = next((each.gflops for each in machine.matmuls if (each.device, each.dtype) == ("cpu", "float32")), None)
    rest = {
        "machine": facts,
        "health": [dataclasses.asdict(each) for each in health],
        "matmul_gflops": flops,
    }
    return _answer(args, examine(machine, health=health), rest, redactor)


def _probe(args: argparse.Namespace) -> Machine:
    """Returns the facts of this machine, with a product in each dtype on the CPU and on each kind of device."""
    from shardline.hardware.matmuls import measure_matmuls
    from shardline.hardware.probe import probe

    machine = probe(folder=args.disk, with_torch=True, with_devices=True)
    if machine.torch is None or machine.torch.import_error:
        return machine
    kinds = {"cuda": "cuda", "rocm": "cuda", "mps": "mps"}
    devices = dict.fromkeys(["cpu", *(kinds[each.kind] for each in machine.accelerators)])
    return dataclasses.replace(machine, matmuls=tuple(row for device in devices for row in measure_matmuls(device)))


def _redactor(
    args: argparse.Namespace, *, hosts: Sequence[str] = (), machine: Machine | None = None
) -> Redactor | None:
    if not args.redact:
        return None
    from shardline.hardware.redact import Redactor

    gpus = machine.nvidia.gpus if machine is not None and machine.nvidia else ()
    versions: list[str] = []
    if machine is not None:
        versions += [version for version in machine.packages.values() if version]
        versions += machine.cuda_wheels.values()
    return Redactor.of_this_process(hosts=hosts, serials=[gpu.serial or "" for gpu in gpus], versions=versions)


def _answer(
    args: argparse.Namespace, checks: Sequence[Check], rest: dict[str, Any], redactor: Redactor | None
) -> dict[str, Any]:
    from rich.text import Text

    from shardline.hardware.checks import checks_text, to_json, verdict_of

    if redactor is not None:
        checks = [
            dataclasses.replace(
                each, facts=redactor.text(each.facts), reason=redactor.text(each.reason), fix=redactor.text(each.fix)
            )
            for each in checks
        ]
        rest = redactor.values(rest)
    console = make_console(json_mode=args.json)
    console.print(checks_text(checks, width=console.width if console.is_terminal else None))
    counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in ("fail", "warn", "ok")}
    if console.is_terminal:
        console.print(Text(", ".join(f"{count} {name}" for name, count in counts.items() if count), style="dim"))
    verdict = verdict_of(checks)
    return {"verdict": verdict, "checks": to_json(checks), **rest, "exit_code": 1 if verdict == "fail" else 0}
