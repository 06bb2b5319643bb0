"""How the processes of a run are arranged: one grid of ranks, axes (pipeline, data, tensor).

layout = Layout.resolve(config.parallel, world_size=4)      # Layout(data=4, tensor=1, pipeline=1, zero=2)
mesh = layout.mesh("cpu")                                   # a DeviceMesh; mesh["data"] is this rank's data group
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardline.config import InfeasibleError, ParallelConfig, TrainConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Layout"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks along each axis, and the ZeRO stage of the data axis."""

    data: int
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0

    def __str__(self) -> str:
        return f"data {self.data} x tensor {self.tensor} x pipeline {self.pipeline}, ZeRO-{self.zero}"

    @property
    def num_ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    @classmethod
    def resolve(cls, parallel: ParallelConfig, *, world_size: int) -> Layout:
        """Returns the layout for `world_size` processes; raises `InfeasibleError` with the equation that fails."""
        fixed = parallel.tensor * parallel.pipeline
        if fixed > 1:
            raise InfeasibleError(
                f"parallel.tensor x parallel.pipeline = {parallel.tensor} x {parallel.pipeline}: this version lays a "
                "model out over data ranks only (ZeRO 0-3); set both to 1."
            )
        data = world_size if parallel.data == "auto" else parallel.data
        if data * fixed != world_size:
            raise InfeasibleError(
                f"parallel.data x parallel.tensor x parallel.pipeline = {data} x {parallel.tensor} x "
                f"{parallel.pipeline} = {data * fixed} processes, but {world_size} "
                f"{'was' if world_size == 1 else 'were'} started; start {data * fixed} (--nproc {data * fixed}) or set "
                "parallel.data to auto."
            )
        return cls(data=data, tensor=parallel.tensor, pipeline=parallel.pipeline, zero=parallel.zero)

    def accumulation(self, train: TrainConfig) -> int:
        """Returns the micro-batches that each data rank runs in a step."""
        rows = self.data * train.micro_batch
        if train.global_batch % rows:
            raise InfeasibleError(
                f"train.global_batch = {train.global_batch} is not a multiple of data ranks x train.micro_batch = "
                f"{self.data} x {train.micro_batch} = {rows}; set train.global_batch to "
                f"{max(1, round(train.global_batch / rows)) * rows}, or lower train.micro_batch."
            )
        return train.global_batch // rows

    def mesh(self, device_type: str) -> DeviceMesh:
        """Returns the grid as a DeviceMesh with the axes `pipeline`, `data` and `tensor`."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = (self.pipeline, self.data, self.tensor)
        return init_device_mesh(device_type, shape, mesh_dim_names=("pipeline", "data", "tensor"))
