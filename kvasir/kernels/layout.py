"""How a step's sequences are laid out for attention kernels: groups that share a prefix, and tiles of prompt chunks.

The host packs prefix groups into arrays; tiles are listed on the device. Worker process; never sees requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from kvasir.messages import Int32Array, PrefixGroups, StepPlan, max_prefix_groups

NO_GROUPS: Int32Array = np.zeros(0, np.int32)


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
