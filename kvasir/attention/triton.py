"""Paged attention by Triton kernels: decodes in one launch, chunks in another. Lengths are read on the device."""

from __future__ import annotations

import torch

from kvasir.attention.base import AttentionBatch
from kvasir.kernels.tiles import Tiles
from kvasir.kernels.triton.paged_decode import Workspace, paged_decode
from kvasir.kernels.triton.paged_prefill import paged_prefill


class TritonAttention:
    """See AttentionBackend. One object serves all layers, so that they share the workspace."""

    capturable = True

    def __init__(self) -> None:
        self.workspace = Workspace()

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        assert batch.causal, "the Triton kernels are causal"
        out = torch.empty_like(query)
        if batch.tiles is not None:
            self._mixed(query, kv_cache, batch, batch.tiles, out, scale, window, softcap)
            return out
        n = batch.num_decodes
        if n:
            rows, lengths = batch.rows[:n], batch.seq_lens[:n]
            longest = int(batch.seq_bounds[:n].max()) if batch.own_bound is None else batch.own_bound
            paged_decode(
                query[:n], kv_cache, batch.tables, rows, lengths, out[:n], self.workspace, scale, window, softcap,
                longest=longest, prefix=batch.shared_prefix, order=batch.order,
            )  # fmt: skip
        if n < len(batch.query_lens):
            longest = int(batch.query_lens[n:].max())
            rows, starts, lengths = batch.rows[n:], batch.query_start[n:], batch.seq_lens[n:]
            paged_prefill(query, kv_cache, batch.tables, rows, starts, lengths, longest, out, scale, window, softcap)
        return out

    def _mixed(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: AttentionBatch,
        tiles: Tiles,
        out: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """Sequences of one token stand first, so theirs are the first queries."""
        rows, count = batch.rows, len(batch.rows)
        paged_decode(
            query[:count], kv_cache, batch.tables, rows, tiles.decode_lens, out[:count], self.workspace, scale, window,
            softcap, longest=int(batch.seq_bounds[0]),
        )  # fmt: skip
        paged_prefill(
            query, kv_cache, batch.tables, rows, batch.query_start, batch.seq_lens, tiles.height, out, scale, window,
            softcap, tiles,
        )  # fmt: skip
