"""Paged attention by Triton kernels: decodes in one launch, chunks in another. Lengths are read on the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.attention.base import AttentionBatch
from kvasir.kernels.tiles import Tiles, find_tiles
from kvasir.kernels.triton.paged_decode import Workspace, paged_decode
from kvasir.kernels.triton.paged_prefill import paged_prefill

ROOM = 32  # times as much as chunks fill, a grid may have; estimated, not measured


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
            tiles = _list_tiles(batch) if _differ_much(batch.query_lens[n:]) else None
            longest = int(batch.query_lens[n:].max()) if tiles is None else tiles.height
            rows, starts, lengths = batch.rows[n:], batch.query_start[n:], batch.seq_lens[n:]
            paged_prefill(
                query, kv_cache, batch.tables, rows, starts, lengths, longest, out, scale, window, softcap, tiles
            )
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


def _differ_much(query_lens: NDArray[np.int32]) -> bool:
    """Whether nearly all of a grid with room for the longest chunk, for every chunk, would be empty: each place in it
    costs a program or a look, so that a long prompt among hundreds of short ones would cost more than it is."""
    return len(query_lens) * int(query_lens.max()) > ROOM * int(query_lens.sum())


def _list_tiles(batch: AttentionBatch) -> Tiles:
    """The tiles of the chunks alone, listed once per step."""
    if "tiles" not in batch.notes:
        n, starts = batch.num_decodes, batch.query_start
        counts = starts[n + 1 :] - starts[n:-1]
        batch.notes["tiles"] = find_tiles(counts, batch.seq_lens[n:], int(batch.query_lens[n:].sum()))
    tiles: Tiles = batch.notes["tiles"]
    return tiles
