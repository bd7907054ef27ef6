"""KV blocks in host memory: a second pool behind the device's, in which content is found by the same names.

Swapping and offloading use one mechanism: a block that is evicted on the device is copied to the host under its name,
and is copied back when a lookup misses on the device and hits here. Blocks swapped out for a preempted request are
kept until it resumes or ends (`keep`, `release`). Offloaded blocks stay until they are the least recently used.

This file collects the copies of a step, and the worker makes them before the step writes: first all copies to the host,
then all copies to the device. So a host block that a step reads is pinned until that step is planned. Core process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvasir.engine.cache.block_pool import BlockPool, is_private
from kvasir.engine.cache.tier import NO_COPIES, SwappedBlocks, SwapPolicy, TierStats
from kvasir.messages import Int32Array


class HostTier:
    """A tier of `swap_blocks` + `offload_blocks`. Preempted rows can keep up to `swap_blocks` of them. If there are any
    `offload_blocks`, all other blocks hold evicted prefixes."""

    def __init__(self, swap_blocks: int, offload_blocks: int, swap_policy: SwapPolicy) -> None:
        self.pool = BlockPool(swap_blocks + offload_blocks + 1)
        self.stats = TierStats()
        self._swap_blocks = swap_blocks
        self._offloads = offload_blocks > 0
        self._swap_policy = swap_policy
        self._kept: Counter[bytes] = Counter()  # number of swapped rows that need each name
        self._swapped: set[SwappedBlocks] = set()
        self._pinned: list[int] = []  # host blocks that the next step reads
        self._to_host: dict[int, int] = {}  # host block -> device block
        self._from_host: list[tuple[int, int]] = []  # (host block, device block)

    @property
    def num_blocks(self) -> int:
        return self.pool.usable

    @property
    def num_used(self) -> int:
        return self.pool.num_used

    @property
    def num_cached(self) -> int:
        return self.pool.num_cached

    # ------------------------------------------------------------ copies to the host

    def on_evict(self, block: int, name: bytes) -> None:
        kept = name in self._kept
        known = self.pool.lookup(name)
        if known is not None:  # copied at an earlier eviction; the content of a name never changes
            self.pool.touch(known)
        elif kept or self._offloads:
            self._copy_out(block, name, kept)

    def _copy_out(self, block: int, name: bytes, kept: bool) -> None:
        if not self.pool.num_free:  # all blocks are kept or pinned: this is rare, and lost tokens are recomputed
            self.stats.host_lost_blocks += 1
            return
        (host_block,) = self.pool.allocate(1)
        self.pool.register([host_block], [name])
        self._to_host[host_block] = block  # replaces a copy whose block was evicted again before the step
        if kept:
            self.stats.swapped_out_blocks += 1
        else:
            self.stats.offloaded_blocks += 1
            self.pool.release([host_block])

    # ------------------------------------------------------------ copies to the device

    def holds(self, name: bytes) -> bool:
        return self.pool.lookup(name) is not None

    def pin(self, names: Sequence[bytes]) -> list[int]:
        pinned = []
        for name in names:
            block = self.pool.lookup(name)
            assert block is not None, "a name that is pinned must have been found by a lookup"
            pinned.append(block)
            if name in self._kept:
                self.stats.swapped_in_blocks += 1
            else:
                self.stats.restored_blocks += 1
        self.pool.acquire(pinned)
        self._pinned += pinned
        return pinned

    def copy_in(self, pinned: Sequence[int], blocks: Sequence[int]) -> None:
        self._from_host += zip(pinned, blocks, strict=True)

    # ------------------------------------------------------------ blocks of preempted rows

    def keep(self, swapped: SwappedBlocks, num_blocks: int, num_tokens: int) -> bool:
        new = [name for name in swapped.names if name not in self._kept]
        if len(self._kept) + len(new) > self._swap_blocks or not self._swap_policy.should_swap(num_blocks, num_tokens):
            return False
        self.pool.acquire([block for name in new if (block := self.pool.lookup(name)) is not None])
        self._kept.update(swapped.names)
        self._swapped.add(swapped)
        self.stats.swapped_preemptions += 1
        return True

    def release(self, swapped: SwappedBlocks) -> list[bytes]:
        if swapped not in self._swapped:
            return []
        self._swapped.remove(swapped)
        self._kept.subtract(swapped.names)
        unneeded = [name for name in swapped.names if not self._kept[name]]
        for name in unneeded:
            del self._kept[name]
            block = self.pool.lookup(name)
            if block is not None:
                self.pool.release([block])
                if is_private(name) or not self._offloads:
                    self.pool.discard(name)
        return unneeded

    # ------------------------------------------------------------ steps

    def take_copies(self) -> tuple[Int32Array, Int32Array]:
        """Return both lists sorted by host block, so that the worker can copy adjacent blocks together."""
        if not self._to_host and not self._from_host:
            return NO_COPIES, NO_COPIES
        to_host = [(block, host_block) for host_block, block in sorted(self._to_host.items())]
        from_host = sorted(self._from_host)
        self.pool.release(self._pinned)
        self._to_host, self._from_host, self._pinned = {}, [], []
        self.stats.host_evictions = self.pool.evictions
        return np.array(to_host, np.int32).reshape(-1, 2), np.array(from_host, np.int32).reshape(-1, 2)

    def reset(self) -> None:
        for swapped in list(self._swapped):
            self.release(swapped)
            swapped.names = []
        self.take_copies()
        is_reset = self.pool.reset()
        assert is_reset, "a host block is still kept or pinned"

    def check(self) -> None:
        self.pool.check()
        held = Counter(block for name in self._kept if (block := self.pool.lookup(name)) is not None)
        held.update(self._pinned)
        counts = {int(block): int(self.pool.ref_counts[block]) for block in np.flatnonzero(self.pool.ref_counts)}
        assert counts == dict(held), "the reference counts differ from the blocks that are kept or pinned"
        needed = Counter(name for swapped in self._swapped for name in swapped.names)
        assert needed == self._kept, "the counts of kept names differ from the names that swapped rows need"
        assert len(self._kept) <= self._swap_blocks, "more blocks are kept than swap_blocks allows"
