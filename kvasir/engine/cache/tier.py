"""What the cache manager asks of wherever content goes that the device has no room for, and comes from again.

Host memory is one such tier (host_tier.py). Another kind (a disk, another machine) is another class, or stands behind
that one and fills its blocks. Core process; names and numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvasir.messages import Int32Array, StepCosts, no_copies

NO_COPIES = no_copies()


@dataclass(slots=True, eq=False)
class SwappedBlocks:
    """What a preempted row had computed, and under which names it is kept for its return, if it is."""

    num_computed: int  # tokens
    num_kept: int = 0  # of those, in blocks that are kept; the last one may be half full
    chain: list[bytes] = field(default_factory=list)  # a name for each column
    names: list[bytes] = field(default_factory=list)  # the blocks': those of the chain, for each group that has one


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
    stats: TierStats

    @property
    def num_blocks(self) -> int:
        """That can be held."""

    @property
    def num_used(self) -> int:
        """Held for somebody."""

    @property
    def num_cached(self) -> int:
        """Held as long as there is room."""

    def evicted(self, block: int, name: bytes) -> None:
        """The device gives this block to somebody else. What it holds until the next step is known as `name`."""

    def holds(self, name: bytes) -> bool:
        """Whether `fetch` could bring this content."""

    def fetch(self, names: Sequence[bytes]) -> list[int]:
        """Hold these for the next step. The numbers returned are for `bring`."""

    def bring(self, held: Sequence[int], blocks: Sequence[int]) -> None:
        """In the next step, copy what `fetch` holds into these blocks of the device."""

    def keep(self, swapped: SwappedBlocks, num_blocks: int, num_tokens: int) -> bool:
        """Keep blocks for a row's return, if there is room and it pays: `num_blocks` and `num_tokens` are its own."""

    def let_go(self, swapped: SwappedBlocks) -> list[bytes]:
        """The row is back, or will not come. Names that nobody waits for any more."""

    def take_copies(self) -> tuple[Int32Array, Int32Array]:
        """(device, host) blocks to copy out and (host, device) blocks to copy in, since the last call."""

    def reset(self) -> None:
        """Forget everything. SwappedBlocks rows will find nothing."""

    def check(self) -> None:
        """Every block is accounted for."""


class NoTier:
    """What leaves the device is gone."""

    num_blocks = num_used = num_cached = 0

    def __init__(self) -> None:
        self.stats = TierStats()

    def evicted(self, block: int, name: bytes) -> None:
        pass

    def holds(self, name: bytes) -> bool:
        return False

    def fetch(self, names: Sequence[bytes]) -> list[int]:
        raise AssertionError("there is nothing to fetch")

    def bring(self, held: Sequence[int], blocks: Sequence[int]) -> None:
        raise AssertionError("there is nothing to bring")

    def keep(self, swapped: SwappedBlocks, num_blocks: int, num_tokens: int) -> bool:
        return False

    def let_go(self, swapped: SwappedBlocks) -> list[bytes]:
        return []

    def take_copies(self) -> tuple[Int32Array, Int32Array]:
        return NO_COPIES, NO_COPIES

    def reset(self) -> None:
        pass

    def check(self) -> None:
        pass


# ----------------------------------------------------------------
# Whether a preempted request's blocks are worth moving to the host and back, or are computed again. Core process.


class SwapChoice(Protocol):
    def pays(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether moving `num_blocks` out and in again is better than computing `num_tokens`."""


@dataclass(slots=True, frozen=True)
class Always:
    """Somebody has decided already."""

    answer: bool

    def pays(self, num_blocks: int, num_tokens: int) -> bool:
        return self.answer


@dataclass(slots=True, frozen=True)
class CostModel:
    """Seconds against seconds, as the worker has measured them.

    Both sides are on the careful side of what they cost in truth: copies run beside the step, and blocks that nobody
    takes meanwhile are never moved at all; tokens computed late in a text cost more than those the worker timed.
    """

    costs: StepCosts

    def pays(self, num_blocks: int, num_tokens: int) -> bool:
        return 2 * num_blocks * self.costs.copy_block < num_tokens * self.costs.compute_token
