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
from shardline.planning.parts import Held, hold_all

if TYPE_CHECKING:
    from shardline.config import RunConfig
    from shardline.hardware.probe import Machine
    from shardline.models.config import DecoderConfig

__all__ = ["OptimizerState", "offload_notes", "optimizer_state"]

_FP32, _BF16 = 4, 2
_BUCKET_ELEMENTS = 1 << 22  # of `training.bucketed`; a test compares them
_EIGHT_BIT = 2 * (1 + 4 / 256)
_DEALT_TENSORS = 2000
_EIGHT_BIT_SMALLEST = 4096  # elements; torchao keeps smaller tensors in fp32

_Alike = tuple[int, float, int]
"""Tensors: elements of each, bytes of state for an element, how many."""


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
    model: DecoderConfig,
    run: RunConfig,
    *,
    data_ranks: int,
    zero: int,
    shards: int | None = None,
    tensor_ranks: int = 1,
    on_gpu: bool = False,
    held: Held | None = None,
    whole: Held | None = None,
) -> OptimizerState:
    """Returns the state of the fattest of `data_ranks` x `tensor_ranks` processes that share a pipeline stage.

    shards   ranks that ZeRO-2 and 3 shard over, when it is not all data ranks
    held     what one of them holds of the stage, and `whole` what they hold together; both are the model if not given
    on_gpu   it is a GPU's memory that is planned
    """
    name, offload = run.optimizer.name, run.parallel.offload
    held = held or hold_all(model)
    # Optimizers of whole matrices deal them out to all ranks that share the stage; AdamW steps what lies there.
    by_matrix = name != "adamw"
    tensors = _tensors(model, run, (whole or held) if by_matrix else held)
    sharers = data_ranks * tensor_ranks if by_matrix else data_ranks
    dealt = sharers > 1 and (by_matrix or zero == 1)
    if dealt:
        fattest = _fattest_share(tensors, sharers)
    else:
        cut = (shards or data_ranks) if zero >= 2 else 1
        fattest = [(-(-size // cut), state, count) for size, state, count in tensors]
    total = int(sum(size * state * count for size, state, count in fattest))
    moved = 0
    if offload.optimizer == "disk" or (offload.optimizer == "cpu" and on_gpu):
        each = [(size, state) for size, state, count in fattest for _ in range(count)]
        chosen = largest_first([size for size, _ in each], fraction=offload.optimizer_fraction)
        moved = int(sum(each[index][0] * each[index][1] for index in chosen))
    bucketed = by_matrix or offload.optimizer != "none" or run.train.precision == "bf16_pure"
    in_flight = 0
    if bucketed and dealt:
        element = _BF16 if run.train.precision == "bf16_pure" else _FP32
        largest = max(size for size, _, _ in tensors)
        everything = sum(size * count for size, _, count in tensors)
        bucket = max(largest, min(everything, _BUCKET_ELEMENTS * sharers))
        owned = max(largest, bucket // sharers)
        in_flight = element * (4 * owned if zero >= 2 or tensor_ranks > 1 else 2 * bucket)
    return OptimizerState(
        kept_bytes=total - moved,
        moved_bytes=moved,
        bucket_bytes=min(moved, 2 * _FP32 * _BUCKET_ELEMENTS),
        in_flight_bytes=in_flight,
    )


def _fattest_share(tensors: list[_Alike], ranks: int) -> list[_Alike]:
    """What the rank with most state gets when whole tensors are dealt out."""
    if sum(count for _, _, count in tensors) > _DEALT_TENSORS:  # thousands of experts: all but even, and slow to deal
        total = sum(size * state * count for size, state, count in tensors)
        return [(int(max(total / ranks, *(size * state for size, state, _ in tensors))), 1.0, 1)]
    each = [(size, state) for size, state, count in tensors for _ in range(count)]
    shares: list[list[_Alike]] = [[] for _ in range(ranks)]
    for owner, (size, state) in zip(deal([int(n * b) for n, b in each], ranks=ranks), each, strict=True):
        shares[owner].append((size, state, 1))
    return max(shares, key=lambda share: sum(size * state for size, state, _ in share))


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


def _tensors(model: DecoderConfig, run: RunConfig, held: Held) -> list[_Alike]:
    """Every parameter that is held."""
    name = run.optimizer.name
    element = _BF16 if run.train.precision == "bf16_pure" else _FP32
    if name == "adamw":
        return [(size, 2 * element, count) for size, count in held.counted.items()]
    if name == "adamw_8bit":
        return [
            (size, _EIGHT_BIT if size >= _EIGHT_BIT_SMALLEST and size % 256 == 0 else 2 * element, count)
            for size, count in held.counted.items()
        ]
    hidden = held.hidden_matrices
    rest = {size: count - hidden.get(size, 0) for size, count in held.counted.items()}
    if name == "muon":
        return [(size, element, count) for size, count in hidden.items()] + [
            (size, 2 * element, count) for size, count in rest.items()
        ]
    matrix = count_parameters(model).embedding  # the embedding's and the head's
    return [(size, 0.0, count) for size, count in hidden.items()] + [
        (size, 0.0 if size == matrix else element, count) for size, count in rest.items()
    ]


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 27 else f"{count / (1 << 20):.1f} MiB"
