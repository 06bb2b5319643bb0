"""How the processes of a run are arranged: one grid of ranks, axes (pipeline, data, tensor).

    layout = Layout.resolve(config.parallel, world_size=8)      # Layout(data=2, tensor=2, pipeline=2, zero=1, ...)
    layout.coordinates(rank)                                    # (pipeline, data, tensor)
    mesh = layout.mesh("cpu")                                   # a DeviceMesh; mesh["data"] is this rank's data group

Neighbouring ranks share the tensor axis, whose traffic is the heaviest, and lie within a machine; the pipeline's, whose
traffic is the lightest, are the furthest apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardline.config import InfeasibleError, ParallelConfig, TrainConfig
from shardline.parallel.schedules import Schedule, ScheduleName, make_schedule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Layout", "make_groups"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks along each axis, the ZeRO stage of the data axis, and how the others are run.

    zero_group       data ranks that ZeRO-2 and 3 shard over; the rest of the data axis holds copies (hybrid sharding)
    virtual_stages   pipeline stages that a rank holds
    micro_batches    of a step on one data rank; None: what the global batch leaves
    """

    data: int
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    zero_group: int | None = None
    sequence_parallel: bool = False
    schedule: ScheduleName = "1f1b"
    virtual_stages: int = 1
    micro_batches: int | None = None

    def __str__(self) -> str:
        text = f"data {self.data} x tensor {self.tensor} x pipeline {self.pipeline}, ZeRO-{self.zero}"
        if self.zero_group is not None:
            text += f" over {self.zero_group} ranks"
        if self.sequence_parallel:
            text += ", sequence parallel"
        if self.pipeline > 1:
            text += f", {self.schedule}"
        return text

    @property
    def num_ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.virtual_stages

    @classmethod
    def resolve(cls, parallel: ParallelConfig, *, world_size: int) -> Layout:
        """Returns the layout for `world_size` processes; raises `InfeasibleError` with the equation that fails."""
        fixed = parallel.tensor * parallel.pipeline
        data = parallel.data
        if data == "auto":
            if world_size % fixed:
                nearest = max(1, round(world_size / fixed)) * fixed
                raise InfeasibleError(
                    f"{_count(world_size)} not a multiple of parallel.tensor x parallel.pipeline = "
                    f"{parallel.tensor} x {parallel.pipeline} = {fixed}; start {nearest} (--nproc {nearest}), or lower "
                    "one of them."
                )
            data = world_size // fixed
        if data * fixed != world_size:
            raise InfeasibleError(
                f"parallel.data x parallel.tensor x parallel.pipeline = {data} x {parallel.tensor} x "
                f"{parallel.pipeline} = {data * fixed} processes, but {world_size} "
                f"{'was' if world_size == 1 else 'were'} started; start {data * fixed} (--nproc {data * fixed}) or set "
                "parallel.data to auto."
            )
        return cls(
            data=data,
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            zero=parallel.zero,
            zero_group=_zero_group(parallel, data),
            sequence_parallel=parallel.sequence_parallel and parallel.tensor > 1,
            schedule=parallel.schedule,
            virtual_stages=_virtual_stages(parallel),
            micro_batches=None if parallel.micro_batches == "auto" else parallel.micro_batches,
        )

    def accumulation(self, train: TrainConfig) -> int:
        """Returns the micro-batches that each data rank runs in a step."""
        rows = self.data * train.micro_batch
        if train.global_batch % rows:
            per_rank, rest = divmod(train.global_batch, self.data)
            smaller = [size for size in range(1, train.micro_batch) if per_rank % size == 0]
            raise InfeasibleError(
                f"train.global_batch = {train.global_batch} is not a multiple of data ranks x train.micro_batch = "
                f"{self.data} x {train.micro_batch} = {rows}; set train.global_batch to "
                f"{max(1, round(train.global_batch / rows)) * rows}"
                + (f", or train.micro_batch to {smaller[-1]}." if smaller and not rest else ".")
            )
        count = train.global_batch // rows
        if self.micro_batches is not None and self.micro_batches != count:
            raise InfeasibleError(
                f"data ranks x train.micro_batch x parallel.micro_batches = {self.data} x {train.micro_batch} x "
                f"{self.micro_batches} = {rows * self.micro_batches} rows, but train.global_batch = "
                f"{train.global_batch}; set parallel.micro_batches to {count} or to auto."
            )
        if self.pipeline > 1 and self.schedule == "interleaved" and count % self.pipeline:
            multiple = rows * self.pipeline
            raise InfeasibleError(
                f"An interleaved pipeline takes micro-batches in groups of parallel.pipeline = {self.pipeline}, but a "
                f"step has {count} (train.global_batch {train.global_batch} / {rows} rows); set train.global_batch to "
                f"{max(1, round(train.global_batch / multiple)) * multiple}, or parallel.schedule to 1f1b."
            )
        return count

    def make_schedule(self, num_micro_batches: int) -> Schedule:
        """Returns the order in which the pipeline's ranks work."""
        return make_schedule(
            self.schedule,
            num_ranks=self.pipeline,
            num_micro_batches=num_micro_batches,
            stages_per_rank=self.virtual_stages,
        )

    def check_depth(self, num_layers: int) -> None:
        """Raises `InfeasibleError` where the pipeline has more stages than the model has layers."""
        if self.num_stages > num_layers:
            per_rank = f" x virtual_stages = {self.virtual_stages}" if self.virtual_stages > 1 else ""
            raise InfeasibleError(
                f"parallel.pipeline = {self.pipeline}{per_rank} makes {self.num_stages} stages, but the model has only "
                f"{num_layers} layers; set parallel.pipeline to {max(1, num_layers // self.virtual_stages)}."
            )

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Returns where a rank stands on the pipeline, data and tensor axes."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return pipeline, data, tensor

    def mesh(self, device_type: str) -> DeviceMesh:
        """Returns the grid as a DeviceMesh with the axes `pipeline`, `data` and `tensor`."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = (self.pipeline, self.data, self.tensor)
        return init_device_mesh(device_type, shape, mesh_dim_names=("pipeline", "data", "tensor"))

    def zero_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Returns what FSDP2 shards over: the data axis, or (copies, shards) of it. Every rank must call it."""
        if self.zero_group is None:
            return mesh["data"]
        from torch.distributed.device_mesh import init_device_mesh

        shape = (self.pipeline, self.data // self.zero_group, self.zero_group, self.tensor)
        whole = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("pipeline", "copies", "shards", "tensor"))
        return whole["copies", "shards"]


def make_groups(lists: Iterable[list[int]]) -> ProcessGroup | None:
    """Makes a process group of each list of ranks and returns this rank's, if it is in one.

    Every rank of the world must call it with the same lists in the same order.
    """
    import torch.distributed as dist

    mine = None
    for ranks in lists:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            assert isinstance(group, dist.ProcessGroup)
            mine = group
    return mine


def _count(processes: int) -> str:
    return "1 process is" if processes == 1 else f"{processes} processes are"


def _zero_group(parallel: ParallelConfig, data: int) -> int | None:
    """The size of a sharding group where it is not the whole data axis."""
    group = parallel.zero_group
    if group == "auto" or group == data:
        return None
    if parallel.zero < 2:
        raise InfeasibleError(
            f"parallel.zero_group = {group} shards weights or gradients over a part of the data ranks, which ZeRO-"
            f"{parallel.zero} does not shard; set parallel.zero to 2 or 3, or parallel.zero_group to auto."
        )
    if data % group:
        divisors = [size for size in range(1, data + 1) if data % size == 0]
        nearest = min(divisors, key=lambda size: abs(size - group))
        raise InfeasibleError(
            f"The {data} data ranks are not a multiple of parallel.zero_group = {group}; set parallel.zero_group to "
            f"{nearest}."
        )
    return group


def _virtual_stages(parallel: ParallelConfig) -> int:
    given = None if parallel.virtual_stages == "auto" else parallel.virtual_stages
    if parallel.pipeline == 1:
        return 1
    if parallel.schedule in ("gpipe", "1f1b"):
        if given not in (None, 1):
            raise InfeasibleError(
                f"parallel.schedule = {parallel.schedule} puts one stage on a rank, not parallel.virtual_stages = "
                f"{given}; set parallel.schedule to interleaved, or parallel.virtual_stages to 1."
            )
        return 1
    if parallel.schedule == "zero_bubble_v" and given not in (None, 2):
        raise InfeasibleError(
            f"parallel.schedule = zero_bubble_v puts two stages on a rank, not parallel.virtual_stages = {given}; set "
            "parallel.virtual_stages to 2 or to auto."
        )
    if given == 1:
        raise InfeasibleError(
            "parallel.schedule = interleaved needs 2 or more stages a rank, not parallel.virtual_stages = 1; set it to "
            "2, or parallel.schedule to 1f1b."
        )
    return given or 2
