"""Chunks of queries as a list of tiles of one height, worked out on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Tiles:
    """Chunks of several queries cut into tiles, for launches whose grid must not depend on the chunks."""

    height: int  # queries of a tile
    sequence: torch.Tensor  # [tiles] int32: whose each is; -1: nobody's
    number: torch.Tensor  # [tiles] int32: which of its sequence's tiles
    decode_lens: torch.Tensor  # [sequences] int32: lengths of those that run one token, 0 for the others


def find_tiles(num_tokens: torch.Tensor, seq_lens: torch.Tensor, size: int) -> Tiles:
    """Chunks cut into tiles. There are at most as many as chunks of two tokens could be in `size`."""
    height = 16 if size <= 64 else 64
    several = num_tokens > 1
    ends = torch.cumsum(torch.where(several, (num_tokens + height - 1) // height, 0), 0, dtype=torch.int32)
    tile = torch.arange(size // 2, dtype=torch.int32, device=num_tokens.device)
    sequence = torch.searchsorted(ends, tile, right=True).clamp(max=len(ends) - 1).to(torch.int32)
    start = torch.where(sequence > 0, ends[(sequence - 1).clamp(min=0)], 0)
    return Tiles(
        height=height,
        sequence=torch.where(tile < ends[-1], sequence, -1),
        number=tile - start,
        decode_lens=torch.where(several, 0, seq_lens),
    )
