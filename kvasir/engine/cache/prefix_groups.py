"""Which rows begin with the same blocks, so that attention can read those once for all of them.

Rows form a tree by their first blocks. At each of its branches either all rows of it are a group, with what all share,
or those of its branches are, with more: whatever saves most reading.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvasir.messages import MAX_PREFIX_GROUPS, MIN_PREFIX_GROUP_ROWS, Int32Array, PrefixGroups

LEVELS = 8  # of branches that are looked at
IntArray = NDArray[np.int64]


@dataclass(slots=True)
class Group:
    rows: IntArray
    blocks: int

    @property
    def saved(self) -> int:
        """Blocks that are not read again and again."""
        return (len(self.rows) - 1) * self.blocks


def pays(sequences: int, tokens: int) -> bool:
    """Measured on an H200: more sequences make a shorter prefix worth a stage of its own."""
    return sequences >= MIN_PREFIX_GROUP_ROWS and tokens >= (
        512 if sequences >= 128 else 1024 if sequences >= 32 else 2048
    )


def find_groups(tables: list[Int32Array], rows: IntArray, limits: IntArray, block_size: int) -> list[Group]:
    """Those of `rows` that pay, no row in two. `tables` [rows, blocks]: of each group of layers, which must agree;
    `limits` [rows]: how many first blocks of a row count. Both are of all rows there are."""
    groups = _Tree(tables, limits, block_size).groups(rows) if tables else []
    return sorted(groups, key=lambda group: -group.saved)[:MAX_PREFIX_GROUPS]


@dataclass(slots=True)
class _Tree:
    tables: list[Int32Array]
    limits: IntArray
    block_size: int

    def groups(self, rows: IntArray, depth: int = 0, level: int = 0) -> list[Group]:
        """Of rows whose first `depth` blocks are the same."""
        if len(rows) < MIN_PREFIX_GROUP_ROWS or level == LEVELS:
            return []
        depth = self._common_blocks(rows, depth)
        whole = [Group(rows, depth)] if pays(len(rows), depth * self.block_size) else []
        longer = rows[self.limits[rows] > depth]
        if not len(longer):
            return whole
        _, branch = np.unique(self.tables[0][longer, depth], return_inverse=True)
        parts: list[Group] = []
        for number in np.flatnonzero(np.bincount(branch) >= MIN_PREFIX_GROUP_ROWS).tolist():
            parts += self.groups(longer[branch == number], depth, level + 1)
        return max(whole, parts, key=lambda groups: sum(group.saved for group in groups))

    def _common_blocks(self, rows: IntArray, count: int) -> int:
        """How many first blocks all these rows have in common, `count` at least."""
        most, stride = int(self.limits[rows].min()), 1
        while count < most:
            end = min(most, count + stride)
            same = np.all([(t[rows, count:end] == t[rows[0], count:end]).all(axis=0) for t in self.tables], axis=0)
            if not same.all():
                return count + int(same.argmin())
            count, stride = end, 2 * stride
        return count


class SharingRows:
    """The groups of the rows that run, found again when a row comes or goes or gets another block."""

    def __init__(self, num_rows: int) -> None:
        self._found_at: Hashable = None
        self._group_of: IntArray = np.full(num_rows, -1, np.int64)
        self._tokens: list[int] = []  # that the rows of each group share

    def update(self, state: Hashable, find: Callable[[], list[Group]], block_size: int) -> None:
        """`state`: as long as it is the same, so are the groups."""
        if state == self._found_at:
            return
        self._found_at = state
        groups = find()
        self._group_of[:] = -1
        for number, group in enumerate(groups):
            self._group_of[group.rows] = number
        self._tokens = [group.blocks * block_size for group in groups]

    def among(self, rows: IntArray) -> PrefixGroups | None:
        """What these rows, the first of a step, share. None: nothing, or too few of them."""
        if not self._tokens:
            return None
        group_of = self._group_of[rows]
        found = [(tokens, np.flatnonzero(group_of == number)) for number, tokens in enumerate(self._tokens)]
        found = [(tokens, lines) for tokens, lines in found if pays(len(lines), tokens)]
        if not found:
            return None
        return PrefixGroups(
            tokens=np.array([tokens for tokens, _ in found], np.int32),
            starts=np.cumsum([0] + [len(lines) for _, lines in found], dtype=np.int32),
            members=np.concatenate([lines for _, lines in found]).astype(np.int32),
        )
