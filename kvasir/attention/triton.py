"""Paged attention by Triton kernels. Lengths are read on the device.

A step of decodes is one launch, and so is a mixed step that runs as a graph. In larger mixed steps chunks have their
own launch: they take nearly all the time, and the best kernel for them does not handle single tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.attention.base import AttentionBatch
from kvasir.kernels.layout import Tiles, find_tiles, upload
from kvasir.kernels.triton.head_products import multiply_heads
from kvasir.kernels.triton.latent import Piece, gather_vectors, latent_decode, latent_prefill, latent_tiles
from kvasir.kernels.triton.paged_decode import Workspace, paged_decode, reads_prefixes
from kvasir.kernels.triton.paged_mixed import paged_mixed
from kvasir.kernels.triton.paged_prefill import paged_prefill

PIECE_BYTES = 256 << 20  # of keys and values that are computed at once from a latent cache
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
        sinks: torch.Tensor | None = None,
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
                self.workspace, scale, window, softcap, sinks, longest=longest, shared=shared,
            )  # fmt: skip
            return out
        if n:
            rows, lengths = batch.rows[:n], batch.seq_lens[:n]
            paged_decode(
                query[:n], kv_cache, batch.tables, rows, lengths, out[:n], self.workspace, scale, window, softcap,
                sinks, longest=longest, shared=shared, order=batch.order,
            )  # fmt: skip
        if n < len(batch.query_lens):
            most = int(batch.query_lens[n:].max())
            rows, starts, lengths = batch.rows[n:], batch.query_start[n:], batch.seq_lens[n:]
            paged_prefill(
                query, kv_cache, batch.tables, rows, starts, lengths, most, out, scale, window, softcap, sinks
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
        assert batch.causal, "the Triton kernels are causal"
        latent, n = up.shape[2], len(query) if batch.tiles is not None else batch.num_decodes
        plain = query.shape[2] - (kv_cache.shape[2] - latent)
        out = query.new_empty(*query.shape[:2], up.shape[1] - plain)
        if n:
            sums = self._sum_vectors(query[:n], kv_cache, up, batch, plain, scale, unit)
            multiply_heads(sums, up[:, plain:], out[:n])
        if n < len(query):
            self._attend_chunks(out, query, kv_cache, up, batch, scale, unit)
        return out

    def _sum_vectors(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        up: torch.Tensor,
        batch: AttentionBatch,
        plain: int,
        scale: float,
        unit: float,
    ) -> torch.Tensor:
        """Weighted sums of the cached vectors for single tokens, or for a step of which only the device knows what it
        is. Each head's matrices are applied to the queries, and by the caller to the sums."""
        n, tiles, longest = len(query), batch.tiles, _longest(batch, is_read_apart=False)
        sums = torch.empty(n, *up.shape[::2], dtype=query.dtype, device=query.device)
        applied, rotated = torch.empty_like(sums), query[..., plain:]
        multiply_heads(query[..., :plain], up[:, :plain].transpose(1, 2), applied)
        if tiles is None:
            rows, lengths = batch.rows[:n], batch.seq_lens[:n]
        else:
            rows, lengths = batch.rows, tiles.decode_lens
            at = batch.query_start, batch.seq_lens
            latent_tiles(applied, rotated, kv_cache, batch.tables, rows, *at, tiles, sums, scale, unit)
        latent_decode(
            applied[: len(rows)], rotated[: len(rows)], kv_cache, batch.tables, rows, lengths, sums[: len(rows)],
            self.workspace, scale, unit, longest=longest,
        )  # fmt: skip
        return sums

    def _attend_chunks(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        up: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        unit: float,
    ) -> None:
        """The chunks of a step, whose keys and values are computed piece by piece."""
        n, (heads, width, latent) = batch.num_decodes, up.shape
        rows, starts, lengths = batch.rows[n:], batch.query_start[n:], batch.seq_lens[n:]
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        longest = int(batch.query_lens[n:].max())
        for piece in _pieces(batch, PIECE_BYTES // (heads * width * query.element_size())):
            vectors = gather_vectors(kv_cache, batch.tables, rows, piece, query.dtype, unit)
            both = torch.mm(vectors[:, :latent], up.view(-1, latent).T).view(-1, heads, width)
            latent_prefill(query, both, vectors, starts, lengths, longest, piece, out, lse, scale, latent)


def _pieces(batch: AttentionBatch, size: int) -> list[Piece]:
    """The texts of a step's chunks, cut into pieces of at most `size` tokens; listed once per step."""
    if ("pieces", size) not in batch.step_cache:
        lengths = batch.seq_bounds[batch.num_decodes :]  # with drafts more than the true lengths, which kernels know
        ends = np.cumsum(lengths)
        listed = []
        for begin in range(0, int(ends[-1]), size):
            end = min(begin + size, int(ends[-1]))
            some = np.flatnonzero((ends > begin) & (ends - lengths < end))
            first = np.maximum(begin - (ends - lengths)[some], 0)
            counts = np.minimum(end - (ends - lengths)[some], lengths[some]) - first
            begins = np.concatenate([[0], np.cumsum(counts)])
            arrays = [each.astype(np.int32) for each in (some, first, begins)]
            placed = upload(arrays, batch.rows.device)
            listed.append(Piece(placed[0], placed[1], placed[2], int(counts.sum()), int(counts.max())))
        batch.step_cache["pieces", size] = listed
    pieces: list[Piece] = batch.step_cache["pieces", size]
    return pieces


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
