"""Groups of sequences that begin with the same blocks, as kernels are told of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class SharedPrefixes:
    tokens: torch.Tensor  # [sequences] int32: how many of each, a multiple of the block size; 0: it is in no group
    members: torch.Tensor  # [sequences] int32: those of a group side by side; what is not needed means nothing
    starts: torch.Tensor  # [groups + 1] int32: where in `members` each begins, and the last one ends; some are empty
    # What kernels listed for a step in one layer and read again in the others, by (lines of a sequence, of a tile).
    tiles: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
