"""Write the submission file of a run on many machines. Nothing is submitted: the last line says how to do that.

    shardline launch slurm run.yaml --nodes 2 > run.sbatch               # then: sbatch run.sbatch
    shardline launch kubernetes run.yaml --output job.yaml               # then: kubectl apply -f job.yaml
    shardline launch skypilot run.yaml --bucket s3://BUCKET --output task.yaml    # then: sky jobs launch task.yaml
    shardline launch slurm run.yaml --nodes 4 --nproc-per-node 2 --parallel.zero 3    # nodes without GPUs

Nodes and processes must satisfy the config's layout (exit code 3); what is not given follows from it. Every key of the
config can be set as --section.field VALUE. docs/machines.md is the manual.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from pathlib import Path
from typing import Any

from shardline import __version__
from shardline.cli.console import make_console
from shardline.config import RunConfig, UsageError, load_config

TAKES_OVERRIDES = True

# Flags that only one kind of cluster knows; elsewhere they are an error, never skipped.
_OWN = {
    "slurm": ("partition", "account", "qos", "time"),
    "kubernetes": ("image", "namespace", "runtime"),
    "skypilot": ("accelerator", "infra", "bucket"),
}
_SUBMIT = {"slurm": "sbatch {}", "kubernetes": "kubectl apply -f {}", "skypilot": "sky jobs launch {}"}
_FILE = {"slurm": "run.sbatch", "kubernetes": "job.yaml", "skypilot": "task.yaml"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cluster", choices=sorted(_OWN), help="what the file is for")
    parser.add_argument("file", nargs="?", help="YAML config; without it the defaults")
    parser.add_argument("--print", action="store_true", help="write to standard output (the default)")
    parser.add_argument("--output", metavar="FILE", help="write to FILE instead")
    parser.add_argument("--nodes", type=int, help="machines; follows from the layout, or 1 where parallel.data is auto")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs, and so processes, on each; follows, at most 8")
    parser.add_argument("--nproc-per-node", type=int, help="processes on each of nodes without GPUs")
    parser.add_argument("--cpus-per-process", type=int, default=8, help="cores, and threads, of a process [8]")
    parser.add_argument("--max-restarts", type=int, default=3, help="times that torchrun starts failed ranks anew [3]")
    parser.add_argument("--name", help="of the job; the default is the run directory's")
    parser.add_argument("--interface", help="network interface between the nodes, such as eth0")
    parser.add_argument("--setup", help="shell command that each node runs first, to install or activate Shardline")
    slurm = parser.add_argument_group("slurm")
    for flag in ("partition", "account", "qos"):
        slurm.add_argument(f"--{flag}", help="the cluster's default where it is not given")
    slurm.add_argument("--time", help="limit; the run saves two minutes before it [24:00:00]")
    kubernetes = parser.add_argument_group("kubernetes")
    kubernetes.add_argument("--image", help="image that has Shardline; without it the runtime's, and pip installs it")
    kubernetes.add_argument("--namespace", help="kubectl's default where it is not given")
    kubernetes.add_argument("--runtime", help="ClusterTrainingRuntime [torch-distributed]")
    skypilot = parser.add_argument_group("skypilot")
    skypilot.add_argument("--accelerator", help="kind of GPU, as `sky show-gpus` spells it [H100]")
    skypilot.add_argument("--infra", help="cloud or region; SkyPilot chooses where it is not given")
    skypilot.add_argument("--bucket", metavar="URI", help="store that every node mounts; the run directory goes there")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from shardline.parallel import submission

    config = load_config(args.file, args.overrides)
    options = _own_options(args)
    machines = submission.choose_machines(
        config, nodes=args.nodes, gpus_per_node=args.gpus_per_node, nproc_per_node=args.nproc_per_node
    )
    for flag, least in (("cpus_per_process", 1), ("max_restarts", 0)):
        if getattr(args, flag) < least:
            raise UsageError(f"--{flag.replace('_', '-')} {getattr(args, flag)} must be at least {least}.")
    writers = {
        "slurm": submission.slurm_script,
        "kubernetes": submission.kubernetes_job,
        "skypilot": submission.skypilot_task,
    }
    name = args.name or Path(config.run).name
    if args.cluster == "slurm":
        words = ([args.file] if args.file else []) + args.overrides
    else:
        words = submission.config_words(_in_bucket(config, name, args.bucket))
    text = writers[args.cluster](
        machines,
        submission.JobOptions(
            name=name,
            words=tuple(words),
            cpus_per_process=args.cpus_per_process,
            max_restarts=args.max_restarts,
            setup=args.setup or _default_setup(args),
            interface=args.interface,
            **options,
        ),
    )
    return _deliver(args, text, machines)


def _own_options(args: argparse.Namespace) -> dict[str, str]:
    for cluster, flags in _OWN.items():
        for flag in flags:
            if cluster != args.cluster and getattr(args, flag) is not None:
                raise UsageError(f"--{flag} is for `shardline launch {cluster}`; leave it out for {args.cluster}.")
    return {flag: value for flag in _OWN[args.cluster] if (value := getattr(args, flag)) is not None}


def _in_bucket(config: RunConfig, name: str, bucket: str | None) -> RunConfig:
    return dataclasses.replace(config, run=f"/bucket/{name}") if bucket else config


def _default_setup(args: argparse.Namespace) -> str | None:
    """On Slurm the nodes have the environment of whoever submits."""
    if args.cluster == "slurm" or args.image:
        return None
    return f"pip install --quiet shardline=={__version__}"


def _deliver(args: argparse.Namespace, text: str, machines: Any) -> dict[str, Any]:
    file = args.output or _FILE[args.cluster]
    submit = _SUBMIT[args.cluster].format(shlex.quote(file))
    console = make_console(json_mode=True)  # standard output is the file's
    if args.output:
        try:
            Path(args.output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"Can't write {args.output}: {error.strerror}. Choose another --output.") from None
    elif not args.json:
        print(text, end="")
    console.print(
        f"{machines}. Nothing was submitted; "
        + (f"do so with: {submit}" if args.output else f"save this as {file} and run: {submit}"),
        markup=False,
    )
    return {
        "cluster": args.cluster,
        "nodes": machines.nodes,
        "processes_per_node": machines.per_node,
        "processes": machines.num_processes,
        "reason": machines.reason,
        "output": args.output,
        "submit": submit,
        "text": text,
    }
