"""How a model is divided among tensor ranks and pipeline stages, as arithmetic: no torch, no communication.

check_tensor_parallel(config, size=4)                     # raises with the equation where it can't be
ranges = balance(layer_costs, first=embedding_cost, last=head_cost, num_stages=4)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardline.config import InfeasibleError
from shardline.models.config import DecoderConfig

__all__ = ["balance", "check_tensor_parallel"]


def check_tensor_parallel(config: DecoderConfig, *, size: int, sequence_length: int | None = None) -> None:
    """Raises `InfeasibleError` with the equation where `size` tensor ranks can't share the model.

    sequence_length   given with sequence parallelism
    """
    if config.num_heads % size:
        raise InfeasibleError(
            f"The model's {config.num_heads} heads are not a multiple of parallel.tensor = {size}; set parallel.tensor "
            f"to {_largest(config, size)}."
        )
    if not _kv_fits(config, size):
        raise InfeasibleError(
            f"Of the model's kv heads = {config.num_kv_heads} and parallel.tensor = {size} neither is a multiple of "
            f"the other, so kv heads can be neither dealt out nor shared; set parallel.tensor to "
            f"{_largest(config, size)}."
        )
    for name, extent in _extents(config):
        chunk = math.ceil(extent / size)
        if not _reaches_all(extent, size):
            raise InfeasibleError(
                f"The model's {extent} {name} in parts of {chunk} reach only {math.ceil(extent / chunk)} of "
                f"parallel.tensor = {size} ranks; set parallel.tensor to {_largest(config, size)}."
            )
    if sequence_length is not None and sequence_length % size:
        raise InfeasibleError(
            f"data.sequence_length = {sequence_length} is not a multiple of parallel.tensor = {size}, which "
            f"sequence_parallel needs; set it to {math.ceil(sequence_length / size) * size}, or turn "
            "parallel.sequence_parallel off."
        )


def _largest(config: DecoderConfig, size: int) -> int:
    """The most tensor ranks below `size` that can share the model."""

    def fits(count: int) -> bool:
        extents = (extent for _, extent in _extents(config))
        heads = config.num_heads % count == 0 and _kv_fits(config, count)
        return heads and all(_reaches_all(extent, count) for extent in extents)

    return next(count for count in range(size - 1, 0, -1) if fits(count))


def _kv_fits(config: DecoderConfig, size: int) -> bool:
    return config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0


def _extents(config: DecoderConfig) -> list[tuple[str, int]]:
    """What is dealt out in parts that need not be equal, but each rank needs one."""
    routed = [config.routes(layer) for layer in range(config.num_layers)]
    extents = [("words of the vocabulary", config.vocab_size)]
    if any(routed):
        extents.append(("inner features of an expert", config.expert_size))
    if not all(routed):
        extents.append(("inner features", config.intermediate_size))
    return extents


def _reaches_all(extent: int, size: int) -> bool:
    return math.ceil(extent / size) * (size - 1) < extent


def balance(costs: Sequence[float], *, first: float, last: float, num_stages: int) -> list[range]:
    """Returns the layers of each stage, so that the dearest stage is as cheap as can be.

    first, last   what the first and the last stage pay beside their layers: embedding and head
    Every stage gets a layer.
    """
    num_layers = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def price(start: int, end: int, stage: int) -> float:
        return sums[end] - sums[start] + (first if stage == 0 else 0) + (last if stage == num_stages - 1 else 0)

    # best[end]: (dearest stage, starts) of the first stages over the first `end` layers
    best: dict[int, tuple[float, list[int]]] = {
        end: (price(0, end, 0), [0]) for end in range(1, num_layers - num_stages + 2)
    }
    for stage in range(1, num_stages):
        best = {
            end: min(
                (max(dearest, price(start, end, stage)), [*starts, start])
                for start, (dearest, starts) in best.items()
                if start < end
            )
            for end in range(stage + 1, num_layers - num_stages + stage + 2)
        }
    starts = best[num_layers][1]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], num_layers], strict=True)]
