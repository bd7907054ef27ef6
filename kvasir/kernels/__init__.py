"""One function per operation, for every device. Worker process; knows tensors only.

`reference` defines each operation in plain torch. A version for one kind of device must equal it and is chosen here by
the tensor's device, so that layers call `kernels.rms_norm(...)` and never ask where they run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.kernels import onednn, reference
from kvasir.kernels.cpu import ops
from kvasir.kernels.cpu.library import library
from kvasir.kernels.layout import AdapterMatrices, TokenSlots
from kvasir.kernels.reference import ACTIVATIONS, ANY_TOKEN, rotary, store_kv
from kvasir.log import get_logger

logger = get_logger(__name__)

__all__ = [
    "ACTIVATIONS",
    "ANY_TOKEN",
    "accept_drafts",
    "adapt",
    "add_bias",
    "add_layer_norm",
    "add_rms_norm",
    "are_compiled",
    "ban_words",
    "coded_linear",
    "coded_linear_parts",
    "compile_listed",
    "copy_blocks",
    "count_tokens",
    "draw",
    "encoder_attention",
    "expect_compilations",
    "experts",
    "filter_threshold",
    "fused_coded_linear",
    "fused_experts",
    "fused_linear",
    "fuses_one_row",
    "gated_activation",
    "grouped_coded_linear",
    "is_coded_fit",
    "is_fit",
    "keep_list",
    "late_compilations",
    "latent_store",
    "layer_norm",
    "linear",
    "linear_parts",
    "lookup_drafts",
    "mask_logits",
    "pack_weight",
    "penalize",
    "precompile",
    "push_tokens",
    "reference_only",
    "rms_norm",
    "rope_store",
    "rotary",
    "route",
    "store_kv",
    "watch_compilations",
]


@cache
def _fast() -> Any:
    """The versions for GPUs, imported on first use: Triton takes half a second, and few processes have a GPU."""
    if find_spec("triton") is None:
        logger.warning("Triton is not installed: the GPU runs plain torch operations, which is much slower.")
        return reference
    from kvasir.kernels import triton

    return triton


def are_compiled(device: torch.device) -> bool:
    """Whether this device's versions are compiled when they are first launched."""
    return device.type == "cuda" and _fast() is not reference


def precompile() -> AbstractContextManager[None]:
    """See triton/launch.py; for a device whose kernels `are_compiled`."""
    from kvasir.kernels.triton.launch import precompile

    return precompile()


def compile_listed(list_name: str) -> bool:
    """See triton/launch.py; for a device whose kernels `are_compiled`."""
    from kvasir.kernels.triton.launch import compile_listed

    return compile_listed(list_name)


def keep_list(list_name: str) -> None:
    """See triton/launch.py; for a device whose kernels `are_compiled`."""
    from kvasir.kernels.triton.launch import keep_list

    keep_list(list_name)


def expect_compilations() -> None:
    """Note that an engine starts: kernels that are compiled before `watch_compilations` do not count as late."""
    launch = sys.modules.get("kvasir.kernels.triton.launch")
    if launch is not None:
        launch.expect_compilations()


def watch_compilations(device: torch.device) -> None:
    """Count and log kernels that are compiled from now on, while requests wait."""
    if are_compiled(device):
        from kvasir.kernels.triton.launch import watch_compilations

        watch_compilations()


def late_compilations() -> int:
    """Number of kernels that were compiled or loaded after the start."""
    launch = sys.modules.get("kvasir.kernels.triton.launch")
    return 0 if launch is None else int(launch.late_compilations())


_reference_only = False


@contextmanager
def reference_only() -> Iterator[None]:
    """Run the reference versions on every device, to check the others against them."""
    global _reference_only
    before, _reference_only = _reference_only, True
    try:
        yield
    finally:
        _reference_only = before


def _version_for(x: torch.Tensor) -> Any:
    return _fast() if x.is_cuda and not _reference_only else reference


def _any_version_for(x: torch.Tensor, *also: torch.dtype) -> Any:
    """The same for operations that the CPU library has too, for bfloat16 and the types in `also`."""
    known = x.dtype == torch.bfloat16 or x.dtype in also
    on_cpu = x.device.type == "cpu" and known and not _reference_only
    return ops if on_cpu and library() is not None else _version_for(x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    normed: torch.Tensor = _any_version_for(x).rms_norm(x, weight, eps)
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    pair: tuple[torch.Tensor, torch.Tensor] = _any_version_for(x).add_rms_norm(x, residual, weight, eps)
    return pair


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See reference.layer_norm."""
    normed: torch.Tensor = _version_for(x).layer_norm(x, weight, bias, eps, residual)
    return normed


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.add_layer_norm."""
    pair: tuple[torch.Tensor, torch.Tensor] = _version_for(x).add_layer_norm(x, residual, weight, bias, eps)
    return pair


def gated_activation(x: torch.Tensor, kind: str | tuple[float, float]) -> torch.Tensor:
    """See reference.gated_activation."""
    version = _any_version_for(x) if isinstance(kind, str) else _version_for(x)  # the CPU library clamps nothing
    active: torch.Tensor = version.gated_activation(x, kind)
    return active


def rope_store(
    qkv: torch.Tensor,
    heads: int,
    positions: torch.Tensor,
    table: torch.Tensor | None,
    kv_cache: torch.Tensor,
    *args: Any,
) -> torch.Tensor:
    """See reference.rope_store."""
    eight_bit = kv_cache.is_floating_point() and kv_cache.itemsize == 1
    version = _version_for(qkv) if eight_bit else _any_version_for(qkv)  # the CPU library has no such floats
    query: torch.Tensor = version.rope_store(qkv, heads, positions, table, kv_cache, *args)
    return query


def latent_store(query: torch.Tensor, *args: Any) -> torch.Tensor:
    """See reference.latent_store."""
    turned: torch.Tensor = _version_for(query).latent_store(query, *args)
    return turned


def step_inputs(rows: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """See reference.step_inputs."""
    version = reference if rows.is_cuda else _any_version_for(rows, torch.int64)
    inputs: tuple[torch.Tensor, ...] = version.step_inputs(rows, *args)
    return inputs


def filter_threshold(logits: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
    """See reference.filter_threshold."""
    threshold: torch.Tensor = _any_version_for(logits, torch.float32).filter_threshold(logits, *args)
    return threshold


def penalize(logits: torch.Tensor, *args: torch.Tensor) -> None:
    """See reference.penalize. On a GPU nothing waits, and lines that do not ask cost nothing, here and below."""
    _version_for(logits).penalize(logits, *args)


def add_bias(logits: torch.Tensor, *args: torch.Tensor) -> None:
    """See reference.add_bias."""
    _version_for(logits).add_bias(logits, *args)


def mask_logits(logits: torch.Tensor, *args: torch.Tensor) -> None:
    """See reference.mask_logits."""
    _version_for(logits).mask_logits(logits, *args)


def ban_words(logits: torch.Tensor, *args: torch.Tensor) -> None:
    """See reference.ban_words."""
    _version_for(logits).ban_words(logits, *args)


def count_tokens(tokens: torch.Tensor, *args: torch.Tensor) -> None:
    """See reference.count_tokens."""
    _version_for(tokens).count_tokens(tokens, *args)


def push_tokens(tokens: torch.Tensor, *args: torch.Tensor) -> None:
    """See reference.push_tokens."""
    _version_for(tokens).push_tokens(tokens, *args)


def route(logits: torch.Tensor, *how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.route."""
    routed: tuple[torch.Tensor, torch.Tensor] = _version_for(logits).route(logits, *how)
    return routed


def experts(x: torch.Tensor, *args: Any) -> torch.Tensor:
    """See reference.experts; on a GPU nothing waits."""
    y: torch.Tensor = _version_for(x).experts(x, *args)
    return y


def fused_experts(x: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
    """See reference.fused_experts. On a GPU for one row, and a shared expert that is a multiple of the others."""
    version = _version_for(x)
    if version is reference:
        return reference.fused_experts(x, *args, product=linear, **how)
    y: torch.Tensor = version.one_row_experts(x, *args, **how)
    return y


def coded_linear(x: torch.Tensor, matrix: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See reference.coded_linear."""
    y: torch.Tensor = _version_for(x).coded_linear(x, matrix, bias)
    return y


def coded_linear_parts(x: torch.Tensor, matrix: Any) -> torch.Tensor:
    """x times a quantized matrix, or parts of the product that `add_rms_norm` sums."""
    version = _version_for(x)
    y: torch.Tensor = (version.coded_linear if version is reference else version.coded_linear_parts)(x, matrix)
    return y


def is_coded_fit(matrix: Any) -> bool:
    """Whether `fused_coded_linear` takes this matrix: its inputs come as they are, and its groups suit the kernel."""
    if matrix.order is not None or matrix.column is not None:
        return False
    version = _version_for(matrix.codes)
    return version is reference or bool(version.is_coded_fit(matrix))


def fused_coded_linear(x: torch.Tensor, matrix: Any, bias: torch.Tensor | None = None, **how: Any) -> torch.Tensor:
    """See reference.fused_linear. On a GPU for one row, and a matrix that `is_coded_fit`."""
    version = _version_for(x)
    if version is reference:
        return reference.fused_linear(x, matrix, bias, product=coded_linear, **how)
    y: torch.Tensor = version.coded_gemv(x, matrix, bias, **how)
    return y


def grouped_coded_linear(x: torch.Tensor, matrices: Any, starts: torch.Tensor) -> torch.Tensor:
    """See reference.grouped_coded_linear; on a GPU nothing waits."""
    y: torch.Tensor = _version_for(x).grouped_coded_linear(x, matrices, starts)
    return y


def adapt(x: torch.Tensor, y: torch.Tensor, matrices: AdapterMatrices, slots: TokenSlots) -> torch.Tensor:
    """See reference.adapt; on a GPU nothing waits."""
    adapted: torch.Tensor = _any_version_for(x).adapt(x, y, matrices, slots)
    return adapted


def accept_drafts(tokens: torch.Tensor, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.accept_drafts."""
    found: tuple[torch.Tensor, torch.Tensor] = _any_version_for(tokens, torch.int32).accept_drafts(tokens, *args)
    return found


def lookup_drafts(history: torch.Tensor, *args: Any) -> None:
    """See reference.lookup_drafts; on a GPU nothing waits."""
    _any_version_for(history, torch.int32).lookup_drafts(history, *args)


def copy_blocks(
    source: torch.Tensor, target: torch.Tensor, source_index: torch.Tensor, target_index: torch.Tensor
) -> None:
    """See reference.copy_blocks."""
    _version_for(source).copy_blocks(source, target, source_index, target_index)


def draw(logits: torch.Tensor, *args: torch.Tensor | None) -> torch.Tensor:
    """See reference.draw."""
    tokens: torch.Tensor = _any_version_for(logits, torch.float32).draw(logits, *args)
    return tokens


def encoder_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start: torch.Tensor,
    query_lens: NDArray[np.int32],
    scale: float,
    reach: int | None = None,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """See reference.encoder_attention."""
    # The CPU library knows no biases, and no tokens that are hidden on both sides.
    all_seen = reach is None or reach >= query_lens.max(initial=0) - 1
    version = _any_version_for(query) if bias is None and all_seen else _version_for(query)
    reach = None if all_seen else reach
    seen: torch.Tensor = version.encoder_attention(
        query, key, value, query_start, query_lens, scale, reach, bias, softcap
    )
    return seen


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """A matrix in the form in which `linear` is fastest on its device; only `linear` may read the result."""
    return onednn.pack_weight(weight) if onednn.usable(weight) else weight


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] times weight [out, in] (as it is, or packed), plus bias [out]."""
    version = _version_for(x)
    if version is not reference:
        y: torch.Tensor
        if version.takes(x, weight):
            y = version.gemv(x, weight, bias)
            return y
        if (blocks := version.blocks_for(x, weight)) is not None:
            y = version.tile_linear(x.contiguous(), weight, bias, blocks)
            return y
    return (onednn if onednn.usable(x) else reference).linear(x, weight, bias)


def linear_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, in] times weight [out, in]: [rows, out], or [parts, rows, out] that must still be summed, which
    `add_rms_norm` does."""
    version = _version_for(x)
    if version is not reference and (blocks := version.parts_for(x, weight)) is not None:
        parts: torch.Tensor = version.linear_parts(x.contiguous(), weight, blocks)
        return parts
    return linear(x, weight)


def fuses_one_row(x: torch.Tensor) -> bool:
    """Whether `fused_linear` is the quicker way for this x."""
    return x.shape[0] == 1 and _version_for(x) is not reference


def is_fit(weight: torch.Tensor) -> bool:
    """Whether `fused_linear` takes this matrix."""
    version = _version_for(weight)
    return version is reference or bool(version.is_fit(weight))


def fused_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **how: Any) -> torch.Tensor:
    """See reference.fused_linear. On a GPU for one row, and a matrix that `is_fit`."""
    version = _version_for(x)
    if version is reference:
        return reference.fused_linear(x, weight, bias, product=linear, **how)
    y: torch.Tensor = version.gemv(x, weight, bias, **how)
    return y
