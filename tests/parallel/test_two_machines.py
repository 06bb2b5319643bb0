"""Two machines for real: network namespaces joined by a veth pair, each with its own host name and process tree.

One torchrun on each, a c10d rendezvous across the wire, gloo over it. Then one machine loses its power and another
takes its place.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from parallel.cluster import TORCHRUN, Cluster

LIMIT_S = 4
STEPS = 60
_numbers = itertools.count(os.getpid() % 10000 * 10)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def why_not() -> str | None:
    """Returns why machines can't be made here, or None."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if missing := [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not installed (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"sl{next(_numbers)}"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"this kernel makes no network namespace: {error.stderr.strip()}"
    try:
        ip("-n", name, "link", "add", f"{name}v", "type", "veth", "peer", "name", f"{name}w")
        subprocess.run(
            ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "true"], check=True, text=True,
            capture_output=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        return f"this kernel joins no network namespaces: {error.stderr.strip()}"
    finally:
        ip("netns", "delete", name)
    return None


REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


class Machine:
    """A network namespace with an address; what runs in it has its own host name and process ids."""

    def __init__(self, address: str) -> None:
        self.name = f"sl{next(_numbers)}"
        self.address = address
        self.port = f"{self.name}v"  # the name of its network interface
        ip("netns", "add", self.name)
        ip("-n", self.name, "link", "set", "lo", "up")

    def plug_in(self, other: Machine) -> None:
        ip("-n", self.name, "link", "add", self.port, "type", "veth", "peer", "name", other.port, "netns", other.name)
        for machine in (self, other):
            machine.up()

    def up(self) -> None:
        ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", self.port)
        ip("-n", self.name, "link", "set", self.port, "up")

    def give_cable_to(self, other: Machine) -> None:
        """Unplugs this machine, without a word to the other end, and plugs `other` in."""
        ip("-n", self.name, "link", "set", self.port, "netns", other.name, "name", other.port)
        other.up()

    def start(self, cluster: Cluster, *words: str) -> subprocess.Popen[str]:
        # Without the second, torch 2.13 tells a machine that joins later not where rank 0 is, and it waits in vain.
        variables = {"GLOO_SOCKET_IFNAME": self.port, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        hosts = cluster.folder / f"{self.name}.hosts"  # torchrun looks its own name up
        hosts.write_text(f"127.0.0.1 localhost\n{self.address} {self.name}\n")
        command = [
            "ip", "netns", "exec", self.name, "unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc",
            "sh", "-c", f'mount --bind {hosts} /etc/hosts && hostname {self.name} && exec "$@"', "sh",
            *TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d",
            "--rdzv-id", "two", "--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=2",
            "--rdzv-endpoint", "10.77.0.1:29411", "--local-addr", self.address,
            "-m", "--", "shardline", "train", str(cluster.file), *words,
        ]  # fmt: skip
        return subprocess.Popen(
            command, env=cluster.environment() | variables, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def scrap(self) -> None:
        subprocess.run(["ip", "netns", "delete", self.name], check=False, capture_output=True)


def power_off(process: subprocess.Popen[str]) -> None:
    """The whole process tree goes at once: `unshare --kill-child` holds it."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    made = [Machine(f"10.77.0.{number}") for number in (1, 2, 3)]
    made[0].plug_in(made[1])
    yield made
    for machine in made:
        machine.scrap()


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory) -> tuple[Cluster, list[float]]:
    cluster = Cluster(tmp_path_factory.mktemp("machines") / "one", timeout_s=LIMIT_S)
    cluster.write(steps=STEPS)
    command = [sys.executable, "-m", "shardline", "train", str(cluster.file), "--checkpoint.every", "0"]
    process = cluster.start(command)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return cluster, cluster.losses()


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=300)[0])
    finally:
        for process in processes:
            if process.poll() is None:
                power_off(process)
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return outputs


def test_two_machines_train_as_one(machines, one_machine):
    cluster, expected = one_machine
    run = cluster.folder / "two"
    first, second, _ = machines
    words = ["--run", str(run), "--parallel.zero", "3", "--checkpoint.every", "0"]
    cluster.run = run
    finish([machine.start(cluster, *words) for machine in (first, second)])
    np.testing.assert_allclose(cluster.losses(), expected, rtol=1e-5)


def test_a_machine_is_lost_and_replaced(machines, one_machine):
    cluster, expected = one_machine
    cluster.run = cluster.folder / "replaced"
    first, second, third = machines
    words = ["--run", str(cluster.run), "--resume", "--parallel.zero", "2", "--checkpoint.every", "4"]
    processes = [machine.start(cluster, *words) for machine in (first, second)]
    beat = cluster.beat_of(1, step=10, process=processes[0])
    assert beat.host == second.name
    second.give_cable_to(third)
    power_off(processes[1])
    replacement = third.start(cluster, *words)
    output, _ = finish([processes[0], replacement])
    assert re.search(r"Rank 0 waited \d+ s for rank 1 in ", output)  # longer where it waited in a save
    assert f"Rank 1 (process {beat.pid} on {second.name}) is silent for " in output
    assert "resumed from" in output
    np.testing.assert_allclose(cluster.losses(), expected, rtol=1e-5)
