"""Adapters of linear layers, as kernels take them: the factors of all slots, and each token's slot. Worker process.

Tokens are grouped by slot once a step. On a CPU the host knows the groups; on a GPU they are sorted on the device, in
tiles of at most TILE tokens of one slot, so that nothing waits and the launches can sit in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

TILE = 16  # tokens; the least that a tensor core multiplies


@dataclass(slots=True)
class AdapterMatrices:
    """One layer's factors. A token in slot s has y * gain[s] + shift[s] + (x shrink[s]^T) expand[s], where each part
    of the outputs reads its own `rank` columns of the first product."""

    shrink: torch.Tensor  # [slots, parts * rank, inputs]
    expand: torch.Tensor  # [slots, rank, outputs]
    gain: torch.Tensor  # [slots, outputs] float32
    shift: torch.Tensor  # [slots, outputs] float32
    uses: torch.Tensor  # [slots, 2] int32: rank in use, and whether gain and shift are; both 0: nothing changes
    parts: tuple[int, ...]  # outputs of each part

    @property
    def rank(self) -> int:
        return self.expand.shape[1]


@dataclass
class TokenSlots:
    """The slot of each token of a step; -1: none."""

    slots: torch.Tensor  # [tokens] int32
    num_slots: int

    @cached_property
    def groups(self) -> list[tuple[int, torch.Tensor]]:
        """The slots in use and their tokens. This waits for the device."""
        return [(slot, (self.slots == slot).nonzero()[:, 0]) for slot in torch.unique(self.slots).tolist() if slot >= 0]

    @cached_property
    def tiles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[tiles, 3] int32: each tile's slot (-1: the tile is empty), its first place in the order and the slot's end
        there; and the order, [tokens] int32: tokens by slot. Nothing waits: there are as many tiles as there can be."""
        device, count = self.slots.device, len(self.slots)
        in_order, order = torch.sort(self.slots, stable=True)
        ids = torch.arange(self.num_slots + 1, dtype=torch.int32, device=device)
        starts = torch.searchsorted(in_order, ids, out_int32=True)  # tokens without a slot come before the first
        ends = torch.cumsum((starts[1:] - starts[:-1] + TILE - 1) // TILE, 0, dtype=torch.int32)
        number = torch.arange(max_tiles(count, self.num_slots), dtype=torch.int32, device=device)
        slot = torch.searchsorted(ends, number, right=True, out_int32=True)
        own = slot.clamp(max=self.num_slots - 1).long()
        before = torch.where(own > 0, ends[(own - 1).clamp(min=0)], 0)
        first = starts[own] + (number - before) * TILE
        is_used = slot < self.num_slots
        tiles = torch.stack((torch.where(is_used, slot, -1), first, starts[own + 1]), 1)
        return tiles.to(torch.int32).contiguous(), order.to(torch.int32)


def max_tiles(tokens: int, slots: int) -> int:
    """Number of tiles that so many tokens can need: each slot may have one that is not full."""
    return min(tokens, -(-tokens // TILE) + slots)
