"""Paged attention by Triton kernels. Lengths are read on the device.

A step of decodes is one launch, and so is a mixed step that runs as a graph. In larger mixed steps chunks have their
own launch: they take nearly all the time, and the best kernel for them does not handle single tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.attention.base import AttentionBatch
from kvasir.kernels.layout import Tiles, find_tiles
from kvasir.kernels.triton.paged_decode import Workspace, paged_decode, reads_prefixes
from kvasir.kernels.triton.paged_mixed import paged_mixed
from kvasir.kernels.triton.paged_prefill import paged_prefill

ROOM = 32  # a grid may have this many times the programs that chunks need; estimated, not measured


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
        n, tiles, shared = batch.num_decodes, batch.tiles, batch.shared
        if not reads_prefixes(kv_cache, window, softcap):
            shared = None
        longest = _longest(batch, is_read_apart=shared is not None)
        if tiles is None and _differ_much(batch.query_lens[n:]):
            tiles = _list_tiles(batch)
        if tiles is not None:
            paged_mixed(
                query, kv_cache, batch.tables, batch.rows, batch.query_start, batch.seq_lens, tiles, out,
                self.workspace, scale, window, softcap, longest=longest, shared=shared,
            )  # fmt: skip
            return out
        if n:
            rows, lengths = batch.rows[:n], batch.seq_lens[:n]
            paged_decode(
                query[:n], kv_cache, batch.tables, rows, lengths, out[:n], self.workspace, scale, window, softcap,
                longest=longest, shared=shared, order=batch.order,
            )  # fmt: skip
        if n < len(batch.query_lens):
            most = int(batch.query_lens[n:].max())
            rows, starts, lengths = batch.rows[n:], batch.query_start[n:], batch.seq_lens[n:]
            paged_prefill(query, kv_cache, batch.tables, rows, starts, lengths, most, out, scale, window, softcap)
        return out


def _longest(batch: AttentionBatch, is_read_apart: bool) -> int:
    """Upper bound of the tokens that a decode reads, without its shared prefix if that is read apart."""
    if batch.own_bound is not None and (batch.shared is None or is_read_apart):
        return batch.own_bound
    return int(batch.seq_bounds[: len(batch.rows) if batch.tiles is not None else batch.num_decodes].max(initial=0))


def _differ_much(query_lens: NDArray[np.int32]) -> bool:
    """Whether a grid that has room for the longest chunk in every sequence would be nearly empty. Each place costs a
    program or a check, so a long prompt among hundreds of short ones would cost too much."""
    return len(query_lens) * int(query_lens.max(initial=0)) > ROOM * int(query_lens.sum())


def _list_tiles(batch: AttentionBatch) -> Tiles:
    """The tiles of the batch's chunks, listed once per step."""
    if "tiles" not in batch.step_cache:
        counts = batch.query_start[1:] - batch.query_start[:-1]
        batch.step_cache["tiles"] = find_tiles(counts, batch.seq_lens, int(batch.query_lens.sum()))
    tiles: Tiles = batch.step_cache["tiles"]
    return tiles
