"""Triton kernels. Each equals a function of kernels/reference.py or the torch attention backend.

Triton compiles a variant of a kernel for numbers and addresses that 16 divides, and one for those that it does not.
What differs from step to step is exempt (`do_not_specialize`), so that no step waits for the compiler because it has 17
tokens.
"""

from kvasir.kernels.triton.adapters import adapt
from kvasir.kernels.triton.cache_update import copy_blocks, rope_store
from kvasir.kernels.triton.coded import coded_gemv, coded_linear, coded_linear_parts, grouped_coded_linear, is_coded_fit
from kvasir.kernels.triton.drafts import accept_drafts, lookup_drafts
from kvasir.kernels.triton.draw import draw
from kvasir.kernels.triton.encoder_attention import encoder_attention
from kvasir.kernels.triton.experts import experts, route
from kvasir.kernels.triton.filter_threshold import filter_threshold
from kvasir.kernels.triton.latent import latent_store
from kvasir.kernels.triton.linear import blocks_for, gemv, is_fit, linear_parts, parts_for, takes, tile_linear
from kvasir.kernels.triton.logit_rules import add_bias, ban_words, count_tokens, mask_logits, penalize, push_tokens
from kvasir.kernels.triton.one_row_experts import one_row_experts
from kvasir.kernels.triton.pointwise import add_layer_norm, add_rms_norm, gated_activation, layer_norm, rms_norm

__all__ = [
    "accept_drafts",
    "adapt",
    "add_bias",
    "add_layer_norm",
    "add_rms_norm",
    "ban_words",
    "blocks_for",
    "coded_gemv",
    "coded_linear",
    "coded_linear_parts",
    "copy_blocks",
    "count_tokens",
    "draw",
    "encoder_attention",
    "experts",
    "filter_threshold",
    "gated_activation",
    "gemv",
    "grouped_coded_linear",
    "is_coded_fit",
    "is_fit",
    "latent_store",
    "layer_norm",
    "linear_parts",
    "lookup_drafts",
    "mask_logits",
    "one_row_experts",
    "parts_for",
    "penalize",
    "push_tokens",
    "rms_norm",
    "rope_store",
    "route",
    "takes",
    "tile_linear",
]
