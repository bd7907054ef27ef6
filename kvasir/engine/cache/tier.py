"""Second tier of the KV cache: memory that keeps blocks which the device has no room for. Core process.

`Tier` is the interface, with what a preempted row asks it to keep. `HostTier` keeps blocks in host memory: a second
pool behind the device's, in which content is found by the same names. A tier on disk or on another machine would be
another class, or would sit behind HostTier and fill its blocks. A tier knows block names and numbers, not tensors.

Swapping and offloading use one mechanism: a block that is evicted on the device is copied to the host under its name,
and is copied back when a lookup misses on the device and hits here. Blocks swapped out for a preempted request are
kept until it resumes or ends (`keep`, `release`). Offloaded blocks stay until they are the least recently used.

HostTier collects the copies of a step, and the worker makes them before the step writes: first all copies to the host,
then all copies to the device. So a host block that a step reads is pinned until that step is planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvasir.engine.cache.block_pool import BlockPool, is_private, private_name, with_group, without_group
from kvasir.messages import Int32Array, StepCosts, empty_pairs

if TYPE_CHECKING:
    from kvasir.engine.cache.manager import KVCacheManager

NO_COPIES = empty_pairs()  # shared by all callers, which do not write to it


@dataclass(slots=True, eq=False)
class SwappedBlocks:
    """The computed tokens of a preempted row and, if the tier keeps its blocks, their names."""

    num_computed: int  # tokens
    num_kept: int = 0  # tokens in blocks that are kept; the last block may be partly filled
    chain: list[bytes] = field(default_factory=list)  # one name per column of the block table
    names: list[bytes] = field(default_factory=list)  # names of the kept blocks: the chain's, for each group of layers


@dataclass(slots=True)
class TierStats:
    """Counters since the start, under the names of EngineStats."""

    swapped_preemptions: int = 0  # preempted rows whose blocks were kept
    swapped_out_blocks: int = 0  # blocks copied out for a request that will resume ...
    swapped_in_blocks: int = 0  # ... and copied in when it did
    offloaded_blocks: int = 0  # evicted blocks copied out because a later prompt may need them ...
    restored_blocks: int = 0  # ... and copied in when one did
    host_evictions: int = 0  # blocks of the tier that were replaced by others
    host_lost_blocks: int = 0  # evicted blocks that found no room in the tier


class Tier(Protocol):
    """Blocks outside the device, found by the same names as on the device."""

    stats: TierStats

    @property
    def num_blocks(self) -> int:
        """Capacity in blocks."""

    @property
    def num_used(self) -> int:
        """Number of blocks kept for preempted requests or pinned for the next step."""

    @property
    def num_cached(self) -> int:
        """Number of other blocks with content; they can be evicted."""

    def on_evict(self, block: int, name: bytes) -> None:
        """The device evicts this block. The block has the content called `name` until the next step runs."""

    def holds(self, name: bytes) -> bool:
        """Whether `pin` would find this content."""

    def pin(self, names: Sequence[bytes]) -> list[int]:
        """Pin the blocks with these names until the next step and return their ids in the tier, for `copy_in`."""

    def copy_in(self, pinned: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy pinned blocks into these blocks of the device before the next step writes."""

    def keep(self, swapped: SwappedBlocks, num_blocks: int, num_tokens: int) -> bool:
        """Keep the blocks of a preempted row if there is room and the swap policy agrees. `num_blocks` would have to
        be copied, `num_tokens` would have to be recomputed otherwise. Returns whether they are kept."""

    def release(self, swapped: SwappedBlocks) -> list[bytes]:
        """Stop keeping the blocks of a row that resumed or ended. Returns the names that no other row needs."""

    def take_copies(self) -> tuple[Int32Array, Int32Array]:
        """Return the (device, host) blocks to copy out and the (host, device) blocks to copy in since the last call."""

    def reset(self) -> None:
        """Drop all content, also that of preempted rows."""

    def check(self) -> None:
        """Assert that every block is accounted for."""


class NoTier:
    """A tier without room: evicted content is lost and preempted rows are recomputed."""

    num_blocks = num_used = num_cached = 0

    def __init__(self) -> None:
        self.stats = TierStats()

    def on_evict(self, block: int, name: bytes) -> None:
        pass

    def holds(self, name: bytes) -> bool:
        return False

    def pin(self, names: Sequence[bytes]) -> list[int]:
        raise AssertionError("a tier without blocks has nothing to pin")

    def copy_in(self, pinned: Sequence[int], blocks: Sequence[int]) -> None:
        raise AssertionError("a tier without blocks has nothing to copy")

    def keep(self, swapped: SwappedBlocks, num_blocks: int, num_tokens: int) -> bool:
        return False

    def release(self, swapped: SwappedBlocks) -> list[bytes]:
        return []

    def take_copies(self) -> tuple[Int32Array, Int32Array]:
        return NO_COPIES, NO_COPIES

    def reset(self) -> None:
        pass

    def check(self) -> None:
        pass


# ----------------------------------------------------------------
# Swap or recompute: whether the blocks of a preempted request are copied to the host and back, or computed again.


class SwapPolicy(Protocol):
    """Decides between swapping and recomputing a preempted row."""

    def should_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether copying `num_blocks` to the host and back is better than computing `num_tokens` again."""


@dataclass(slots=True, frozen=True)
class FixedSwapPolicy:
    """Always swaps or never does, as the settings say."""

    swaps: bool

    def should_swap(self, num_blocks: int, num_tokens: int) -> bool:
        return self.swaps


@dataclass(slots=True, frozen=True)
class CostSwapPolicy:
    """Compares the time of both ways, from costs that the worker measured.

    The estimate favours recomputing: copies overlap with steps, blocks that are not reused meanwhile are never copied,
    and tokens late in a sequence take longer than those that the worker timed.
    """

    costs: StepCosts

    def should_swap(self, num_blocks: int, num_tokens: int) -> bool:
        return 2 * num_blocks * self.costs.copy_block < num_tokens * self.costs.compute_token


# ----------------------------------------------------------------
# Names for all blocks of a preempted row, so that it finds them on the device or in the tier when it resumes.
#
# With prefix caching, full blocks have names already. A partly filled last block and, without prefix caching, every
# block gets a private name; rows that share a block share its name.


def keep_swapped_blocks(cache: KVCacheManager, row: int, hashes: list[bytes], num_tokens: int) -> SwappedBlocks:
    """Ask the tier to keep the row's blocks, and name those that have no name. With prefix caching, `hashes` are the
    names of the full blocks. If the tier declines, the result has no names."""
    columns = num_tokens // cache.block_size
    chain = hashes[:columns] if cache.caching else [_shared_name(cache, row, column) for column in range(columns)]
    if num_tokens % cache.block_size and _is_exclusive(cache, row, columns):
        chain.append(private_name())
    held = _row_blocks(cache, row, len(chain))
    swapped = SwappedBlocks(num_tokens, min(num_tokens, len(chain) * cache.block_size), chain)
    swapped.names = [with_group(group, chain[column]) for group, column, _ in held]
    own = [column for _, column, block in held if cache.pool.ref_counts[block] == 1]
    # With prefix caching, blocks that other rows hold are found by their hash; the rest would be recomputed.
    to_recompute = set(own) if cache.caching else range(len(chain))
    if not to_recompute or not cache.tier.keep(swapped, len(own), len(to_recompute) * cache.block_size):
        return SwappedBlocks(num_tokens)
    for (_, column, block), name in zip(held, swapped.names, strict=True):
        if column == columns:  # a step in flight may have filled and named it, but the row will write to it again
            cache.pool.forget(block)
        if cache.pool.name_of(block) is None:
            cache.pool.register([block], [name])
    return swapped


def _row_blocks(cache: KVCacheManager, row: int, columns: int) -> list[tuple[int, int, int]]:
    """Return group, column and block of each block that the row holds in its first `columns` columns."""
    lines = [group * cache.max_rows + row for group in range(cache.num_groups)]
    return [
        (group, column, int(cache.tables[line, column]))
        for group, line in enumerate(lines)
        for column in range(int(cache.num_freed[line]), columns)
    ]


def _shared_name(cache: KVCacheManager, row: int, column: int) -> bytes:
    """Return the name by which a swapped row already knows this full block, or a new private name."""
    for group in range(cache.num_groups):
        name = cache.pool.name_of(int(cache.tables[group * cache.max_rows + row, column]))
        if name is not None:
            return without_group(group, name)
    return private_name()


def _is_exclusive(cache: KVCacheManager, row: int, column: int) -> bool:
    """Whether no other row holds the row's blocks in this column, and no swapped row needs them."""
    blocks = cache.tables[row :: cache.max_rows, column].tolist()
    names = [cache.pool.name_of(block) for block in blocks]
    return bool((cache.pool.ref_counts[blocks] == 1).all()) and not any(map(is_private, filter(None, names)))


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
