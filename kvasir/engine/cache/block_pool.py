"""The pool of KV blocks: reference counts, free blocks and cached blocks.

A block is in exactly one of three states: used (referenced), cached (free, but its content can still be hit) or empty
(free, without useful content). Every operation is O(1) per block. The pool knows block ids and the names of block
contents (prefix.py), not requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from kvasir.messages import NULL_BLOCK


class BlockPool:
    def __init__(self, num_blocks: int, on_evict: Callable[[int, bytes], None] | None = None) -> None:
        """`on_evict` is called with the id and name of each cached block that is allocated for other content."""
        assert num_blocks >= 2, f"a pool needs the null block and at least one more, not {num_blocks}"
        self.num_blocks = num_blocks
        self.ref_counts: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.evictions = 0
        self._on_evict = on_evict
        self._empty = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def usable(self) -> int:
        """Number of blocks that requests can hold at once."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.usable - self.num_free

    def cached_blocks(self) -> NDArray[np.int32]:
        """Return the cached blocks, next to be evicted first."""
        return np.fromiter(self._cached, np.int32, len(self._cached))

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one reference each: empty blocks first, then the least recently used cached
        ones."""
        assert count <= self.num_free, f"asked for {count} blocks, {self.num_free} are free"
        cut = max(0, len(self._empty) - count)
        blocks = self._empty[cut:]
        del self._empty[cut:]
        while len(blocks) < count:
            block, _ = self._cached.popitem(last=False)
            name = self._hash_of[block]
            if self._on_evict is not None and name is not None:
                self._on_evict(block, name)
            self.forget(block)
            self.evictions += 1
            blocks.append(block)
        self.ref_counts[blocks] = 1
        return blocks

    def lookup(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def name_of(self, block: int) -> bytes | None:
        return self._hash_of[block]

    def touch(self, block: int) -> None:
        """Mark a block as just used, so that it is evicted last."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block; a cached block becomes used."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._cached[block]
            self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one reference from each block. Pass a sequence's last block first: blocks are evicted in this
        order."""
        refs = self.ref_counts
        for block in blocks:
            refs[block] -= 1
            if refs[block]:
                continue
            if self._hash_of[block] is None:
                self._empty.append(block)
            else:
                self._cached[block] = None

    def register(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Make blocks findable by the names of their contents. If a name is taken, the block that has it keeps it."""
        for block, block_hash in zip(blocks, hashes, strict=True):
            if self._block_of.setdefault(block_hash, block) == block:
                self._hash_of[block] = block_hash

    def forget(self, block: int) -> None:
        """Remove a block's name, so that its content cannot be found any more."""
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None

    def discard(self, block_hash: bytes) -> None:
        """Drop content that will not be looked up again; a cached block becomes empty."""
        block = self._block_of.get(block_hash)
        if block is None:
            return
        self.forget(block)
        if block in self._cached:
            del self._cached[block]
            self._empty.append(block)

    def reset(self) -> bool:
        """Drop all cached content. Returns False and changes nothing while any block is used."""
        if self.num_used:
            return False
        while self._cached:
            block, _ = self._cached.popitem()
            self.forget(block)
            self._empty.append(block)
        return True

    def check(self) -> None:
        """Assert that every block is in exactly one state. O(blocks), for tests and debugging."""
        empty, cached = set(self._empty), set(self._cached)
        used = {int(block) for block in np.flatnonzero(self.ref_counts)}
        assert len(empty) == len(self._empty), "a block is on the empty list twice"
        assert not (empty & cached or empty & used or cached & used), "a block is in two states at once"
        assert len(empty | cached | used) == self.usable, "a block was lost"
        assert NULL_BLOCK not in empty | cached | used, "the null block was allocated"
        assert (self.ref_counts >= 0).all(), "a block was released more often than acquired"
        assert all(self._hash_of[block] is not None for block in cached), "a cached block has no hash"
        assert all(self._hash_of[block] is None for block in empty), "an empty block can still be found"
        assert all(self._hash_of[block] == key for key, block in self._block_of.items()), "the hash maps disagree"
