"""Block tables of all rows: allocation, prefix hits, forks with copy-on-write, release. Core process.

The scheduler passes row numbers and token counts; this file knows neither requests nor tensors. Changed table entries
and copies collect in `changes` until the next plan takes them to the device. The tier (tier.py) keeps blocks that the
device has no room for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.cache.block_pool import BlockPool, extend_chain, is_private, with_group
from kvasir.engine.cache.prefix_groups import PrefixGroup, find_groups
from kvasir.engine.cache.tier import NO_COPIES, NoTier, SwappedBlocks, Tier, keep_swapped_blocks
from kvasir.messages import NULL_BLOCK, Int32Array

IntArray = NDArray[np.int64]
NO_ENTRIES: Int32Array = np.zeros(0, np.int32)
IN_TIER = -1  # in place of a block id: the content is in the tier and can be copied to the device


@dataclass(slots=True)
class CacheStats:
    """Counters since the start, under the names of EngineStats."""

    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # of those, found
    host_cache_hits: int = 0  # of those, not on the device
    recomputed_tokens: int = 0  # tokens that a preempted row had computed and did not find again
    copied_blocks: int = 0  # blocks copied because a shared one was written
    shared_blocks: int = 0  # blocks taken over from another row by a fork
    freed_blocks: int = 0  # blocks released because they fell out of a window


@dataclass(slots=True)
class CacheChanges:
    """Changes that have not been sent to the device."""

    index: list[IntArray] = field(default_factory=list)  # flat positions in the block table ...
    block: list[IntArray] = field(default_factory=list)  # ... and the block ids to write there
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to)


@dataclass(slots=True, frozen=True)
class Prefix:
    """Blocks with the first tokens of a sequence. Every group of layers has the same number; blocks before a group's
    attention window are the null block. The last block may be partly filled."""

    num_tokens: int
    blocks: list[list[int]]  # per group and column; IN_TIER: the block is not on the device
    names: list[bytes] = field(default_factory=list)  # per column

    @property
    def num_columns(self) -> int:
        return len(self.blocks[0]) if self.blocks else 0

    def device_blocks(self) -> list[int]:
        """Return the blocks that are on the device."""
        return [block for line in self.blocks for block in line if block > NULL_BLOCK]

    def tier_blocks(self) -> list[tuple[int, int]]:
        """Return group and column of the blocks that must be copied from the tier."""
        return [(g, c) for g, line in enumerate(self.blocks) for c, block in enumerate(line) if block == IN_TIER]


class KVCacheManager:
    """Block tables and their blocks. A row has one table per group of layers, all of the same length. Groups with an
    attention window free the blocks that no later token attends to."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_model_len: int,
        enable_prefix_caching: bool,
        windows: tuple[int | None, ...] = (None,),  # per group: number of last tokens its layers attend to
        tier: Tier | None = None,
    ) -> None:
        self.tier: Tier = tier or NoTier()
        self.pool = BlockPool(num_blocks, self.tier.on_evict)
        self.block_size = block_size
        self.max_rows = max_rows
        self.windows = windows
        self.num_groups = len(windows)
        self.caching = enable_prefix_caching
        self.stats = CacheStats()
        self.changes = CacheChanges()
        self.width = -(-max_model_len // block_size)  # block-table columns
        # Group g's table of row r is line g * max_rows + r. On the device, a group has one more row for padding.
        self.tables: Int32Array = np.full((self.num_groups * max_rows, self.width), NULL_BLOCK, np.int32)
        self.num_blocks: Int32Array = np.zeros(max_rows, np.int32)  # columns in use
        self.num_hashed: Int32Array = np.zeros(max_rows, np.int32)  # full blocks that have a name
        self.num_freed: Int32Array = np.zeros(self.tables.shape[0], np.int32)  # first columns without blocks, per line
        self._chains: list[list[bytes]] = [[] for _ in range(max_rows)]
        self._salts: list[bytes] = [b""] * max_rows
        self._windowed = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._forked = False  # before the first fork, no block that is being written can be shared

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens`, in all groups together."""
        return -(-num_tokens // self.block_size) * self.num_groups

    @property
    def sliding_window(self) -> int | None:
        """Number of last tokens that every layer attends to; None if some attend to all, or if there is no cache."""
        return None if None in self.windows else max((window for _, window in self._windowed), default=None)

    def _first_visible_column(self, position: int, window: int | None) -> int:
        """First column that a token at `position` attends to."""
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    # ------------------------------------------------------------ prefixes, new rows and freed rows

    def find_prefix(
        self, token_ids: Int32Array, chain: list[bytes], salt: bytes, swapped: SwappedBlocks | None = None
    ) -> Prefix:
        """Find the blocks of the longest cached prefix. New hashes are appended to `chain`.

        The last token is never taken from the cache, since the request needs its logits.
        """
        if swapped is not None and swapped.names:
            return self._find(swapped.chain, swapped.num_kept)
        if not self.caching:
            return self.no_prefix()
        longest = (len(token_ids) - 1) // self.block_size
        extend_chain(chain, salt, token_ids, longest, self.block_size)
        return self._find(chain[:longest], longest * self.block_size)

    def _find(self, names: list[bytes], num_tokens: int) -> Prefix:
        """Find the longest prefix of these columns that every group has. All columns together hold `num_tokens`."""
        longest = len(names)
        lines: list[list[int | None]] = []
        for group, window in enumerate(self.windows):
            lines.append(self._look_up(group, names[:longest], stop_at_gap=window is None))
            longest = min(longest, len(lines[group]))
        num_tokens = min(num_tokens, longest * self.block_size)
        while longest and not all(self._covers(lines[group], num_tokens, window) for group, window in self._windowed):
            longest -= 1
            num_tokens = longest * self.block_size
        firsts = [self._first_visible_column(num_tokens, window) for window in self.windows]
        blocks = [
            [NULL_BLOCK] * first + [block or NULL_BLOCK for block in line[first:longest]]
            for first, line in zip(firsts, lines, strict=True)
        ]
        return Prefix(num_tokens, blocks, names[:longest])

    def no_prefix(self) -> Prefix:
        return Prefix(0, [[] for _ in self.windows])

    def _look_up(self, group: int, chain: list[bytes], stop_at_gap: bool) -> list[int | None]:
        line: list[int | None] = []
        for block_hash in chain:
            name = with_group(group, block_hash)
            block = self.pool.lookup(name)
            if block is None and self.tier.holds(name):
                block = IN_TIER
            if block is None and stop_at_gap:
                break
            line.append(block)
        return line

    def _covers(self, line: list[int | None], num_tokens: int, window: int) -> bool:
        """Whether the line has all blocks that the first token after `num_tokens` attends to."""
        return None not in line[self._first_visible_column(num_tokens, window) : -(-num_tokens // self.block_size)]

    def num_free_without(self, prefix: Prefix) -> int:
        """Number of free blocks that would be left after `prefix` took its own."""
        held = prefix.device_blocks()
        revived = int((self.pool.ref_counts[held] == 0).sum()) if held else 0
        return self.pool.num_free - revived - len(prefix.tier_blocks())

    def open(
        self,
        row: int,
        prefix: Prefix,
        chain: list[bytes],
        salt: bytes,
        num_tokens: int,
        swapped: SwappedBlocks | None = None,
    ) -> None:
        """Fill the tables of a row that starts or resumes with the blocks of `prefix`."""
        self.pool.acquire(prefix.device_blocks())
        in_tier = prefix.tier_blocks()
        if in_tier:
            self._copy_in(prefix, in_tier)
        self._set_tables(row, prefix.blocks)
        self.num_hashed[row] = prefix.num_tokens // self.block_size
        self._chains[row] = chain
        self._salts[row] = salt
        if self.caching:
            self.stats.prefix_cache_queries += num_tokens
            self.stats.prefix_cache_hits += prefix.num_tokens
            self.stats.host_cache_hits += len({column for _, column in in_tier}) * self.block_size
        if swapped is not None:
            self.stats.recomputed_tokens += max(0, swapped.num_computed - prefix.num_tokens)
            self.drop_swapped(swapped)

    def _copy_in(self, prefix: Prefix, in_tier: list[tuple[int, int]]) -> None:
        """Allocate blocks for content of the tier. It is pinned first, because allocation may evict blocks to the
        tier."""
        names = [with_group(group, prefix.names[column]) for group, column in in_tier]
        pinned = self.tier.pin(names)
        blocks = self.pool.allocate(len(names))
        self.pool.register(blocks, names)
        self.tier.copy_in(pinned, blocks)
        for (group, column), block in zip(in_tier, blocks, strict=True):
            prefix.blocks[group][column] = block

    def can_fork(self, parent: int, num_tokens: int) -> bool:
        """Whether the parent still has all blocks that a child with `num_tokens` attends to."""
        return all(
            self.num_freed[group * self.max_rows + parent] <= self._first_visible_column(num_tokens, window)
            for group, window in self._windowed
        )

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        """Start `child` on the blocks with the first `num_tokens` of `parent`; the last may be partly filled."""
        count = -(-num_tokens // self.block_size)
        full = min(num_tokens // self.block_size, int(self.num_hashed[parent]))
        lines = [self.tables[group * self.max_rows + parent, :count].tolist() for group in range(self.num_groups)]
        self.pool.acquire(Prefix(num_tokens, lines).device_blocks())
        self._set_tables(child, lines)
        self.num_hashed[child] = full
        self._chains[child] = self._chains[parent][:full]
        self._salts[child] = self._salts[parent]
        self._forked = True
        self.stats.shared_blocks += count

    def close(self, row: int, token_ids: Int32Array) -> list[bytes]:
        """Release the row's blocks. Blocks full of `token_ids` are named first, so that they can be hit: generated
        tokens have not been named before. Returns the names, for a request that will resume."""
        if self.caching:
            self.commit(row, token_ids)
        for line in range(row, len(self.tables), self.max_rows):
            self.pool.release(self.tables[line, self.num_freed[line] : self.num_blocks[row]].tolist()[::-1])
            self.num_freed[line] = 0
        chain, self._chains[row] = self._chains[row], []
        self.num_blocks[row] = self.num_hashed[row] = 0
        return chain

    def forget(self, row: int) -> None:
        """Make the contents of the row's blocks impossible to hit, because they may be wrong."""
        for line in range(row, len(self.tables), self.max_rows):
            for block in self.tables[line, self.num_freed[line] : self.num_blocks[row]].tolist():
                self.pool.forget(block)

    def swap_out(self, row: int, token_ids: Int32Array, may_keep: bool = True) -> tuple[list[bytes], SwappedBlocks]:
        """Close a row that will resume with `token_ids` and at least one more token, and ask the tier to keep its
        blocks."""
        swapped = SwappedBlocks(len(token_ids))
        if may_keep:
            if self.caching:
                self.commit(row, token_ids)
            swapped = keep_swapped_blocks(self, row, self._chains[row], len(token_ids))
        return self.close(row, token_ids), swapped

    def drop_swapped(self, swapped: SwappedBlocks) -> None:
        """Drop what the tier keeps for a row that has resumed or ended."""
        for name in self.tier.release(swapped):
            if is_private(name):
                self.pool.discard(name)

    def reset(self) -> bool:
        """Drop all cached content, on the device and in the tier. Returns False and changes nothing while any block is
        used."""
        if not self.pool.reset():
            return False
        self.tier.reset()
        return True

    def _set_tables(self, row: int, lines: list[list[int]]) -> None:
        self.num_blocks[row] = len(lines[0]) if lines else 0  # a model without a cache has no groups
        if not self.num_blocks[row]:
            return
        for group, blocks in enumerate(lines):
            line = group * self.max_rows + row
            self.tables[line, : len(blocks)] = blocks
            self.num_freed[line] = next((i for i, block in enumerate(blocks) if block != NULL_BLOCK), len(blocks))
            start = self._device_line(group, row) * self.width
            self.changes.index.append(np.arange(start, start + len(blocks)))
            self.changes.block.append(np.array(blocks))

    def _device_line(self, group: int, row: int) -> int:
        return group * (self.max_rows + 1) + row

    def find_prefix_groups(self, rows: IntArray, num_computed: Int32Array) -> list[PrefixGroup]:
        """Find rows that share their first blocks in all groups of layers without a window. `num_computed` has an entry
        per row of the engine. A row's last token does not count: its block is, or will be, the row's own."""
        unwindowed = [group for group, window in enumerate(self.windows) if window is None]
        tables = [self.tables[group * self.max_rows : (group + 1) * self.max_rows] for group in unwindowed]
        return find_groups(tables, rows, np.maximum(num_computed - 1, 0) // self.block_size, self.block_size)

    # ------------------------------------------------------------ steps

    def prepare(
        self, rows: IntArray, num_computed: Int32Array, num_new: Int32Array, num_unsettled: Int32Array | None = None
    ) -> bool:
        """Make the next `num_new` tokens of each row writable. Returns False and allocates nothing if there are too few
        free blocks. Up to `num_unsettled` of the computed tokens may be rejected drafts."""
        if not self.num_groups:  # the model has no cache
            return True
        settled = num_computed if num_unsettled is None else num_computed - num_unsettled
        for group, window in self._windowed:
            self._free_outside_window(group, window, rows, settled)
        have = self.num_blocks[rows]
        extra = -(-(num_computed + num_new) // self.block_size) - have
        if num_unsettled is not None:
            extra = np.maximum(extra, 0)  # blocks that were prepared for rejected drafts are used later
        shared = self._shared_writes(rows, settled) if self._forked else []
        total = int(extra.sum())
        if total * self.num_groups + len(shared) > self.pool.num_free:
            return False
        if total:
            self._grow(rows, have, extra, total)
        for group, i in shared:
            self._copy_on_write(group, int(rows[i]), int(settled[i]) // self.block_size)
        return True

    def _free_outside_window(self, group: int, window: int, rows: IntArray, num_computed: Int32Array) -> None:
        """Release blocks before the window of every later token. Steps in flight may still read them, but those run
        before any step that writes to the blocks for another row."""
        lines = group * self.max_rows + rows
        # Keep what a token after the last full block attends to: another request may hit the prefix up to there.
        resumes_at = num_computed - num_computed % self.block_size
        first = np.maximum(resumes_at - window + 1, 0) // self.block_size
        for i in (first > self.num_freed[lines]).nonzero()[0].tolist():
            line, begin, end = int(lines[i]), int(self.num_freed[lines[i]]), int(first[i])
            self.pool.release(self.tables[line, begin:end].tolist())
            self.tables[line, begin:end] = NULL_BLOCK
            self.num_freed[line] = end
            self.stats.freed_blocks += end - begin

    def _grow(self, rows: IntArray, have: Int32Array, extra: Int32Array, total: int) -> None:
        blocks = np.array(self.pool.allocate(total * self.num_groups))
        growing = extra.nonzero()[0]
        rows, have, extra = rows[growing], have[growing], extra[growing]
        if total > len(growing):  # some row needs several blocks, in consecutive columns
            starts = np.repeat(np.cumsum(extra) - extra, extra)
            columns = np.repeat(have, extra) + np.arange(total) - starts
            at = np.repeat(rows, extra)
        else:
            columns, at = have, rows
        self.num_blocks[rows] += extra
        for group in range(self.num_groups):
            own = blocks[group * total : (group + 1) * total]
            self.tables[group * self.max_rows + at, columns] = own
            self.changes.index.append((self._device_line(group, 0) + at) * self.width + columns)
            self.changes.block.append(own)

    def _shared_writes(self, rows: IntArray, num_computed: Int32Array) -> list[tuple[int, int]]:
        """Return group and index of each row that is about to write into a partly filled block with other holders."""
        column = np.minimum(num_computed // self.block_size, self.width - 1)
        inside = num_computed % self.block_size != 0
        found: list[tuple[int, int]] = []
        for group in range(self.num_groups):
            held = self.pool.ref_counts[self.tables[group * self.max_rows + rows, column]]
            found += [(group, i) for i in np.flatnonzero(inside & (held > 1)).tolist()]
        return found

    def _copy_on_write(self, group: int, row: int, column: int) -> None:
        line = group * self.max_rows + row
        old = int(self.tables[line, column])
        if self.pool.ref_counts[old] == 1:  # the other holders have copied it, so this row is the only one left
            return
        (new,) = self.pool.allocate(1)
        self.pool.release([old])
        self.tables[line, column] = new
        self.changes.index.append(np.array([self._device_line(group, row) * self.width + column]))
        self.changes.block.append(np.array([new]))
        self.changes.copies.append((old, new))
        self.stats.copied_blocks += 1

    def commit(self, row: int, token_ids: Int32Array) -> None:
        """Name the row's blocks that are full of `token_ids`, so that they can be hit.

        The tokens must be known, and computed by steps that are already planned or about to be.
        """
        done, full = int(self.num_hashed[row]), len(token_ids) // self.block_size
        if full <= done:
            return
        chain = self._chains[row]
        extend_chain(chain, self._salts[row], token_ids, full, self.block_size)
        for group in range(self.num_groups):
            line = group * self.max_rows + row
            first = max(done, int(self.num_freed[line]))
            names = [with_group(group, block_hash) for block_hash in chain[first:full]]
            self.pool.register(self.tables[line, first:full].tolist(), names)
        self.num_hashed[row] = full

    def take_changes(self) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Return changed table positions (each once), the block ids to write there, and (from, to) copies."""
        changes, self.changes = self.changes, CacheChanges()
        if not changes.index:
            return NO_ENTRIES, NO_ENTRIES, NO_COPIES
        index = np.concatenate(changes.index).astype(np.int32)
        block = np.concatenate(changes.block).astype(np.int32)
        if self._forked:  # only a fork can change an entry twice before it is sent; the last value counts
            latest = dict(zip(index.tolist(), block.tolist(), strict=True))
            index, block = np.array(list(latest), np.int32), np.array(list(latest.values()), np.int32)
        return index, block, np.array(changes.copies, np.int32) if changes.copies else NO_COPIES
