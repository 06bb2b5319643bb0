"""Resident memory and time of the optimizer's step, with its state in memory and on disk.

    python bench/offload_memory.py [PRESET] [FOLDER]

Each case is a process of its own: the preset's parameters and gradients, three steps of AdamW. The peak is
Linux's VmHWM. The files of the state are made in FOLDER, which should lie on a real disk.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from shardline.config import OffloadConfig, RunConfig
from shardline.models.decoder import Decoder
from shardline.models.presets import preset
from shardline.training.groups import assign_roles
from shardline.training.optimizer import begin_step, build_optimizer

CASES = {"memory": ("none", 1.0), "disk, half": ("disk", 0.5), "disk": ("disk", 1.0)}


class OneRank:
    def make_optimizer(
        self, kind: type[torch.optim.Optimizer], groups: list, **options: object
    ) -> torch.optim.Optimizer:
        return kind(groups, **options)


def measure(name: str, place: str, fraction: float, folder: str) -> dict[str, float]:
    torch.set_num_threads(1)
    config = RunConfig()
    offload = OffloadConfig(optimizer=place, optimizer_fraction=fraction)
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, offload=offload))
    decoder = Decoder(preset(name))
    for parameter in decoder.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    roles = assign_roles(config.optimizer, decoder.config)
    optimizer = build_optimizer(config, OneRank(), decoder, roles=roles, folder=Path(folder))
    times = []
    for step in range(3):
        begin_step(optimizer, rate=1e-4, step=step)
        started = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - started)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mib = {key: int(lines[key].split()[0]) / 1024 for key in ("VmHWM", "VmRSS", "RssAnon", "RssFile")}
    return {**mib, "step_s": min(times[1:])}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as folder:
        for case, (place, fraction) in CASES.items():
            words = ["--case", name, place, str(fraction), folder]
            answer = subprocess.run([sys.executable, __file__, *words], capture_output=True, check=True, text=True)
            values = json.loads(answer.stdout)
            print(f"{case:<12}" + "".join(f"  {key} {value:,.2f}" for key, value in values.items()), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5])))
    else:
        main()
