"""Paged attention by the CPU library: decodes and chunks in one call, divided over sequences, heads and keys."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from kvasir.attention.base import AttentionBatch
from kvasir.attention.torch import attend_latent
from kvasir.kernels.cpu.library import CacheStruct, LayerStruct, loaded
from kvasir.kernels.cpu.ops import StepView, cache_of
from kvasir.kernels.cpu.packed import BF16, Layout, PackedStack


class CpuAttention:
    """See AttentionBackend. Queries are bfloat16; the cache is bfloat16 or int8."""

    capturable = False

    def __init__(self) -> None:
        self._heads: dict[int, LatentHeads] = {}  # by the address of a layer's matrices

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        head_dim = query.shape[2]
        if query.dtype != torch.bfloat16:
            raise TypeError(f"the library attends in bfloat16, not {query.dtype}")
        if query.stride(2) != 1 or query.stride(1) != head_dim:
            query = query.contiguous()
        return _attend(
            query,
            batch,
            cache=cache_of(kv_cache),
            kv_heads=kv_cache.shape[3],
            window=window or 0,
            scale=scale,
            softcap=softcap or 0.0,
            sinks=None if sinks is None else sinks.data_ptr(),
        )

    def forward_latent(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        up: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        unit: float = 1.0,
    ) -> torch.Tensor:
        """Chunks are computed as decodes are, in the space of the cached vectors, so that the results are the same
        bits. A cached vector is the key of all heads, and begins with their value."""
        if kv_cache.dtype != torch.bfloat16:
            return attend_latent(query, kv_cache, up, batch, scale, unit)
        latent, width = up.shape[2], kv_cache.shape[2]
        plain = query.shape[2] - (width - latent)
        heads = self._heads.get(up.data_ptr())
        if heads is None:
            heads = self._heads[up.data_ptr()] = LatentHeads(up, plain)
        vectors = query.new_empty(*query.shape[:2], width)
        heads.queries.linear(query[..., :plain], vectors[..., :latent])
        vectors[..., latent:] = query[..., plain:]
        seen = _attend(vectors, batch, cache=_vectors_of(kv_cache), kv_heads=1, scale=scale)
        out = query.new_empty(*query.shape[:2], up.shape[1] - plain)
        heads.values.linear(seen[..., :latent], out)
        return out


class LatentHeads:
    """A layer's `up` matrices in the library's order. Queries are multiplied by them before attention, results after
    it."""

    def __init__(self, up: torch.Tensor, plain: int) -> None:
        self.queries = _stack(up[:, :plain].transpose(1, 2))
        self.values = _stack(up[:, plain:])


def _stack(matrices: torch.Tensor) -> PackedStack:
    """[count, outputs, inputs]"""
    count, outputs, inputs = matrices.shape
    layout = Layout(BF16, outputs, inputs)
    stack = PackedStack(layout, torch.empty(PackedStack.memory_shape(layout, count), dtype=torch.uint8))
    for number in range(count):
        stack.matrix(number).fill(matrices[number])
    return stack


def _vectors_of(kv_cache: torch.Tensor) -> CacheStruct:
    """[blocks, block_size, width], keys and values in one."""
    block, token, last = kv_cache.stride()
    if last != 1:
        raise TypeError(f"the CPU library needs dense vectors in the cache, not strides {kv_cache.stride()}")
    return CacheStruct(data=kv_cache.data_ptr(), block_stride=block, token_stride=token, block_size=kv_cache.shape[1])


def _attend(query: torch.Tensor, batch: AttentionBatch, **layer: Any) -> torch.Tensor:
    """query [tokens, heads, head_dim], dense. `layer`: further fields of LayerStruct."""
    tokens, heads, head_dim = query.shape
    out = torch.empty(tokens, heads, head_dim, dtype=query.dtype)
    struct = LayerStruct(heads=heads, head_dim=head_dim, **layer)
    if "cpu step" not in batch.step_cache:
        batch.step_cache["cpu step"] = StepView(batch)
    step: StepView = batch.step_cache["cpu step"]
    loaded().kv_attention(
        ctypes.byref(struct),
        ctypes.byref(step.struct),
        ctypes.c_void_p(query.data_ptr()),
        ctypes.c_int64(query.stride(0)),
        ctypes.c_void_p(out.data_ptr()),
    )
    return out
