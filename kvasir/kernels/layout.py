"""How a step is laid out for kernels: groups that share a prefix, tiles of prompt chunks, and tokens by their adapter.

The host packs prefix groups into arrays and uploads them with a step's other arrays in one copy; tiles are listed on
the device. Tokens are grouped by adapter slot once a step. On a CPU the host knows these groups; on a GPU they are
sorted on the device, in tiles of at most TILE tokens of one slot, so that nothing waits and the launches can sit in a
CUDA graph. Worker process; never sees requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.messages import Int32Array, PrefixGroups, StepPlan, max_prefix_groups

NO_GROUPS: Int32Array = np.zeros(0, np.int32)
TILE = 16  # tokens; the least that a tensor core multiplies


@dataclass(slots=True)
class SharedPrefixes:
    """Groups of sequences whose first tokens lie in the same blocks, so that a kernel reads those blocks once."""

    tokens: torch.Tensor  # [sequences] int32: length of each one's shared prefix, a multiple of the block size; or 0
    members: torch.Tensor  # [sequences] int32: the sequences of each group side by side; the rest is unused
    starts: torch.Tensor  # [groups + 1] int32: where each group begins in `members`, and the end; groups may be empty
    # Tiles that kernels list in the first layer and read again in the others, by (lines of a sequence, of a tile).
    tiles: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


def pack_prefix_groups(groups: PrefixGroups | None, size: int) -> tuple[Int32Array, Int32Array, Int32Array]:
    """The first three fields of SharedPrefixes for `size` sequences; empty arrays where nothing is shared."""
    if groups is None:
        return NO_GROUPS, NO_GROUPS, NO_GROUPS
    tokens, members = np.zeros((2, size), np.int32)
    tokens[groups.members] = np.repeat(groups.tokens, np.diff(groups.starts))
    members[: len(groups.members)] = groups.members
    starts = np.full(max_prefix_groups(size) + 1, groups.starts[-1], np.int32)  # groups past the last one are empty
    starts[: len(groups.starts)] = groups.starts
    return tokens, members, starts


def max_unshared_tokens(plan: StepPlan) -> int:
    """Upper bound of the tokens that a decoding sequence of the plan has outside its shared prefix."""
    lengths = plan.bounds[: plan.num_decodes]
    if plan.shared is not None:
        lengths = lengths - pack_prefix_groups(plan.shared, plan.num_decodes)[0]
    return int(lengths.max(initial=0))


@dataclass(slots=True)
class TileList:
    """Prompt chunks cut into tiles of equal height."""

    count: torch.Tensor  # [1] int32: number of tiles that are in use
    sequence: torch.Tensor  # [max tiles] int32: the sequence of each tile
    number: torch.Tensor  # [max tiles] int32: its number within that sequence


@dataclass(slots=True)
class Tiles:
    """The chunks of a step of which only the device knows what they are, for launches whose grid must not depend on
    them. Kernels list what they need in the first layer and read it again in the others."""

    num_tokens: torch.Tensor  # [sequences] int32
    seq_lens: torch.Tensor  # [sequences] int32, after the step
    size: int  # tokens of the step, or more
    decode_lens: torch.Tensor  # [sequences] int32: lengths of sequences that run one token, 0 for the others
    lists: dict[int, TileList] = field(default_factory=dict)  # by height
    # Parts of the sequences that run one token, by how they are cut.
    parts: dict[tuple[int, int, int, int, bool], torch.Tensor] = field(default_factory=dict)

    def cut(self, height: int) -> TileList:
        """Cut chunks into tiles of `height` tokens. `size` tokens hold at most size / 2 chunks of several tokens, and
        each sequence has at most one tile that is not full, which bounds the number of tiles."""
        assert height > 2, "lower tiles may be more than half of the tokens"
        if height not in self.lists:
            counts, sequences = self.num_tokens, self.num_tokens.shape[0]
            ends = torch.cumsum(torch.where(counts > 1, (counts + height - 1) // height, 0), 0, dtype=torch.int32)
            most = min(self.size // 2, self.size // height + sequences)
            tile = torch.arange(most, dtype=torch.int32, device=counts.device)
            sequence = torch.searchsorted(ends, tile, right=True, out_int32=True).clamp(max=sequences - 1)
            start = torch.where(sequence > 0, ends[(sequence - 1).clamp(min=0)], 0)
            self.lists[height] = TileList(ends[-1:], sequence, tile - start)
        return self.lists[height]


def find_tiles(num_tokens: torch.Tensor, seq_lens: torch.Tensor, size: int) -> Tiles:
    return Tiles(num_tokens, seq_lens, size, torch.where(num_tokens > 1, 0, seq_lens))


@dataclass(slots=True)
class AdapterMatrices:
    """The factors of one layer. A token in slot s has y * gain[s] + shift[s] + (x shrink[s]^T) expand[s], where each
    part of the outputs reads its own `rank` columns of the first product."""

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
    """Most tiles that this many tokens can need: each slot may have one that is not full."""
    return min(tokens, -(-tokens // TILE) + slots)


def upload(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """Upload the arrays in one copy, and return them flat, as views of one buffer on the device."""
    if device.type == "cpu":
        # copies, because the caller may reuse its arrays
        return [torch.from_numpy(array.reshape(-1).astype(np.int32)) for array in arrays]
    sizes = [array.size for array in arrays]
    # pinned memory comes from torch's caching allocator, which reuses it only after the copy has been made
    packed = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    host = packed.numpy()
    at = 0
    for array, size in zip(arrays, sizes, strict=True):
        host[at : at + size] = array.reshape(-1)
        at += size
    return list(packed.to(device, non_blocking=True).split(sizes))
