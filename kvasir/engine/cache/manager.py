"""Which blocks hold which row's tokens: growth, prefix hits, forks with copy-on-write, release.

Rows are numbers and token counts are given by the scheduler; this file knows neither requests nor tensors.
Table entries and copies that the device must learn of collect in `changes` until the next plan takes them.
Where content goes that the device has no room for, and comes from again, is the tier's business (tier.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.cache.block_pool import BlockPool
from kvasir.engine.cache.prefix import extend_chain, in_group, is_private, keep_for_return
from kvasir.engine.cache.prefix_groups import Group, find_groups
from kvasir.engine.cache.tier import NoTier, SwappedBlocks, Tier
from kvasir.messages import NULL_BLOCK, Int32Array

IntArray = NDArray[np.int64]
NOTHING: Int32Array = np.zeros(0, np.int32)
NO_COPIES: Int32Array = np.zeros((0, 2), np.int32)
ELSEWHERE = -1  # stands for a block that is not on the device but can be brought there


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
    """What the device does not know yet."""

    index: list[IntArray] = field(default_factory=list)  # flat positions in the block table ...
    block: list[IntArray] = field(default_factory=list)  # ... and what stands there now
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Prefix:
    """Blocks that hold the beginning of a text: as many in each group, the null block where a group does not
    look that far back. The last one may be half full."""

    num_tokens: int
    blocks: list[list[int]]
    names: list[bytes] = field(default_factory=list)  # of the columns

    @property
    def num_columns(self) -> int:
        return len(self.blocks[0])

    def held(self) -> list[int]:
        """Those that are on the device."""
        return [block for line in self.blocks for block in line if block > NULL_BLOCK]

    def absent(self) -> list[tuple[int, int]]:
        """Group and column of those that are not."""
        return [(g, c) for g, line in enumerate(self.blocks) for c, block in enumerate(line) if block == ELSEWHERE]


class KVCacheManager:
    """A row has a table per group of layers, all of the same length. Groups with a window give blocks back that no
    token to come will see."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_model_len: int,
        enable_prefix_caching: bool,
        windows: tuple[int | None, ...] = (None,),  # per group: how many last tokens its layers see
        tier: Tier | None = None,
    ) -> None:
        self.tier: Tier = tier or NoTier()
        self.pool = BlockPool(num_blocks, self.tier.evicted)
        self.block_size = block_size
        self.max_rows = max_rows
        self.windows = windows
        self.num_groups = len(windows)
        self.caching = enable_prefix_caching
        self.stats = CacheStats()
        self.changes = CacheChanges()
        self.width = -(-max_model_len // block_size)  # block-table columns
        # Group g's table of row r is line g * max_rows + r. On the device a group has one row more, for padding.
        self.tables: Int32Array = np.full((self.num_groups * max_rows, self.width), NULL_BLOCK, np.int32)
        self.num_blocks: Int32Array = np.zeros(max_rows, np.int32)  # columns in use
        self.num_hashed: Int32Array = np.zeros(max_rows, np.int32)  # full blocks that have a name
        self.num_freed: Int32Array = np.zeros(self.tables.shape[0], np.int32)  # columns given back, per line
        self._chains: list[list[bytes]] = [[] for _ in range(max_rows)]
        self._salts: list[bytes] = [b""] * max_rows
        self._windowed = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._forked = False  # until the first fork no block that is being written can be shared

    def blocks_for(self, num_tokens: int) -> int:
        """In all groups together."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def _first_seen(self, position: int, window: int | None) -> int:
        """The first column that a token at `position` sees."""
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    # ------------------------------------------------------------ rows come and go

    def find_prefix(
        self, token_ids: Int32Array, chain: list[bytes], salt: bytes, swapped: SwappedBlocks | None = None
    ) -> Prefix:
        """Blocks that already hold the longest known prefix; `chain` is extended by what had to be hashed.

        The last token is never taken from the cache: its logits are what the request wants.
        """
        if swapped is not None and swapped.names:
            return self._find(swapped.chain, swapped.num_kept)
        if not self.caching:
            return self.no_prefix()
        longest = (len(token_ids) - 1) // self.block_size
        extend_chain(chain, salt, token_ids, longest, self.block_size)
        return self._find(chain[:longest], longest * self.block_size)

    def _find(self, names: list[bytes], num_tokens: int) -> Prefix:
        """As many columns as there are. All of them hold `num_tokens`."""
        longest = len(names)
        lines: list[list[int | None]] = []
        for group, window in enumerate(self.windows):
            lines.append(self._look_up(group, names[:longest], stop_at_gap=window is None))
            longest = min(longest, len(lines[group]))
        num_tokens = min(num_tokens, longest * self.block_size)
        while longest and not all(self._covers(lines[group], num_tokens, window) for group, window in self._windowed):
            longest -= 1
            num_tokens = longest * self.block_size
        firsts = [self._first_seen(num_tokens, window) for window in self.windows]
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
            name = in_group(group, block_hash)
            block = self.pool.lookup(name)
            if block is None and self.tier.holds(name):
                block = ELSEWHERE
            if block is None and stop_at_gap:
                break
            line.append(block)
        return line

    def _covers(self, line: list[int | None], num_tokens: int, window: int) -> bool:
        """Whether the line holds all that the first token after `num_tokens` sees."""
        return None not in line[self._first_seen(num_tokens, window) : -(-num_tokens // self.block_size)]

    def num_free_besides(self, prefix: Prefix) -> int:
        """Blocks that would be left to allocate once those of `prefix` are taken."""
        held = prefix.held()
        revived = int((self.pool.ref_counts[held] == 0).sum()) if held else 0
        return self.pool.num_free - revived - len(prefix.absent())

    def open(
        self,
        row: int,
        prefix: Prefix,
        chain: list[bytes],
        salt: bytes,
        num_tokens: int,
        swapped: SwappedBlocks | None = None,
    ) -> None:
        """A row starts, or returns, with the blocks found for it."""
        self.pool.acquire(prefix.held())
        absent = prefix.absent()
        if absent:
            self._bring(prefix, absent)
        self._place(row, prefix.blocks)
        self.num_hashed[row] = prefix.num_tokens // self.block_size
        self._chains[row] = chain
        self._salts[row] = salt
        if self.caching:
            self.stats.prefix_cache_queries += num_tokens
            self.stats.prefix_cache_hits += prefix.num_tokens
            self.stats.host_cache_hits += len({column for _, column in absent}) * self.block_size
        if swapped is not None:
            self.stats.recomputed_tokens += max(0, swapped.num_computed - prefix.num_tokens)
            self.forget(swapped)

    def _bring(self, prefix: Prefix, absent: list[tuple[int, int]]) -> None:
        """Let the tier fill new blocks. It holds their content first: taking blocks may send it others to keep."""
        names = [in_group(group, prefix.names[column]) for group, column in absent]
        held = self.tier.fetch(names)
        blocks = self.pool.allocate(len(names))
        self.pool.register(blocks, names)
        self.tier.bring(held, blocks)
        for (group, column), block in zip(absent, blocks, strict=True):
            prefix.blocks[group][column] = block

    def can_fork(self, parent: int, num_tokens: int) -> bool:
        """Whether the parent still has all that a child with so many tokens would see."""
        return all(
            self.num_freed[group * self.max_rows + parent] <= self._first_seen(num_tokens, window)
            for group, window in self._windowed
        )

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        """`child` starts with the blocks of `parent` that hold its first `num_tokens`; the last may be half full."""
        count = -(-num_tokens // self.block_size)
        full = min(num_tokens // self.block_size, int(self.num_hashed[parent]))
        lines = [self.tables[group * self.max_rows + parent, :count].tolist() for group in range(self.num_groups)]
        self.pool.acquire(Prefix(num_tokens, lines).held())
        self._place(child, lines)
        self.num_hashed[child] = full
        self._chains[child] = self._chains[parent][:full]
        self._salts[child] = self._salts[parent]
        self._forked = True
        self.stats.shared_blocks += count

    def close(self, row: int, token_ids: Int32Array) -> list[bytes]:
        """The row gives its blocks back. Those filled with `token_ids` are named now, since nobody could have asked
        for generated text earlier; the names are returned, for a request that will come back."""
        if self.caching:
            self.commit(row, token_ids)
        for line in range(row, len(self.tables), self.max_rows):
            self.pool.release(self.tables[line, self.num_freed[line] : self.num_blocks[row]].tolist()[::-1])
            self.num_freed[line] = 0
        chain, self._chains[row] = self._chains[row], []
        self.num_blocks[row] = self.num_hashed[row] = 0
        return chain

    def swap_out(self, row: int, token_ids: Int32Array, may_keep: bool = True) -> tuple[list[bytes], SwappedBlocks]:
        """`close` for a row that will return with `token_ids` and at least one more."""
        swapped = SwappedBlocks(len(token_ids))
        if may_keep:
            if self.caching:
                self.commit(row, token_ids)
            swapped = keep_for_return(self, row, self._chains[row], len(token_ids))
        return self.close(row, token_ids), swapped

    def forget(self, swapped: SwappedBlocks) -> None:
        """The row has returned, or never will."""
        for name in self.tier.let_go(swapped):
            if is_private(name):
                self.pool.discard(name)

    def reset(self) -> bool:
        """Forget all cached content, wherever it is. False, and nothing is changed, while any block is in use."""
        if not self.pool.reset():
            return False
        self.tier.reset()
        return True

    def _place(self, row: int, lines: list[list[int]]) -> None:
        self.num_blocks[row] = len(lines[0])
        if not lines[0]:
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

    def sharing_groups(self, rows: IntArray, num_computed: Int32Array) -> list[Group]:
        """Rows that begin with the same blocks, in all groups of layers that see those. `num_computed`: tokens of all
        rows; a row's last one lies in a block that is its own, or will be once it is written."""
        seen = [group for group, window in enumerate(self.windows) if window is None]
        tables = [self.tables[group * self.max_rows : (group + 1) * self.max_rows] for group in seen]
        return find_groups(tables, rows, np.maximum(num_computed - 1, 0) // self.block_size, self.block_size)

    # ------------------------------------------------------------ steps

    def prepare(
        self, rows: IntArray, num_computed: Int32Array, num_new: Int32Array, num_unsettled: Int32Array | None = None
    ) -> bool:
        """Make the next `num_new` tokens of each row writable. False, with nothing changed, if blocks run out. Up to
        `num_unsettled` of the computed tokens may turn out to be rejected drafts."""
        settled = num_computed if num_unsettled is None else num_computed - num_unsettled
        for group, window in self._windowed:
            self._give_back(group, window, rows, settled)
        have = self.num_blocks[rows]
        extra = -(-(num_computed + num_new) // self.block_size) - have
        shared = self._shared_writes(rows, settled) if self._forked else []
        total = int(extra.sum())
        if total * self.num_groups + len(shared) > self.pool.num_free:
            return False
        if total:
            self._grow(rows, have, extra, total)
        for group, i in shared:
            self._copy_on_write(group, int(rows[i]), int(settled[i]) // self.block_size)
        return True

    def _give_back(self, group: int, window: int, rows: IntArray, num_computed: Int32Array) -> None:
        """Release blocks that lie before the window of every token to come. The device still reads them in steps that
        are planned already; those run before any step that a new holder writes in."""
        lines = group * self.max_rows + rows
        # What is seen from the last full block's end is kept: there another request may go on with this text.
        resumes_at = num_computed - num_computed % self.block_size
        first = np.maximum(resumes_at - window + 1, 0) // self.block_size
        for i in np.flatnonzero(first > self.num_freed[lines]).tolist():
            line, begin, end = int(lines[i]), int(self.num_freed[lines[i]]), int(first[i])
            self.pool.release(self.tables[line, begin:end].tolist())
            self.tables[line, begin:end] = NULL_BLOCK
            self.num_freed[line] = end
            self.stats.freed_blocks += end - begin

    def _grow(self, rows: IntArray, have: Int32Array, extra: Int32Array, total: int) -> None:
        blocks = np.array(self.pool.allocate(total * self.num_groups))
        growing = np.flatnonzero(extra)
        rows, have, extra = rows[growing], have[growing], extra[growing]
        if total > len(growing):  # some row needs several: count up within each
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
        """Groups and rows that are about to write into the middle of a block that others hold too."""
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
        if self.pool.ref_counts[old] == 1:  # the other holder copied first and left it to us
            return
        (new,) = self.pool.allocate(1)
        self.pool.release([old])
        self.tables[line, column] = new
        self.changes.index.append(np.array([self._device_line(group, row) * self.width + column]))
        self.changes.block.append(np.array([new]))
        self.changes.copies.append((old, new))
        self.stats.copied_blocks += 1

    def commit(self, row: int, token_ids: Int32Array) -> None:
        """Name the row's blocks that are full of `token_ids`, all of which are known and computed.

        "Computed" may lie ahead, as long as the device gets there before any step that is planned later.
        """
        done, full = int(self.num_hashed[row]), len(token_ids) // self.block_size
        if full <= done:
            return
        chain = self._chains[row]
        extend_chain(chain, self._salts[row], token_ids, full, self.block_size)
        for group in range(self.num_groups):
            line = group * self.max_rows + row
            first = max(done, int(self.num_freed[line]))
            names = [in_group(group, block_hash) for block_hash in chain[first:full]]
            self.pool.register(self.tables[line, first:full].tolist(), names)
        self.num_hashed[row] = full

    def take_changes(self) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Changed table positions (each once), the blocks that stand there now, and (from, to) copies."""
        changes, self.changes = self.changes, CacheChanges()
        if not changes.index:
            return NOTHING, NOTHING, NO_COPIES
        index = np.concatenate(changes.index).astype(np.int32)
        block = np.concatenate(changes.block).astype(np.int32)
        if self._forked:  # only a fork can set an entry twice before the device hears of it; the last one counts
            latest = dict(zip(index.tolist(), block.tolist(), strict=True))
            index, block = np.array(list(latest), np.int32), np.array(list(latest.values()), np.int32)
        return index, block, np.array(changes.copies, np.int32) if changes.copies else NO_COPIES
