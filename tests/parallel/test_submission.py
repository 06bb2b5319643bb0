"""Submission files: valid for what reads them, true to the layout, and the sbatch script is run."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from parallel.cluster import Cluster, processes_of
from shardline.cli.main import main
from shardline.config import InfeasibleError, ParallelConfig, RunConfig, TrainConfig, UsageError, load_config
from shardline.config.schema import CheckpointConfig, OptimizerConfig
from shardline.parallel.submission import choose_machines, config_words


def machines(data, *, nodes=None, gpus=None, nproc=None, **layout):
    config = RunConfig(parallel=ParallelConfig(data=data, **layout), train=TrainConfig(global_batch=48, micro_batch=1))
    chosen = choose_machines(config, nodes=nodes, gpus_per_node=gpus, nproc_per_node=nproc)
    return chosen.nodes, chosen.per_node


def test_what_is_not_given_follows_from_the_layout():
    assert machines("auto") == (1, 8)
    assert machines("auto", nodes=3) == (3, 8)
    assert machines("auto", nodes=8) == (8, 6), "48 rows are dealt to 48 ranks, not to 64"
    assert machines("auto", nodes=3, nproc=2) == (3, 2)
    assert machines(16) == (2, 8)
    assert machines(12) == (2, 6)
    assert machines(4) == (1, 4)
    assert machines(12, gpus=4) == (3, 4)
    assert machines(12, nodes=4) == (4, 3)


def test_a_layout_that_the_machines_do_not_have_is_refused_with_its_equation():
    with pytest.raises(InfeasibleError, match=r"= 4 x 1 x 1 = 4 processes, but 6 were started"):
        machines(4, nodes=3, gpus=2)
    with pytest.raises(InfeasibleError, match=r"= 4 x 1 x 1 = 4 processes can't be dealt out evenly .* --nodes 3"):
        machines(4, nodes=3)
    with pytest.raises(InfeasibleError, match=r"train\.global_batch = 48 is not a multiple"):
        machines("auto", nodes=5, gpus=1)
    with pytest.raises(UsageError, match="exclude one another"):
        machines(4, gpus=2, nproc=2)
    with pytest.raises(UsageError, match=r"--nodes 0 must be at least 1"):
        machines(4, nodes=0)


def launch(capsys, *words: str) -> dict:
    assert main(["launch", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_refusal_is_exit_code_3(capsys):
    assert main(["launch", "slurm", "--parallel.data", "4", "--nodes", "3"]) == 3
    assert "can't be dealt out" in capsys.readouterr().err


def test_the_file_goes_to_standard_output_and_the_hint_does_not(capsys):
    assert main(["launch", "kubernetes", "--print"]) == 0
    output = capsys.readouterr()
    assert yaml.safe_load(output.out)["kind"] == "TrainJob"
    assert "Nothing was submitted; save this as job.yaml and run: kubectl apply -f job.yaml" in output.err


def test_output_writes_the_file_and_says_how_to_submit_it(tmp_path, capsys):
    file = tmp_path / "a job.sbatch"
    assert main(["launch", "slurm", "--output", str(file)]) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert f"do so with: sbatch '{file}'" in output.err
    assert file.read_text().startswith("#!/bin/bash\n")
    assert main(["launch", "slurm", "--output", str(tmp_path / "no" / "x")]) == 2


def test_a_flag_of_another_cluster_is_an_error(capsys):
    assert main(["launch", "slurm", "--image", "x"]) == 2
    assert "--image is for `shardline launch kubernetes`; leave it out for slurm." in capsys.readouterr().err
    assert main(["launch", "skypilot", "--time", "1:00:00"]) == 2


def test_the_train_job_has_the_fields_of_the_api(capsys):
    answer = launch(
        capsys, "kubernetes", "--nodes", "2", "--gpus-per-node", "4", "--image", "registry.example/shardline:1",
        "--name", "My run", "--namespace", "research", "--interface", "eth0", "--train.steps", "9",
        "--train.micro_batch", "1",
    )  # fmt: skip
    job = yaml.safe_load(answer["text"])
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["metadata"] == {"name": "my-run", "namespace": "research"}
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["image"] == "registry.example/shardline:1"
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": 32, "nvidia.com/gpu": 4}
    assert trainer["resourcesPerNode"]["requests"] == trainer["resourcesPerNode"]["limits"]
    assert {each["name"]: each["value"] for each in trainer["env"]} == {
        "OMP_NUM_THREADS": "8", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0",
    }  # fmt: skip
    assert trainer["command"] == ["bash", "-ec"]
    words = shlex.split(trainer["args"][0])
    assert words[:2] == ["exec", "torchrun"]
    assert words[words.index("shardline") + 1 :] == [
        "train", "--train.steps", "9", "--train.micro_batch", "1", "--resume",
    ]  # fmt: skip
    subprocess.run(["bash", "-n", "-c", trainer["args"][0]], check=True)
    assert "nvidia.com/gpu" not in launch(capsys, "kubernetes", "--nproc-per-node", "2")["text"]
    assert "pip install" in launch(capsys, "kubernetes")["text"], "the runtime's own image has no Shardline"


def test_the_skypilot_task_has_the_fields_of_its_schema(capsys):
    answer = launch(capsys, "skypilot", "--parallel.data", "16", "--train.global_batch", "32", "--bucket", "s3://b")
    task = yaml.safe_load(answer["text"])
    assert set(task) == {"name", "num_nodes", "resources", "envs", "file_mounts", "setup", "run"}
    assert task["num_nodes"] == 2
    assert task["resources"] == {"accelerators": "H100:8"}
    assert task["file_mounts"] == {"/bucket": {"source": "s3://b", "mode": "MOUNT"}}
    assert "--run /bucket/my-run --resume" in task["run"]
    for variable in ("SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_TASK_ID"):
        assert f"${variable}" in task["run"]
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True)
    cpu = yaml.safe_load(launch(capsys, "skypilot", "--nproc-per-node", "2", "--cpus-per-process", "3")["text"])
    assert cpu["resources"] == {"cpus": "6+"}


def test_the_sbatch_script_has_what_was_asked_for(capsys, tmp_path):
    answer = launch(
        capsys, "slurm", "--nodes", "2", "--gpus-per-node", "2", "--partition", "gpu", "--time", "1:00:00",
        "--setup", "source env/bin/activate", "--parallel.zero", "3",
    )  # fmt: skip
    assert (answer["nodes"], answer["processes_per_node"], answer["processes"]) == (2, 2, 4)
    directives = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in answer["text"].splitlines()
        if line.startswith("#SBATCH")
    )
    assert directives == {
        "job-name": "my-run", "nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "2", "cpus-per-task": "16",
        "time": "1:00:00", "partition": "gpu", "output": "%x-%j.log", "open-mode": "append", "requeue": "",
        "signal": "B:USR1@120",
    }  # fmt: skip
    assert "\nsource env/bin/activate\n" in answer["text"]
    assert "--gpus-per-node" not in launch(capsys, "slurm", "--nproc-per-node", "2")["text"]
    subprocess.run(["bash", "-n"], input=answer["text"], text=True, check=True)


def test_words_make_the_config_again():
    config = RunConfig(
        optimizer=OptimizerConfig(betas=(0.8, 0.99), lr=1e-5),
        train=TrainConfig(compile=True, steps=3),
        checkpoint=CheckpointConfig(every=0),
        run="runs/with a 'quote'",
    )
    words = shlex.split(shlex.join(config_words(config)))
    assert load_config(None, words) == config
    assert config_words(RunConfig()) == []


# A Slurm of one machine: `srun` starts its command once per node and passes signals on, as srun does.
FAKE_SRUN = """#!/usr/bin/env python3
import os, signal, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
nodes = [subprocess.Popen(words) for _ in range(int(os.environ["SLURM_NNODES"]))]
signal.signal(signal.SIGUSR1, lambda number, frame: [node.send_signal(number) for node in nodes])
sys.exit(max(abs(node.wait()) for node in nodes))
"""
FAKE_SCONTROL = """#!/bin/bash
echo "$@" >> "$SCONTROL_LOG"
[ "$1" = show ] && printf 'localhost\\nlocalhost\\n'
exit 0
"""


@pytest.fixture
def slurm(tmp_path):
    """Returns a function that submits a script: it starts it as slurmd would, on two nodes that are this machine."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)

    def submit(cluster: Cluster, script: str, **variables: str) -> subprocess.Popen[str]:
        environment = cluster.environment() | {
            "PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_NNODES": "2",
            "SCONTROL_LOG": str(tmp_path / "scontrol.log"),
            **variables,
        }
        return subprocess.Popen(
            ["bash", "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return submit


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_sbatch_script_trains_saves_before_its_limit_and_goes_on(slurm, tmp_path, capsys):
    """Two nodes of one process each. The batch shell gets SIGUSR1, as from Slurm two minutes before the time limit."""
    cluster = Cluster(tmp_path / "cluster")
    cluster.write(steps=60)
    words = ["slurm", str(cluster.file), "--nodes", "2", "--nproc-per-node", "1", "--cpus-per-process", "1"]
    script = launch(capsys, *words, "--checkpoint.every", "0")["text"]
    job = slurm(cluster, script)
    cluster.beat_of(0, step=3, process=job)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=90)
    assert job.returncode != 0, output
    done = len(cluster.losses())
    assert 3 <= done < 60
    assert re.search(rf"stopped by SIGUSR1 after step {done} of 60", output), output
    calls = (tmp_path / "scontrol.log").read_text().splitlines()
    assert calls == ["show hostnames node[0-1]", f"requeue {os.getpid()}"]
    assert _none_left(cluster)
    again = slurm(cluster, script, SLURM_RESTART_COUNT="1")
    output, _ = again.communicate(timeout=90)
    assert again.returncode == 0, output
    assert f"resumed from {cluster.run}/checkpoints/step-{done}" in output
    assert len(cluster.losses()) == 60


def _none_left(cluster: Cluster) -> bool:
    deadline = time.monotonic() + 5
    while processes_of(str(cluster.file)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not processes_of(str(cluster.file))
