"""What nvidia-smi tells: the driver, each GPU, and how they are linked.

    nvidia = probe_nvidia()          # None where there is no sign of an NVIDIA device or driver

The program is asked, not NVML: it is there with every driver, in containers too, and fails in words that say why.
Drivers of different years know different fields, and refuse the whole question for one that they do not know; so it
is asked again without that one.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from shardline.hardware.machine import Nvidia, NvidiaGpu

__all__ = ["FIELDS", "parse_gpus", "parse_links", "parse_version", "probe_nvidia"]

FIELDS = (
    "index",
    "name",
    "compute_cap",
    "memory.total",
    "uuid",
    "serial",
    "pci.bus_id",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "mig.mode.current",
    "power.limit",
    "power.default_limit",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "persistence_mode",
    "compute_mode",
)
_TIMEOUT_S = 10.0
_MIB = 1 << 20

# Runs `nvidia-smi` with these words and returns (exit code, what it wrote).
Ask = Callable[[Sequence[str]], tuple[int, str]]


def probe_nvidia(*, ask: Ask | None = None, root: Path = Path("/")) -> Nvidia | None:
    """Returns what there is of NVIDIA; `ask` and `root` let tests present another machine's answers and files."""
    module = _kernel_module(root)
    # A container may be given any of the GPUs, and not the first; WSL has one node for all.
    nodes = any((root / "dev").glob("nvidia[0-9]*")) or (root / "dev/dxg").exists()
    if ask is None:
        program = shutil.which("nvidia-smi") or _first_file(root / "usr/lib/wsl/lib/nvidia-smi")
        if program is None:
            return Nvidia(driver=module, nodes=nodes) if module or nodes else None
        ask = _runner(program)
    code, text = ask([])
    if code != 0:
        return Nvidia(driver=module, nodes=nodes, error=_one_line(text) or f"nvidia-smi ended with exit code {code}")
    driver, cuda_max = parse_version(text)
    gpus = _ask_gpus(ask)
    links: tuple[tuple[str, ...], ...] = ()
    if len(gpus) > 1:
        code, text = ask(["topo", "-m"])
        links = parse_links(text) if code == 0 else ()
    return Nvidia(driver=driver or module, cuda_max=cuda_max, gpus=gpus, links=links, nodes=nodes)


def parse_version(text: str) -> tuple[str | None, str | None]:
    """Returns (driver, newest CUDA) of the header that a bare `nvidia-smi` prints."""
    driver = re.search(r"Driver Version:\s*([\d.]+)", text)
    cuda = re.search(r"CUDA(?: UMD)? Version:\s*([\d.]+)", text)
    return (driver[1] if driver else None), (cuda[1] if cuda else None)


def parse_gpus(text: str, fields: Sequence[str]) -> tuple[NvidiaGpu, ...]:
    """Returns the GPUs of `nvidia-smi --query-gpu=FIELDS --format=csv,noheader,nounits`."""
    found = []
    for row in csv.reader(io.StringIO(text), skipinitialspace=True):
        if len(row) != len(fields):
            continue  # an empty line, or a warning that the program prints among its answers
        values = {name: _value(word) for name, word in zip(fields, row, strict=True)}
        index = _number(values.get("index"))
        if index is None:
            continue
        memory_mib = _number(values.get("memory.total"))
        errors = _number(values.get("ecc.errors.uncorrected.volatile.total"))
        width, width_max = (_number(values.get(f"pcie.link.width.{which}")) for which in ("current", "max"))
        found.append(
            NvidiaGpu(
                index=int(index),
                name=values.get("name") or "NVIDIA GPU",
                capability=values.get("compute_cap"),
                memory_bytes=None if memory_mib is None else int(memory_mib * _MIB),
                uuid=values.get("uuid"),
                serial=None if values.get("serial") == "0" else values.get("serial"),
                bus_id=values.get("pci.bus_id"),
                ecc=_switch(values.get("ecc.mode.current")),
                uncorrected_errors=None if errors is None else int(errors),
                mig=_switch(values.get("mig.mode.current")),
                power_limit_w=_number(values.get("power.limit")),
                power_default_w=_number(values.get("power.default_limit")),
                pcie_width=None if width is None else int(width),
                pcie_width_max=None if width_max is None else int(width_max),
                persistence=_switch(values.get("persistence_mode")),
                compute_mode=values.get("compute_mode"),
            )
        )
    return tuple(found)


def parse_links(text: str) -> tuple[tuple[str, ...], ...]:
    """Returns the matrix between GPUs of `nvidia-smi topo -m`; () where it is not printed whole."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the program underlines its header, even in a pipe
    lines = [line.split() for line in plain.splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and words[1:2] != ["X"]), None)
    rows = [words for words in lines if re.fullmatch(r"GPU\d+", "".join(words[:1])) and "X" in words]
    size = len(rows)
    if header is None or sum(bool(re.fullmatch(r"GPU\d+", word)) for word in header) != size:
        return ()
    matrix = tuple(tuple(words[1 : size + 1]) for words in rows)
    return matrix if all(len(row) == size and row[i] == "X" for i, row in enumerate(matrix)) else ()


def _ask_gpus(ask: Ask) -> tuple[NvidiaGpu, ...]:
    fields = list(FIELDS)
    while fields:
        code, text = ask([f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
        if code == 0:
            return parse_gpus(text, fields)
        unknown = re.search(r'Field "([\w.]+)" is not a valid field', text)
        if unknown is None or unknown[1] not in fields:
            return ()
        fields.remove(unknown[1])
    return ()


def _value(word: str) -> str | None:
    """None for what nvidia-smi writes where a GPU has no such fact: [N/A], [Not Supported], [Unknown Error]."""
    word = word.strip()
    return None if not word or word == "N/A" or re.fullmatch(r"\[.*\]", word) else word


def _number(word: str | None) -> float | None:
    match = re.match(r"-?\d+(\.\d+)?", word or "")  # a driver that ignores `nounits` writes "300.00 W"
    return float(match[0]) if match else None


def _switch(word: str | None) -> bool | None:
    return {"enabled": True, "disabled": False, "on": True, "off": False}.get((word or "").lower())


def _kernel_module(root: Path) -> str | None:
    """The version of the loaded kernel module, which works without nvidia-smi."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match[1] if match else None


def _first_file(path: Path) -> str | None:
    return str(path) if path.is_file() else None


def _runner(program: str) -> Ask:
    def ask(words: Sequence[str]) -> tuple[int, str]:
        try:
            done = subprocess.run(
                [program, *words], capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return 1, f"nvidia-smi did not answer within {_TIMEOUT_S:.0f} s"
        except OSError as error:
            return 1, f"nvidia-smi can't be run: {error.strerror}"
        return done.returncode, done.stdout + done.stderr

    return ask


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
