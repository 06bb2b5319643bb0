"""The numeric ops that the decoder is made of, behind one interface per op, so that a backend can be swapped."""

from shardline.kernels.attention import attention, causal_mask
from shardline.kernels.norm import rms_norm

__all__ = ["attention", "causal_mask", "rms_norm"]
