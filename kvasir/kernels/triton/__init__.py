"""Triton kernels. Each equals a function of kernels/reference.py or the torch attention backend."""

from kvasir.kernels.triton.activation import silu_mul
from kvasir.kernels.triton.block_copy import copy_blocks
from kvasir.kernels.triton.draw import draw
from kvasir.kernels.triton.gemv import gemv, takes
from kvasir.kernels.triton.grouped_linear import grouped_linear
from kvasir.kernels.triton.logit_floor import logit_floor
from kvasir.kernels.triton.norm import add_rms_norm, rms_norm
from kvasir.kernels.triton.rope_store import rope_store

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "draw",
    "gemv",
    "grouped_linear",
    "logit_floor",
    "rms_norm",
    "rope_store",
    "silu_mul",
    "takes",
]
