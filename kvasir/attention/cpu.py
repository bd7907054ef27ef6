"""Paged attention by the CPU library: decodes and chunks in one call, divided over sequences, heads and keys."""

from __future__ import annotations

import ctypes

import torch

from kvasir.attention.base import AttentionBatch
from kvasir.attention.torch import attend_latent
from kvasir.kernels.cpu.library import LayerStruct, loaded
from kvasir.kernels.cpu.ops import StepView, cache_of


class CpuAttention:
    """See AttentionBackend. Queries are bfloat16; the cache is bfloat16 or int8."""

    capturable = False

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
        tokens, heads, head_dim = query.shape
        if query.dtype != torch.bfloat16:
            raise TypeError(f"the library attends in bfloat16, not {query.dtype}")
        if query.stride(2) != 1 or query.stride(1) != head_dim:
            query = query.contiguous()
        out = torch.empty(tokens, heads, head_dim, dtype=query.dtype)
        layer = LayerStruct(
            cache=cache_of(kv_cache),
            heads=heads,
            kv_heads=kv_cache.shape[3],
            head_dim=head_dim,
            window=window or 0,
            scale=scale,
            softcap=softcap or 0.0,
            sinks=None if sinks is None else sinks.data_ptr(),
        )
        if "cpu step" not in batch.step_cache:
            batch.step_cache["cpu step"] = StepView(batch)
        step: StepView = batch.step_cache["cpu step"]
        loaded().kv_attention(
            ctypes.byref(layer),
            ctypes.byref(step.struct),
            ctypes.c_void_p(query.data_ptr()),
            ctypes.c_int64(query.stride(0)),
            ctypes.c_void_p(out.data_ptr()),
        )
        return out

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
        return attend_latent(query, kv_cache, up, batch, scale, unit)
