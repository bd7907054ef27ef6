"""Chunks of queries as a list of tiles of one height, worked out on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Tiles:
    """Chunks of several queries cut into tiles, for launches whose grid must not depend on the chunks."""

    height: int  # queries of a tile
    count: torch.Tensor  # [1] int32: how many there are
    sequence: torch.Tensor  # [tiles, more than there are] int32: whose each is
    number: torch.Tensor  # [tiles] int32: which of its sequence's tiles
    decode_lens: torch.Tensor  # [sequences] int32: lengths of those that run one token, 0 for the others


def find_tiles(num_tokens: torch.Tensor, seq_lens: torch.Tensor, size: int) -> Tiles:
    """Chunks cut into tiles. There are at most as many as chunks of two tokens could be in `size`, and no sequence has
    more than one that is not full."""
    height = 16 if size <= 64 else 64
    several = num_tokens > 1
    ends = torch.cumsum(torch.where(several, (num_tokens + height - 1) // height, 0), 0, dtype=torch.int32)
    tile = torch.arange(min(size // 2, size // height + len(num_tokens)), dtype=torch.int32, device=num_tokens.device)
    sequence = torch.searchsorted(ends, tile, right=True, out_int32=True).clamp(max=len(ends) - 1)
    start = torch.where(sequence > 0, ends[(sequence - 1).clamp(min=0)], 0)
    return Tiles(
        height=height,
        count=ends[-1:],
        sequence=sequence,
        number=tile - start,
        decode_lens=torch.where(several, 0, seq_lens),
    )
