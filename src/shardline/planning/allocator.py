"""Bytes that glibc's malloc holds at the peak without anyone using them.

malloc keeps most of what a step frees, and holes between blocks that live on stay empty. With
MALLOC_MMAP_THRESHOLD_=1048576 the measured peaks are those of the other parts alone, so the difference is the
allocator's. Only blocks up to 32 MiB are kept (glibc's DEFAULT_MMAP_THRESHOLD_MAX); larger ones go back at once.
Calibrated on this engine's runs: a share of the activations; under FSDP2 a multiple of the parameters, which it
allocates and frees four times in a step (gathered, gather buffer, gradients, reduce buffer); without FSDP2, another
one where gradients outlive a micro-batch and lie amid the activations of the next. Recomputation does not lessen it:
each layer's tensors still pass between blocks that stay, and the holes that they leave are split.
"""

from __future__ import annotations

__all__ = ["KEPT_BLOCK_BYTES", "kept_by_allocator"]

KEPT_BLOCK_BYTES = 32 << 20
_OF_ACTIVATIONS = 0.35
_OF_ACTIVATIONS_SHARDED = 0.2
_OF_PARAMETERS_SHARDED = 2.5
_OF_PARAMETERS_ACCUMULATING = 1.0
_OF_PARAMETERS_ACCUMULATING_DDP = 2.0


def kept_by_allocator(*, activations: int, parameters: int, sharded: bool, replicated: bool, accumulated: bool) -> int:
    """Returns the allocator's bytes beside `activations` and `parameters`, those of them in blocks that it keeps."""
    if sharded:
        return int(_OF_ACTIVATIONS_SHARDED * activations + _OF_PARAMETERS_SHARDED * parameters)
    share = _OF_PARAMETERS_ACCUMULATING_DDP if replicated else _OF_PARAMETERS_ACCUMULATING
    return int(_OF_ACTIVATIONS * activations + (share * parameters if accumulated else 0))
