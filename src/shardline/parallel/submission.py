"""Submission files for clusters: an sbatch script, a Kubeflow Trainer v2 TrainJob, a SkyPilot task.

    machines = choose_machines(config, nodes=None, gpus_per_node=8, nproc_per_node=None)
    text = slurm_script(machines, JobOptions(name=..., words=("run.yaml",), cpus_per_process=8, max_restarts=3))

All three start one torchrun on each node, with a c10d rendezvous at the first. Only Slurm knows a shared file system,
so there the config stays a file; the other two carry it as command-line words.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shardline.config import InfeasibleError, ParallelConfig, RunConfig, UsageError
from shardline.parallel.grid import Layout

__all__ = [
    "JobOptions",
    "Machines",
    "choose_machines",
    "config_words",
    "kubernetes_job",
    "skypilot_task",
    "slurm_script",
]

_GPUS_PER_NODE = 8
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
_PORT = 29500
_SAVE_S = 120  # Slurm's notice before the time limit
_SHUTDOWN_S = 90  # how long torchrun lets the ranks save, less than that


@dataclass(frozen=True, kw_only=True)
class Machines:
    """How many nodes, with how many processes each, and why."""

    nodes: int
    per_node: int
    gpus: bool
    reason: str

    def __str__(self) -> str:
        nodes, processes = ("" if n == 1 else "s" for n in (self.nodes, self.per_node))
        return f"{self.nodes} node{nodes} x {self.per_node} process{processes and 'es'}: {self.reason}"

    @property
    def num_processes(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a submission file says beside the config. None leaves a line out, so that the cluster's default holds."""

    name: str
    words: tuple[str, ...]  # what follows `shardline train`
    cpus_per_process: int
    max_restarts: int
    setup: str | None = None
    interface: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str = "24:00:00"
    image: str | None = None
    namespace: str | None = None
    runtime: str = "torch-distributed"
    accelerator: str = "H100"
    infra: str | None = None
    bucket: str | None = None


def choose_machines(
    config: RunConfig, *, nodes: int | None, gpus_per_node: int | None, nproc_per_node: int | None
) -> Machines:
    """Returns the machines for the config's layout; raises `InfeasibleError` with the equation that fails.

    `nproc_per_node` asks for nodes without GPUs. What is None follows from the layout, where that says a number.
    """
    given = {"--nodes": nodes, "--gpus-per-node": gpus_per_node, "--nproc-per-node": nproc_per_node}
    for flag, value in given.items():
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value} must be at least 1.")
    if gpus_per_node is not None and nproc_per_node is not None:
        raise UsageError("--gpus-per-node and --nproc-per-node exclude one another; give the one that the nodes have.")
    per_node = gpus_per_node if nproc_per_node is None else nproc_per_node
    flag = "--gpus-per-node" if nproc_per_node is None else "--nproc-per-node"
    parallel = config.parallel
    if parallel.data == "auto":
        nodes = nodes or 1
        reason = "parallel.data is auto and takes what the nodes have"
        if per_node is None:
            per_node = next((n for n in range(_GPUS_PER_NODE, 0, -1) if _works(config, nodes * n)), _GPUS_PER_NODE)
            reason = (
                f"parallel.data is auto; as many as the layout and train.global_batch take, {_GPUS_PER_NODE} at most"
            )
    else:
        total = parallel.data * parallel.tensor * parallel.pipeline
        reason = f"the layout has {total} processes"
        if nodes is None and per_node is None:
            per_node = max(size for size in range(1, _GPUS_PER_NODE + 1) if total % size == 0)
            nodes = total // per_node
        elif nodes is None and per_node is not None:
            nodes = _share(parallel, total, per_node, flag)
        elif per_node is None and nodes is not None:
            per_node = _share(parallel, total, nodes, "--nodes")
    assert nodes is not None
    assert per_node is not None
    machines = Machines(nodes=nodes, per_node=per_node, gpus=nproc_per_node is None, reason=reason)
    Layout.resolve(parallel, world_size=machines.num_processes).accumulation(config.train)
    return machines


def config_words(config: RunConfig) -> list[str]:
    """Returns the config as the command-line words that make it from the defaults."""
    words: list[str] = []

    def walk(value: Any, default: Any, name: str) -> None:
        for field in dataclasses.fields(value):
            ours, theirs = getattr(value, field.name), getattr(default, field.name)
            key = f"{name}.{field.name}" if name else field.name
            if dataclasses.is_dataclass(ours):
                walk(ours, theirs, key)
            elif ours != theirs:
                plain = msgspec.to_builtins(ours)
                words.extend([f"--{key}", plain if isinstance(plain, str) else json.dumps(plain)])

    walk(config, RunConfig(), "")
    return words


def slurm_script(machines: Machines, options: JobOptions) -> str:
    """Returns an sbatch script that saves before its time limit, queues itself again, and goes on from there."""
    directives = {
        "job-name": options.name,
        "nodes": machines.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": machines.per_node if machines.gpus else None,
        "cpus-per-task": machines.per_node * options.cpus_per_process,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "output": "%x-%j.log",
        "open-mode": "append",
        "requeue": "",
        "signal": f"B:USR1@{_SAVE_S}",
    }
    header = [
        f"#SBATCH --{key}={value}" if value != "" else f"#SBATCH --{key}"
        for key, value in directives.items()
        if value is not None
    ]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in _environment(options).items()]
    torchrun = [
        "torchrun",
        f"--nnodes={machines.nodes}",
        f"--nproc-per-node={machines.per_node}",
        f"--max-restarts={options.max_restarts}",
        '--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:$port"',
        f"--signals-to-handle={_SIGNALS} --shutdown-timeout={_SHUTDOWN_S}",
        f"-m -- shardline train {shlex.join(options.words)}".rstrip() + " $resume",
    ]
    lines = [
        "#!/bin/bash",
        f"# {machines}.",
        *header,
        "",
        *exports,
        *([options.setup] if options.setup else []),
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "port=$((20000 + SLURM_JOB_ID % 20000))  # jobs that share a node must not share a port",
        "resume=${SLURM_RESTART_COUNT:+--resume}  # set once Slurm has queued the job again",
        "",
        "srun --kill-on-bad-exit=1 " + _wrapped(torchrun) + " &",
        "step=$!",
        "",
        f"# {_SAVE_S} s before the time limit the ranks save and end, and the job goes back into the queue.",
        "stopping=",
        "trap 'stopping=yes; kill -USR1 \"$step\"' USR1",
        'wait "$step"',
        "code=$?",
        'if [ -n "$stopping" ]; then',
        '    wait "$step"',
        "    code=$?",
        '    [ "$code" -eq 0 ] || scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def kubernetes_job(machines: Machines, options: JobOptions) -> str:
    """Returns a TrainJob (trainer.kubeflow.org/v1alpha1). Its runtime tells torchrun who it is, by PET_* variables."""
    resources = {"cpu": machines.per_node * options.cpus_per_process}
    if machines.gpus:
        resources["nvidia.com/gpu"] = machines.per_node
    script = "\n".join(
        [
            *([options.setup] if options.setup else []),
            "exec " + _wrapped(_torchrun_words(options)),
        ]
    )
    trainer: dict[str, Any] = {
        **({"image": options.image} if options.image else {}),
        "numNodes": machines.nodes,
        "numProcPerNode": machines.per_node,
        "command": ["bash", "-ec"],
        "args": [script],
        "env": [{"name": name, "value": value} for name, value in _environment(options).items()],
        "resourcesPerNode": {"requests": resources, "limits": resources},
    }
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {
            "name": _label(options.name),
            **({"namespace": options.namespace} if options.namespace else {}),
        },
        "spec": {"runtimeRef": {"name": options.runtime}, "trainer": trainer},
    }
    comment = (
        f"# {machines}.\n"
        "# The run directory, and a data or model folder, must lie on a volume that the runtime mounts in every pod.\n"
    )
    return comment + _yaml(job)


def skypilot_task(machines: Machines, options: JobOptions) -> str:
    """Returns a SkyPilot task; `sky jobs launch` starts it again after a pre-emption, and it goes on by --resume."""
    cpus = f"{machines.per_node * options.cpus_per_process}+"
    torchrun = _torchrun_words(
        options,
        '--nnodes="$SKYPILOT_NUM_NODES"',
        f"--nproc-per-node={machines.per_node}",
        f'--rdzv-backend=c10d --rdzv-id="$SKYPILOT_TASK_ID" --rdzv-endpoint="$head:{_PORT}"',
    )
    task = {
        "name": _label(options.name),
        "num_nodes": machines.nodes,
        "resources": {
            **({"infra": options.infra} if options.infra else {}),
            **({"accelerators": f"{options.accelerator}:{machines.per_node}"} if machines.gpus else {"cpus": cpus}),
        },
        "envs": _environment(options),
        **({"file_mounts": {"/bucket": {"source": options.bucket, "mode": "MOUNT"}}} if options.bucket else {}),
        **({"setup": options.setup + "\n"} if options.setup else {}),
        "run": 'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n' + _wrapped(torchrun) + "\n",
    }
    comment = f"# {machines}.\n"
    if machines.nodes > 1 and not options.bucket:
        comment += "# The run directory must lie on storage that every node mounts; --bucket URI mounts one.\n"
    return comment + _yaml(task)


def _works(config: RunConfig, num_processes: int) -> bool:
    try:
        Layout.resolve(config.parallel, world_size=num_processes).accumulation(config.train)
    except InfeasibleError:
        return False
    return True


def _share(parallel: ParallelConfig, total: int, size: int, flag: str) -> int:
    if total % size:
        raise InfeasibleError(
            f"parallel.data x parallel.tensor x parallel.pipeline = {parallel.data} x {parallel.tensor} x "
            f"{parallel.pipeline} = {total} processes can't be dealt out evenly with {flag} {size}; give a divisor of "
            f"{total}, or set parallel.data to auto."
        )
    return total // size


def _environment(options: JobOptions) -> dict[str, str]:
    # torch 2.13 keeps one store over restarts, with the addresses of processes that are gone; this makes a new one.
    environment = {"OMP_NUM_THREADS": str(options.cpus_per_process), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if options.interface:
        environment |= {"GLOO_SOCKET_IFNAME": options.interface, "NCCL_SOCKET_IFNAME": options.interface}
    return environment


def _torchrun_words(options: JobOptions, *rendezvous: str) -> list[str]:
    return [
        "torchrun",
        *rendezvous,
        f"--max-restarts={options.max_restarts}",
        f"--signals-to-handle={_SIGNALS}",
        f"-m -- shardline train {shlex.join(options.words)}".rstrip() + " --resume",
    ]


def _wrapped(parts: Sequence[str]) -> str:
    return " \\\n    ".join(parts)


def _label(name: str) -> str:
    """Returns `name` as a Kubernetes label: lower case letters, digits and dashes, at most 63."""
    return re.sub(r"[^a-z0-9]+", "-", Path(name).name.lower()).strip("-")[:63].strip("-") or "shardline"


def _yaml(value: dict[str, Any]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes scripts as literal blocks, for people, and repeats what is used twice."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, width=1000)
