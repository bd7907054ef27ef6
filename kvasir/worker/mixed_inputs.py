"""The inputs of a step of fixed size in which rows may run several tokens: everything is worked out on the device, so
that the same operations serve whatever the step is. Plain torch; captured as part of a graph."""

from __future__ import annotations

import numpy as np
import torch

from kvasir.attention.base import AttentionBatch
from kvasir.kernels.shared_prefixes import SharedPrefixes
from kvasir.kernels.tiles import find_tiles
from kvasir.worker.rows import DeviceRows, StepInputs


def mixed_inputs(
    state: DeviceRows,
    rows: torch.Tensor,  # [rows] int64: those that run one token, then the others, then padding; fewer than tokens
    num_tokens: torch.Tensor,  # [rows] int32, 0 for padding
    token_ids: torch.Tensor,  # [tokens] int32, -1 where the row's next token is meant; padded with anything
    longest: int,  # no sequence has more tokens
    bound: int,  # no sequence of one token has more of its own
    shared: SharedPrefixes | None = None,
) -> StepInputs:
    """Counts the tokens as computed."""
    device, size = rows.device, len(token_ids)
    before = state.num_computed[rows]
    seq_lens = before + num_tokens
    state.num_computed[rows] = seq_lens  # padding stays at 0
    query_start = torch.zeros(len(rows) + 1, dtype=torch.int32, device=device)
    torch.cumsum(num_tokens, 0, dtype=torch.int32, out=query_start[1:])
    at = torch.arange(size, dtype=torch.int32, device=device)
    real = at < query_start[-1]
    line = torch.searchsorted(query_start[1:], at, right=True).clamp(max=len(rows) - 1)
    token_rows = torch.where(real, rows[line], state.padding)
    positions = torch.where(real, before[line] + at - query_start[line], 0).long()
    block = state.tables[token_rows, positions // state.block_size].long()
    slots = torch.where(real, block * state.block_size + positions % state.block_size, -1)
    ids = torch.where(token_ids >= 0, token_ids, state.next_token[token_rows]).long()
    batch = AttentionBatch(
        slots=slots,
        query_start=query_start,
        seq_lens=seq_lens,
        tables=state.tables,
        rows=rows,
        num_decodes=0,
        query_lens=np.zeros(len(rows), np.int32),
        seq_bounds=np.full(len(rows), longest, np.int32),
        block_size=state.block_size,
        tiles=find_tiles(num_tokens, seq_lens, size),
        shared=shared,
        own_bound=bound,
    )
    if state.other_tables:
        batch.others = state.batches_of_others(batch, token_rows, positions)
    return StepInputs(ids, positions, batch)
