"""Triton kernels. Each equals a function of kernels/reference.py or the torch attention backend.

Triton compiles a variant of a kernel for numbers and addresses that 16 divides, and one for those that it does not.
What differs from step to step is exempt (`do_not_specialize`), so that no step waits for the compiler because it has 17
tokens.
"""

from kvasir.kernels.triton.activation import gated_activation
from kvasir.kernels.triton.bitmask import mask_logits
from kvasir.kernels.triton.block_copy import copy_blocks
from kvasir.kernels.triton.draw import draw
from kvasir.kernels.triton.gemv import gemv, is_fit, takes
from kvasir.kernels.triton.grouped_linear import grouped_linear
from kvasir.kernels.triton.logit_floor import logit_floor
from kvasir.kernels.triton.norm import add_rms_norm, rms_norm
from kvasir.kernels.triton.penalties import count_tokens, penalize
from kvasir.kernels.triton.rope_store import rope_store
from kvasir.kernels.triton.tile_linear import blocks_for, linear_parts, parts_for, tile_linear
from kvasir.kernels.triton.token_rules import add_bias, ban_words, push_tokens

__all__ = [
    "add_bias",
    "add_rms_norm",
    "ban_words",
    "blocks_for",
    "copy_blocks",
    "count_tokens",
    "draw",
    "gated_activation",
    "gemv",
    "grouped_linear",
    "is_fit",
    "linear_parts",
    "logit_floor",
    "mask_logits",
    "parts_for",
    "penalize",
    "push_tokens",
    "rms_norm",
    "rope_store",
    "takes",
    "tile_linear",
]
