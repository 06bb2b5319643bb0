"""What `shardline plan --devices` says Shardline's trainer takes, beside the real step counted on fake tensors.

    python bench/plan_exact.py                  # all cases, about three minutes on one core; no case needs a device
    python bench/plan_exact.py --only 70b

Both columns are bytes of tensors on one rank: no driver, no communication library, nothing that an allocator holds
unused. `engine` is the closed form with the constants of FSDP2, fitted to published runs of torchtitan.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
import warnings
from dataclasses import dataclass

from shardline.config import RunConfig
from shardline.hardware.catalogue import device
from shardline.models.presets import preset
from shardline.planning.cluster.job import ClusterLayout, Job
from shardline.planning.cluster.memory import closed_form, estimate_memory
from shardline.planning.cluster.shape import ModelShape

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    layout: ClusterLayout
    micro_batch: int = 1
    sequence_length: int = 2048
    precision: str = "bf16_mixed"
    recompute: str = "none"
    optimizer: str = "adamw"

    @property
    def name(self) -> str:
        layout = self.layout
        text = f"{self.model} {layout.text()} b={self.micro_batch} T={self.sequence_length} {self.precision}"
        text += f" over {layout.shard}" if layout.shard else ""
        text += " sp" if layout.sequence_parallel else ""
        return f"{text} {self.recompute}" + (f" {self.optimizer}" if self.optimizer != "adamw" else "")

    def job(self) -> Job:
        passes = 2 * self.layout.pipeline
        return Job(
            shape=ModelShape.of(preset(self.model), name=self.model),
            device=device("h100"),
            num_devices=self.layout.num_devices,
            sequence_length=self.sequence_length,
            global_batch=self.layout.data * self.micro_batch * passes,
            micro_batch=self.micro_batch,
            layout=self.layout,
            precision=self.precision,  # pyrefly: ignore
            recompute=self.recompute,  # pyrefly: ignore
            optimizer=self.optimizer,  # pyrefly: ignore
        )

    def run(self) -> RunConfig:
        run, job, layout = RunConfig(), self.job(), self.layout
        precision = {"fp32": "fp32", "bf16_mixed": "bf16", "bf16_pure": "bf16_pure"}[self.precision]
        return dataclasses.replace(
            run,
            data=dataclasses.replace(run.data, sequence_length=self.sequence_length),
            optimizer=dataclasses.replace(run.optimizer, name=self.optimizer),
            train=dataclasses.replace(
                run.train, global_batch=job.global_batch, micro_batch=self.micro_batch, precision=precision
            ),
            parallel=dataclasses.replace(
                run.parallel,
                data=layout.data,
                tensor=layout.tensor,
                pipeline=layout.pipeline,
                zero=layout.zero,
                zero_group=layout.shard or "auto",
                sequence_parallel=layout.sequence_parallel,
                schedule=layout.schedule,
                virtual_stages=layout.virtual_stages if layout.virtual_stages > 1 else "auto",
                activation_checkpointing=self.recompute,
            ),
        )


def _piped(schedule: str, stages: int = 1, **sizes: int) -> ClusterLayout:
    return ClusterLayout(schedule=schedule, virtual_stages=stages, **sizes)  # pyrefly: ignore


ZERO_3 = ClusterLayout(data=64, zero=3)
CASES = [
    *(Case(model="llama-3.1-8b", layout=ZERO_3, recompute=kind) for kind in ("none", "selective", "full")),
    Case(model="llama-3.1-8b", layout=ZERO_3, precision="fp32"),
    Case(model="llama-3.1-8b", layout=ZERO_3, precision="bf16_pure"),
    Case(model="llama-3.1-8b", layout=ClusterLayout(data=64, zero=2)),
    Case(model="llama-3.1-8b", layout=ClusterLayout(data=64, zero=3, shard=8)),
    Case(model="llama-3.1-8b", layout=ClusterLayout(tensor=8)),
    Case(model="llama-3.1-8b", layout=ClusterLayout(tensor=8, sequence_parallel=True)),
    Case(model="llama-3.1-8b", layout=ClusterLayout(data=8, tensor=8, sequence_parallel=True, zero=3), micro_batch=2),
    Case(model="llama-3.1-8b", layout=_piped("1f1b", data=4, pipeline=4, zero=2)),
    Case(model="llama-3.1-8b", layout=_piped("interleaved", 2, pipeline=4)),
    Case(model="llama-3.1-8b", layout=_piped("zero_bubble_v", 2, pipeline=4)),
    Case(model="llama-3.1-70b", layout=ClusterLayout(data=64, zero=3), recompute="full"),
    Case(model="qwen2.5-7b", layout=ClusterLayout(data=32, zero=3), sequence_length=8192, recompute="selective"),
    Case(model="bloom-1b1", layout=ClusterLayout(data=8, zero=3), micro_batch=2),
    Case(model="llama-3.2-1b", layout=ClusterLayout(data=8, zero=2), micro_batch=4),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    args = parser.parse_args()
    from shardline.training.exact import exact_memory

    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    errors, engines = [], []
    print("| case | counted GiB | predicted | error | engine's constants | error | s |\n|---|---|---|---|---|---|---|")
    for case in CASES:
        if args.only not in case.name:
            continue
        job, started = case.job(), time.perf_counter()
        found = estimate_memory(job, measure="allocated")
        rank = found.pipeline_rank * case.layout.data * case.layout.tensor
        counted = exact_memory(case.run(), preset(case.model), world_size=job.num_devices, rank=rank).peak_bytes
        fitted = closed_form(job, measure="allocated").expected_bytes
        errors.append(found.expected_bytes / counted - 1)
        engines.append(fitted / counted - 1)
        print(
            f"| {case.name} | {counted / GIB:.2f} | {found.expected_bytes / GIB:.2f} | {errors[-1]:+.1%} "
            f"| {fitted / GIB:.2f} | {engines[-1]:+.1%} | {time.perf_counter() - started:.1f} |",
            flush=True,
        )
    for name, found in (("predicted", errors), ("by the engine's constants", engines)):
        within = sum(abs(error) <= 0.1 for error in found)
        print(f"\n{name}: {within} of {len(found)} within 10 %, worst {max(found, key=abs):+.1%}")


if __name__ == "__main__":
    main()
