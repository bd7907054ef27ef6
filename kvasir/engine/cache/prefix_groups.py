"""Groups of rows that begin with the same blocks, so that attention reads these blocks once per group.

Rows form a tree by their first blocks. At each node of the tree, either all its rows form one group with the prefix
that all share, or its children form smaller groups with longer prefixes. The choice that saves most reads wins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvasir.messages import MAX_PREFIX_GROUPS, MIN_GROUP_ROWS, Int32Array, PrefixGroups

MAX_LEVELS = 8  # levels of the tree that are searched
IntArray = NDArray[np.int64]


@dataclass(slots=True)
class PrefixGroup:
    """Rows that share their first `blocks` blocks."""

    rows: IntArray
    blocks: int

    @property
    def saved(self) -> int:
        """Number of block reads that the group saves in a step."""
        return (len(self.rows) - 1) * self.blocks


def is_worthwhile(sequences: int, tokens: int) -> bool:
    """Whether a separate attention stage for the shared prefix saves time. The limits were measured on an H200; with
    more sequences, shorter prefixes are enough."""
    return sequences >= MIN_GROUP_ROWS and tokens >= (512 if sequences >= 128 else 1024)


def find_groups(tables: list[Int32Array], rows: IntArray, limits: IntArray, block_size: int) -> list[PrefixGroup]:
    """Return the worthwhile groups among `rows`; no row is in two of them. `tables` has the block tables of each group
    of layers [max_rows, blocks], and rows must share blocks in all of them. `limits` [max_rows] is the number of first
    blocks of each row that may be shared."""
    groups = _Tree(tables, limits, block_size).groups(rows) if tables else []
    return sorted(groups, key=lambda group: -group.saved)[:MAX_PREFIX_GROUPS]


@dataclass(slots=True)
class _Tree:
    """See find_groups for the fields."""

    tables: list[Int32Array]
    limits: IntArray
    block_size: int

    def groups(self, rows: IntArray, depth: int = 0, level: int = 0) -> list[PrefixGroup]:
        """Return the best groups among rows whose first `depth` blocks are the same."""
        if len(rows) < MIN_GROUP_ROWS or level == MAX_LEVELS:
            return []
        depth = self._common_blocks(rows, depth)
        whole = [PrefixGroup(rows, depth)] if is_worthwhile(len(rows), depth * self.block_size) else []
        longer = rows[self.limits[rows] > depth]
        if not len(longer):
            return whole
        _, branch = np.unique(self.tables[0][longer, depth], return_inverse=True)
        parts: list[PrefixGroup] = []
        for number in np.flatnonzero(np.bincount(branch) >= MIN_GROUP_ROWS).tolist():
            parts += self.groups(longer[branch == number], depth, level + 1)
        return max(whole, parts, key=lambda groups: sum(group.saved for group in groups))

    def _common_blocks(self, rows: IntArray, count: int) -> int:
        """Number of first blocks that all these rows share; at least `count` are known to be shared."""
        most, stride = int(self.limits[rows].min()), 1
        while count < most:
            end = min(most, count + stride)
            same = np.all([(t[rows, count:end] == t[rows[0], count:end]).all(axis=0) for t in self.tables], axis=0)
            if not same.all():
                return count + int(same.argmin())
            count, stride = end, 2 * stride
        return count


class PrefixGroupTracker:
    """The prefix groups of the running rows. They are searched again only when rows join, leave or get other blocks."""

    def __init__(self, num_rows: int) -> None:
        self._state: Hashable = None  # state at the last search
        self._group_of: IntArray = np.full(num_rows, -1, np.int64)  # by row; -1: none
        self._tokens: list[int] = []  # number of shared tokens per group

    def update(self, state: Hashable, find: Callable[[], list[PrefixGroup]], block_size: int) -> None:
        """Search for groups with `find` unless `state` is that of the last call."""
        if state == self._state:
            return
        self._state = state
        groups = find()
        self._group_of[:] = -1
        for number, group in enumerate(groups):
            self._group_of[group.rows] = number
        self._tokens = [group.blocks * block_size for group in groups]

    def groups_of(self, rows: IntArray) -> PrefixGroups | None:
        """Return the groups among the first rows of a step; None if none is worthwhile."""
        if not self._tokens:
            return None
        group_of = self._group_of[rows]
        found = [(tokens, np.flatnonzero(group_of == number)) for number, tokens in enumerate(self._tokens)]
        found = [(tokens, lines) for tokens, lines in found if is_worthwhile(len(lines), tokens)]
        if not found:
            return None
        return PrefixGroups(
            tokens=np.array([tokens for tokens, _ in found], np.int32),
            starts=np.cumsum([0] + [len(lines) for _, lines in found], dtype=np.int32),
            members=np.concatenate([lines for _, lines in found]).astype(np.int32),
        )
