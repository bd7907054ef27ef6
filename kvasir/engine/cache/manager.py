"""Which blocks hold which row's tokens: growth, prefix hits, forks with copy-on-write, release.

Rows are numbers and token counts are given by the scheduler; this file knows neither requests nor tensors.
Table entries and copies that the device must learn of collect in `changes` until the next plan takes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.cache.block_pool import BlockPool
from kvasir.engine.cache.prefix import extend_chain
from kvasir.messages import NULL_BLOCK, Int32Array

IntArray = NDArray[np.int64]
NOTHING: Int32Array = np.zeros(0, np.int32)
NO_COPIES: Int32Array = np.zeros((0, 2), np.int32)


@dataclass(slots=True)
class CacheStats:
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # of those, found
    copies: int = 0  # blocks copied because a shared one was written
    shared: int = 0  # blocks taken over from another row by a fork


@dataclass(slots=True)
class CacheChanges:
    """What the device does not know yet."""

    index: list[IntArray] = field(default_factory=list)  # flat positions in the block table ...
    block: list[IntArray] = field(default_factory=list)  # ... and what stands there now
    copies: list[tuple[int, int]] = field(default_factory=list)


class KVCacheManager:
    def __init__(
        self, num_blocks: int, block_size: int, max_rows: int, max_model_len: int, enable_prefix_caching: bool
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.caching = enable_prefix_caching
        self.stats = CacheStats()
        self.changes = CacheChanges()
        self.width = -(-max_model_len // block_size)  # block-table columns
        self.tables: Int32Array = np.full((max_rows, self.width), NULL_BLOCK, np.int32)
        self.num_blocks: Int32Array = np.zeros(max_rows, np.int32)
        self.num_hashed: Int32Array = np.zeros(max_rows, np.int32)  # full blocks that have a name
        self._chains: list[list[bytes]] = [[] for _ in range(max_rows)]
        self._salts: list[bytes] = [b""] * max_rows
        self._forked = False  # until the first fork no block that is being written can be shared

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------ rows come and go

    def find_prefix(self, token_ids: Int32Array, chain: list[bytes], salt: bytes) -> list[int]:
        """Blocks that already hold the longest known prefix; `chain` is extended by what had to be hashed.

        The last token is never taken from the cache: its logits are what the request wants.
        """
        hits: list[int] = []
        if self.caching:
            longest = (len(token_ids) - 1) // self.block_size
            extend_chain(chain, salt, token_ids, longest, self.block_size)
            for block_hash in chain[:longest]:
                block = self.pool.lookup(block_hash)
                if block is None:
                    break
                hits.append(block)
        return hits

    def num_free_besides(self, hits: list[int]) -> int:
        """Blocks that would be left to allocate once `hits` are taken."""
        return self.pool.num_free - int((self.pool.ref_counts[hits] == 0).sum() if hits else 0)

    def open(self, row: int, hits: list[int], chain: list[bytes], salt: bytes, num_tokens: int) -> None:
        """A row starts with the blocks found for it."""
        self.pool.acquire(hits)
        self._place(row, hits)
        self.num_hashed[row] = len(hits)
        self._chains[row] = chain
        self._salts[row] = salt
        if self.caching:
            self.stats.prefix_queries += num_tokens
            self.stats.prefix_hits += len(hits) * self.block_size

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        """`child` starts with the blocks of `parent` that hold its first `num_tokens`; the last may be half full."""
        count = self.blocks_for(num_tokens)
        full = min(num_tokens // self.block_size, int(self.num_hashed[parent]))
        blocks = self.tables[parent, :count].tolist()
        self.pool.acquire(blocks)
        self._place(child, blocks)
        self.num_hashed[child] = full
        self._chains[child] = self._chains[parent][:full]
        self._salts[child] = self._salts[parent]
        self._forked = True
        self.stats.shared += count

    def close(self, row: int, token_ids: Int32Array) -> list[bytes]:
        """The row gives its blocks back. Those filled with `token_ids` are named now, since nobody could have asked
        for generated text earlier; the names are returned, for a request that will come back."""
        if self.caching:
            self.commit(row, token_ids)
        self.pool.release(self.tables[row, : self.num_blocks[row]].tolist()[::-1])
        chain, self._chains[row] = self._chains[row], []
        self.num_blocks[row] = self.num_hashed[row] = 0
        return chain

    def _place(self, row: int, blocks: list[int]) -> None:
        self.tables[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        if blocks:
            start = row * self.width
            self.changes.index.append(np.arange(start, start + len(blocks)))
            self.changes.block.append(np.array(blocks))

    def common_blocks(self, rows: IntArray) -> int:
        """How many first blocks all these rows have in common."""
        most = int(self.num_blocks[rows].min())
        first = self.tables[rows[0]]
        count, stride = 0, 1
        while count < most:
            end = min(most, count + stride)
            same = (self.tables[rows, count:end] == first[count:end]).all(axis=0)
            if not same.all():
                return count + int(same.argmin())
            count, stride = end, 2 * stride
        return count

    # ------------------------------------------------------------ steps

    def prepare(self, rows: IntArray, num_computed: Int32Array, num_new: Int32Array) -> bool:
        """Make the next `num_new` tokens of each row writable. False, with nothing changed, if blocks run out."""
        have = self.num_blocks[rows]
        extra = -(-(num_computed + num_new) // self.block_size) - have
        shared = self._shared_writes(rows, num_computed) if self._forked else []
        total = int(extra.sum())
        if total + len(shared) > self.pool.num_free:
            return False
        if total:
            self._grow(rows, have, extra, total)
        for i in shared:
            self._copy_on_write(int(rows[i]), int(num_computed[i]) // self.block_size)
        return True

    def _grow(self, rows: IntArray, have: Int32Array, extra: Int32Array, total: int) -> None:
        blocks = np.array(self.pool.allocate(total))
        growing = np.flatnonzero(extra)
        rows, have, extra = rows[growing], have[growing], extra[growing]
        if total > len(growing):  # some row needs several: count up within each
            starts = np.repeat(np.cumsum(extra) - extra, extra)
            columns = np.repeat(have, extra) + np.arange(total) - starts
            at = np.repeat(rows, extra)
        else:
            columns, at = have, rows
        self.tables[at, columns] = blocks
        self.num_blocks[rows] += extra
        self.changes.index.append(at * self.width + columns)
        self.changes.block.append(blocks)

    def _shared_writes(self, rows: IntArray, num_computed: Int32Array) -> list[int]:
        """Which rows are about to write into the middle of a block that others hold too."""
        column = np.minimum(num_computed // self.block_size, self.width - 1)
        held = self.pool.ref_counts[self.tables[rows, column]]
        shared: list[int] = np.flatnonzero((num_computed % self.block_size != 0) & (held > 1)).tolist()
        return shared

    def _copy_on_write(self, row: int, column: int) -> None:
        old = int(self.tables[row, column])
        if self.pool.ref_counts[old] == 1:  # the other holder copied first and left it to us
            return
        (new,) = self.pool.allocate(1)
        self.pool.release([old])
        self.tables[row, column] = new
        self.changes.index.append(np.array([row * self.width + column]))
        self.changes.block.append(np.array([new]))
        self.changes.copies.append((old, new))
        self.stats.copies += 1

    def commit(self, row: int, token_ids: Int32Array) -> None:
        """Name the row's blocks that are full of `token_ids`, all of which are known and computed.

        "Computed" may lie ahead, as long as the device gets there before any step that is planned later.
        """
        done, full = int(self.num_hashed[row]), len(token_ids) // self.block_size
        if full > done:
            chain = self._chains[row]
            extend_chain(chain, self._salts[row], token_ids, full, self.block_size)
            self.pool.register(self.tables[row, done:full].tolist(), chain[done:full])
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
