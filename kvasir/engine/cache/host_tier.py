"""Blocks that live on in host memory: a second pool behind the device's, in which content is found by the same names.

There is one mechanism. A block that is evicted on the device may be copied out under its name; a name that is looked
up and is not on the device may be copied in again. Whether that is "swapping" or "offloading" is only a question of
who wants the name kept: a preempted request that will return (`keep`, until `let_go`), or nobody in particular, in
which case it stays until the least recently used one must go.

The copies of a step are collected here and made by the worker before the step writes: first all that leave, then all
that arrive. So a host block that is read in a step must not be given away before the step is planned, and is held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvasir.engine.cache.block_pool import BlockPool
from kvasir.engine.cache.prefix import is_private
from kvasir.engine.cache.tier import NO_COPIES, SwapChoice, SwappedBlocks, TierStats
from kvasir.messages import Int32Array


class HostTier:
    """`swap_blocks` can be kept for preempted rows. Whatever of all blocks is not, holds evicted text, if there are
    `offload_blocks` at all."""

    def __init__(self, swap_blocks: int, offload_blocks: int, choice: SwapChoice) -> None:
        self.pool = BlockPool(swap_blocks + offload_blocks + 1)
        self.stats = TierStats()
        self._swap_blocks = swap_blocks
        self._offloads = offload_blocks > 0
        self._choice = choice
        self._kept: Counter[bytes] = Counter()  # how many swapped rows want each name
        self._swapped: set[SwappedBlocks] = set()
        self._reading: list[int] = []
        self._leaving: dict[int, int] = {}  # host block -> device block
        self._arriving: list[tuple[int, int]] = []

    @property
    def num_blocks(self) -> int:
        return self.pool.usable

    @property
    def num_used(self) -> int:
        return self.pool.num_used

    @property
    def num_cached(self) -> int:
        return self.pool.num_cached

    # ------------------------------------------------------------ out

    def evicted(self, block: int, name: bytes) -> None:
        kept = name in self._kept
        known = self.pool.lookup(name)
        if known is not None:  # from an earlier eviction: content does not change under a name
            self.pool.touch(known)
        elif kept or self._offloads:
            self._copy_out(block, name, kept)

    def _copy_out(self, block: int, name: bytes, kept: bool) -> None:
        if not self.pool.num_free:  # a step that reads this much is rare, and what is lost is computed again
            self.stats.host_lost_blocks += 1
            return
        (mine,) = self.pool.allocate(1)
        self.pool.register([mine], [name])
        self._leaving[mine] = block  # in place of one that was dropped again in the same step
        if kept:
            self.stats.swapped_out_blocks += 1
        else:
            self.stats.offloaded_blocks += 1
            self.pool.release([mine])

    # ------------------------------------------------------------ in

    def holds(self, name: bytes) -> bool:
        return self.pool.lookup(name) is not None

    def fetch(self, names: Sequence[bytes]) -> list[int]:
        held = []
        for name in names:
            block = self.pool.lookup(name)
            assert block is not None, "what is fetched was found a moment ago"
            held.append(block)
            if name in self._kept:
                self.stats.swapped_in_blocks += 1
            else:
                self.stats.restored_blocks += 1
        self.pool.acquire(held)
        self._reading += held
        return held

    def bring(self, held: Sequence[int], blocks: Sequence[int]) -> None:
        self._arriving += zip(held, blocks, strict=True)

    # ------------------------------------------------------------ who waits for what

    def keep(self, swapped: SwappedBlocks, num_blocks: int, num_tokens: int) -> bool:
        new = [name for name in swapped.names if name not in self._kept]
        if len(self._kept) + len(new) > self._swap_blocks or not self._choice.pays(num_blocks, num_tokens):
            return False
        self.pool.acquire([block for name in new if (block := self.pool.lookup(name)) is not None])
        self._kept.update(swapped.names)
        self._swapped.add(swapped)
        self.stats.swapped_preemptions += 1
        return True

    def let_go(self, swapped: SwappedBlocks) -> list[bytes]:
        if swapped not in self._swapped:
            return []
        self._swapped.remove(swapped)
        self._kept.subtract(swapped.names)
        done = [name for name in swapped.names if not self._kept[name]]
        for name in done:
            del self._kept[name]
            block = self.pool.lookup(name)
            if block is not None:
                self.pool.release([block])
                if is_private(name) or not self._offloads:
                    self.pool.discard(name)
        return done

    # ------------------------------------------------------------ steps

    def take_copies(self) -> tuple[Int32Array, Int32Array]:
        """Both ordered by host block, so that neighbours can travel together."""
        if not self._leaving and not self._arriving:
            return NO_COPIES, NO_COPIES
        out = [(block, mine) for mine, block in sorted(self._leaving.items())]
        back = sorted(self._arriving)
        self.pool.release(self._reading)
        self._leaving, self._arriving, self._reading = {}, [], []
        self.stats.host_evictions = self.pool.evictions
        return np.array(out, np.int32).reshape(-1, 2), np.array(back, np.int32).reshape(-1, 2)

    def reset(self) -> None:
        for swapped in list(self._swapped):
            self.let_go(swapped)
            swapped.names = []
        self.take_copies()
        forgotten = self.pool.reset()
        assert forgotten, "nobody waits for a block and no step reads one"

    def check(self) -> None:
        self.pool.check()
        held = Counter(block for name in self._kept if (block := self.pool.lookup(name)) is not None)
        held.update(self._reading)
        counts = {int(block): int(self.pool.ref_counts[block]) for block in np.flatnonzero(self.pool.ref_counts)}
        assert counts == dict(held), "a host block is held for nobody"
        wanted = Counter(name for swapped in self._swapped for name in swapped.names)
        assert wanted == self._kept, "the counts differ from what swapped rows wait for"
        assert len(self._kept) <= self._swap_blocks, "more is kept than was allowed"
