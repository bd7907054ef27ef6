"""The pool of KV blocks: reference counts, free blocks and cached blocks.

A block is in exactly one of three states: used (referenced), cached (free, but its content can still be hit) or empty
(free, without useful content). Every operation is O(1) per block. The pool knows block ids and the names of block
contents, not requests.

The name of a full block is a hash of its tokens and of its parent's hash, so it covers all tokens before them. The
root covers everything else that must match for two requests to share blocks (the salt; later adapters and images).
Names are equal across processes and restarts. Private names are for blocks that only preempted requests look up: partly
filled blocks and, without prefix caching, all blocks.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvasir.messages import BLOCK_AGES, NULL_BLOCK, Int32Array, no_block_ages


@dataclass(slots=True)
class BlockTimes:
    """How long cached blocks stay and lie idle, under the names of EngineStats: numbers by bucket, and seconds."""

    block_lifetimes: list[int] = field(default_factory=no_block_ages)  # from allocation to eviction
    block_lifetime_seconds: float = 0.0
    block_idle_times: list[int] = field(default_factory=no_block_ages)  # from the last use to eviction
    block_idle_seconds: float = 0.0
    block_reuse_gaps: list[int] = field(default_factory=no_block_ages)  # from the last use to the next
    block_reuse_seconds: float = 0.0

    def evicted(self, lifetime: float, idle: float) -> None:
        self.block_lifetimes[bisect_left(BLOCK_AGES, lifetime)] += 1
        self.block_lifetime_seconds += lifetime
        self.block_idle_times[bisect_left(BLOCK_AGES, idle)] += 1
        self.block_idle_seconds += idle

    def reused(self, gap: float) -> None:
        self.block_reuse_gaps[bisect_left(BLOCK_AGES, gap)] += 1
        self.block_reuse_seconds += gap


class BlockPool:
    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int, bytes], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_evict` is called with the id and name of each cached block that is allocated for other content."""
        assert num_blocks >= 2, f"a pool needs the null block and at least one more, not {num_blocks}"
        self.num_blocks = num_blocks
        self.ref_counts: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.evictions = 0
        self.times = BlockTimes()
        self._clock = clock
        self._allocated: NDArray[np.float64] = np.zeros(num_blocks)  # when each block got its content
        self._last_used = [0.0] * num_blocks  # when each cached block was used last
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
        cut, now = max(0, len(self._empty) - count), self._clock()
        blocks = self._empty[cut:]
        del self._empty[cut:]
        while len(blocks) < count:
            block, _ = self._cached.popitem(last=False)
            name = self._hash_of[block]
            if self._on_evict is not None and name is not None:
                self._on_evict(block, name)
            self.forget(block)
            self.evictions += 1
            self.times.evicted(now - float(self._allocated[block]), now - self._last_used[block])
            blocks.append(block)
        self.ref_counts[blocks] = 1
        self._allocated[blocks] = now
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
        now = self._clock()
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._cached[block]
                self.times.reused(now - self._last_used[block])
            self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one reference from each block. Pass a sequence's last block first: blocks are evicted in this
        order."""
        refs, now = self.ref_counts, self._clock()
        for block in blocks:
            refs[block] -= 1
            if refs[block]:
                continue
            if self._hash_of[block] is None:
                self._empty.append(block)
            else:
                self._cached[block] = None
                self._last_used[block] = now

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


# ------------------------------------------------------------ names of block contents


def root_hash(salt: bytes) -> bytes:
    return sha256(b"kvasir/1\0" + salt).digest()


def extend_chain(chain: list[bytes], salt: bytes, token_ids: Int32Array, num_blocks: int, block_size: int) -> None:
    """Append hashes until `chain` names the first `num_blocks` full blocks of `token_ids`."""
    if len(chain) >= num_blocks:
        return
    parent = chain[-1] if chain else root_hash(salt)
    tokens = token_ids[len(chain) * block_size : num_blocks * block_size].tobytes()
    stride = 4 * block_size  # bytes
    for start in range(0, len(tokens), stride):
        parent = sha256(parent + tokens[start : start + stride]).digest()
        chain.append(parent)


_private_numbers = count(1)
_PRIVATE_BYTES = 8


def private_name() -> bytes:
    """Return a new name that is shorter than any hash."""
    return next(_private_numbers).to_bytes(_PRIVATE_BYTES, "big")


def is_private(name: bytes) -> bool:
    return len(name) <= _PRIVATE_BYTES + 1


def with_group(group: int, name: bytes) -> bytes:
    """Return a block's name in the pool: blocks of different groups hold different layers of the same tokens."""
    return name + bytes([group]) if group else name


def without_group(group: int, name: bytes) -> bytes:
    """Undo `with_group`."""
    return name[:-1] if group else name
