"""BlockPool: states of blocks, order of eviction, names of contents."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir.engine.cache.block_pool import BlockPool, extend_chain


def test_every_usable_block_can_be_allocated_once() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    assert sorted(blocks) == [1, 2, 3, 4]
    with pytest.raises(AssertionError, match="asked for 1 blocks, 0 are free"):
        pool.allocate(1)
    pool.release(blocks)
    pool.check()
    assert pool.num_free == 4


def test_cached_blocks_are_evicted_last_and_oldest_first() -> None:
    pool = BlockPool(5)
    a, b, c, d = pool.allocate(4)
    pool.register([a, b], [b"a", b"b"])
    pool.release([b, a, c, d])
    assert pool.num_cached == 2
    assert set(pool.allocate(2)) == {c, d}
    assert pool.allocate(1) == [b], "b was released first"
    assert pool.lookup(b"b") is None and pool.lookup(b"a") == a
    assert pool.evictions == 1
    pool.check()


def test_hit_revives_a_free_block() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.register([block], [b"x"])
    pool.release([block])
    pool.acquire([pool.lookup(b"x")])
    assert pool.num_used == 1 and pool.num_cached == 0
    pool.acquire([block])
    pool.release([block])
    assert pool.num_used == 1, "one reference is left"


def test_first_block_with_some_content_keeps_the_name() -> None:
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    pool.register([a], [b"same"])
    pool.register([b], [b"same"])
    pool.release([a, b])
    assert pool.lookup(b"same") == a and pool.num_cached == 1
    pool.check()


def test_reset_needs_an_idle_pool() -> None:
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    pool.register([a], [b"x"])
    pool.release([a])
    assert not pool.reset() and pool.lookup(b"x") == a
    pool.release([b])
    assert pool.reset() and pool.lookup(b"x") is None
    pool.check()


def test_names_depend_on_all_earlier_tokens_and_on_the_salt() -> None:
    def names(tokens: list[int], salt: bytes = b"") -> list[bytes]:
        chain: list[bytes] = []
        extend_chain(chain, salt, np.array(tokens, np.int32), len(tokens) // 2, 2)
        return chain

    assert names([1, 2, 3, 4])[0] == names([1, 2, 9, 9])[0]
    assert names([1, 2, 3, 4])[1] != names([9, 2, 3, 4])[1]
    assert names([1, 2], b"s") != names([1, 2])
    # names must never change: cached blocks may outlive this process
    assert names([1, 2])[0].hex().startswith("0fb7de86b0e8cf6a")


def test_a_chain_extended_step_by_step_equals_one_made_at_once() -> None:
    tokens = np.arange(12, dtype=np.int32)
    whole: list[bytes] = []
    grown: list[bytes] = []
    extend_chain(whole, b"", tokens, 6, 2)
    for count in (1, 1, 4, 6):
        extend_chain(grown, b"", tokens, count, 2)
    assert grown == whole and len(set(whole)) == 6


def test_the_times_of_cached_blocks() -> None:
    now = 0.0
    pool = BlockPool(3, clock=lambda: now)
    first, second = pool.allocate(2)
    pool.register([first, second], [b"a", b"b"])
    now = 1.0
    pool.release([first, second])
    now = 4.0
    pool.acquire([second])
    assert (sum(pool.times.block_reuse_gaps), pool.times.block_reuse_seconds) == (1, 3.0)
    now = 10.0
    pool.allocate(1)
    assert sum(pool.times.block_lifetimes) == sum(pool.times.block_idle_times) == 1
    assert (pool.times.block_lifetime_seconds, pool.times.block_idle_seconds) == (10.0, 9.0)
