"""Bytes of optimizer state, by optimizer and precision, and how much of it offload moves away.

    state = optimizer_state(model, run, data_ranks=2, zero=1)
    state.kept_bytes, state.moved_bytes, state.bucket_bytes

AdamW keeps two moments of every element; Muon one of the hidden matrices and AdamW's two of the rest; Adafactor a row
and a column of each matrix, which is next to nothing, and one moment of vectors; 8-bit AdamW two bytes an element and
two fp32 scales for each 256. Pure bf16 halves what is as large as the parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardline.parallel.dealing import deal, largest_first
from shardline.planning.parameters import count_parameters

if TYPE_CHECKING:
    from shardline.config import RunConfig
    from shardline.hardware.probe import Machine
    from shardline.models.config import DecoderConfig

__all__ = ["OptimizerState", "offload_notes", "optimizer_state"]

_FP32, _BF16 = 4, 2
_BUCKET_ELEMENTS = 1 << 22  # of `training.bucketed`; a test compares them
_EIGHT_BIT = 2 * (1 + 4 / 256)
_EIGHT_BIT_SMALLEST = 4096  # elements; torchao keeps smaller tensors in fp32


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """Bytes of the rank with most of them.

    kept     in the memory that is planned
    moved    on disk, or in the host's memory beside a GPU
    bucket   of what is moved, while it is stepped
    in_flight  values and gradients that are sent between owners and holders, a bucket of parameters at a time
    """

    kept_bytes: int
    moved_bytes: int
    bucket_bytes: int
    in_flight_bytes: int


def optimizer_state(
    model: DecoderConfig, run: RunConfig, *, data_ranks: int, zero: int, on_gpu: bool = False
) -> OptimizerState:
    """Returns the state of the fattest of `data_ranks` processes; `on_gpu`: it is a GPU's memory that is planned."""
    name, offload = run.optimizer.name, run.parallel.offload
    tensors = _tensors(model, run)
    dealt = data_ranks > 1 and (name != "adamw" or zero == 1)
    shares: list[list[tuple[int, float]]] = [[] for _ in range(data_ranks if dealt else 1)]
    if dealt:
        for owner, tensor in zip(deal([int(n * b) for n, b in tensors], ranks=data_ranks), tensors, strict=True):
            shares[owner].append(tensor)
    else:
        cut = data_ranks if zero >= 2 else 1
        shares[0] = [(-(-size // cut), state) for size, state in tensors]
    fattest = max(shares, key=lambda share: sum(size * state for size, state in share))
    total = int(sum(size * state for size, state in fattest))
    moved = 0
    if offload.optimizer == "disk" or (offload.optimizer == "cpu" and on_gpu):
        chosen = largest_first([size for size, _ in fattest], fraction=offload.optimizer_fraction)
        moved = int(sum(fattest[index][0] * fattest[index][1] for index in chosen))
    bucketed = name != "adamw" or offload.optimizer != "none" or run.train.precision == "bf16_pure"
    in_flight = 0
    if bucketed and dealt:
        element = _BF16 if run.train.precision == "bf16_pure" else _FP32
        largest, everything = max(size for size, _ in tensors), sum(size for size, _ in tensors)
        bucket = max(largest, min(everything, _BUCKET_ELEMENTS * data_ranks))
        owned = max(largest, bucket // data_ranks)
        in_flight = element * (4 * owned if zero >= 2 else 2 * bucket)
    return OptimizerState(
        kept_bytes=total - moved,
        moved_bytes=moved,
        bucket_bytes=min(moved, 2 * _FP32 * _BUCKET_ELEMENTS),
        in_flight_bytes=in_flight,
    )


def offload_notes(model: DecoderConfig, run: RunConfig, machine: Machine, *, data_ranks: int) -> list[str]:
    """Returns a sentence for each thing that is offloaded: what it frees here, or that it frees nothing."""
    offload, notes = run.parallel.offload, []
    has_gpu = bool(machine.accelerators)
    state = optimizer_state(model, run, data_ranks=data_ranks, zero=run.parallel.zero, on_gpu=has_gpu)
    if offload.optimizer == "disk":
        notes.append(
            f"offload.optimizer = disk: {_gib(state.moved_bytes)} of {_gib(state.moved_bytes + state.kept_bytes)} of "
            f"optimizer state per process lie in files below {run.run}/offload, at most {_gib(state.bucket_bytes)} of "
            "it in memory at a time"
        )
    if offload.optimizer == "cpu" and has_gpu:
        notes.append(f"offload.optimizer = cpu: {_gib(state.moved_bytes)} of state per process in the host's memory")
    without = [] if has_gpu else [name for name in ("optimizer", "params") if getattr(offload, name) == "cpu"]
    if without:
        notes.append(
            f"{' and '.join(f'offload.{name}' for name in without)} = cpu: this machine has no GPU, so what is to be "
            "moved to the CPU's memory is there already and nothing is gained; --parallel.offload.optimizer disk would "
            "free memory here"
        )
    return notes


def _tensors(model: DecoderConfig, run: RunConfig) -> list[tuple[int, float]]:
    """(elements, bytes of state for each) of every parameter."""
    count, name = count_parameters(model), run.optimizer.name
    element = _BF16 if run.train.precision == "bf16_pure" else _FP32
    if name == "adamw":
        return [(size, 2 * element) for size in count.tensors]
    if name == "adamw_8bit":
        eight = [size >= _EIGHT_BIT_SMALLEST and size % 256 == 0 for size in count.tensors]
        return [
            (size, _EIGHT_BIT if is_eight else 2 * element) for size, is_eight in zip(count.tensors, eight, strict=True)
        ]
    hidden = [size for layer in count.layers for size in layer.matrices + layer.expert_matrices * layer.num_experts]
    hidden += [count.projections // 2] * 2 if count.projections else []
    rest = list(count.tensors)
    for size in hidden:
        rest.remove(size)
    if name == "muon":
        return [(size, element) for size in hidden] + [(size, 2 * element) for size in rest]
    matrices = {count.embedding, *(size for size in count.head_tensors if size == count.embedding)}
    return [(size, 0.0) for size in hidden] + [(size, 0.0 if size in matrices else element) for size in rest]


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 27 else f"{count / (1 << 20):.1f} MiB"
