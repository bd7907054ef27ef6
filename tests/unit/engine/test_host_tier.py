"""HostTier, alone and behind a cache: which blocks it keeps, and which copies it asks for."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir.config.engine import CacheConfig, EngineConfig, ModelConfig
from kvasir.engine.build import host_blocks, make_tier
from kvasir.engine.cache.block_pool import private_name
from kvasir.engine.cache.tier import CostSwapPolicy, FixedSwapPolicy, HostTier, NoTier, SwappedBlocks
from kvasir.engine.core import EngineCore
from kvasir.errors import ConfigError
from kvasir.executor.fake import DelayExecutor
from kvasir.messages import KVSpec, StepCosts
from tests.builders import Collector, check_blocks, expected, make_core, request, run


def content(number: int) -> bytes:
    return bytes([number]) * 32


def pairs(*numbers: tuple[int, int]) -> list[list[int]]:
    return [list(pair) for pair in numbers]


def copies(tier: HostTier) -> tuple[list[list[int]], list[list[int]]]:
    out, back = tier.take_copies()
    assert out.dtype == back.dtype == np.int32
    return out.tolist(), back.tolist()


def swapped(tier: HostTier, *names: bytes) -> SwappedBlocks:
    row = SwappedBlocks(1, 1, list(names), list(names))
    assert tier.keep(row, 1, 1)
    return row


def test_evicted_blocks_stay_until_they_are_least_recently_used() -> None:
    tier = HostTier(0, 2, FixedSwapPolicy(True))
    for number in (1, 2, 3):
        tier.on_evict(10 + number, content(number))
        tier.check()
    assert [tier.holds(content(number)) for number in (1, 2, 3)] == [False, True, True]
    assert copies(tier) == (pairs((13, 1), (12, 2)), []), "one copy for each host block: the last"
    assert tier.stats.offloaded_blocks == 3 and tier.num_cached == 2 and tier.num_used == 0
    tier.on_evict(20, content(2))
    assert copies(tier) == ([], []), "its content is in the tier already ..."
    tier.on_evict(21, content(4))
    assert tier.holds(content(2)) and not tier.holds(content(3)), "... and was used last"


def test_a_pinned_block_is_not_reused_before_the_step() -> None:
    tier = HostTier(0, 1, FixedSwapPolicy(True))
    tier.on_evict(5, content(1))
    tier.take_copies()
    held = tier.pin([content(1)])
    tier.on_evict(6, content(2))
    assert tier.stats.host_lost_blocks == 1 and not tier.holds(content(2))
    tier.copy_in(held, [7])
    assert copies(tier) == ([], pairs((held[0], 7)))
    tier.on_evict(6, content(2))
    assert tier.holds(content(2)) and not tier.holds(content(1))


def test_kept_blocks_stay_and_other_blocks_are_evicted_for_them() -> None:
    tier = HostTier(2, 1, FixedSwapPolicy(True))
    for number in (1, 2, 3):
        tier.on_evict(number, content(number))
    row = swapped(tier, content(1), private_name())
    tier.check()
    tier.on_evict(9, row.names[1])
    assert not tier.holds(content(2)), "it is the oldest block that is not kept"
    for number in (4, 5, 6):
        tier.on_evict(number, content(number))
    assert tier.holds(row.names[0]) and tier.holds(row.names[1]) and tier.num_used == 2
    assert set(tier.release(row)) == set(row.names)
    assert tier.holds(content(1)) and not tier.holds(row.names[1]), "private names cannot be looked up again"
    assert tier.num_used == 0
    tier.check()


def test_two_swapped_rows_can_share_a_block() -> None:
    tier = HostTier(3, 0, FixedSwapPolicy(True))
    first, second = swapped(tier, content(1), content(2)), swapped(tier, content(1))
    tier.on_evict(4, content(1))
    tier.on_evict(5, content(3))
    assert not tier.holds(content(3)), "without offload_blocks only kept blocks are copied"
    assert tier.release(first) == [content(2)] and tier.holds(content(1))
    assert tier.release(second) == [content(1)] and not tier.holds(content(1))
    assert tier.release(second) == [], "a row is released only once"
    assert tier.stats.swapped_out_blocks == 1


def test_at_most_swap_blocks_are_kept() -> None:
    tier = HostTier(2, 5, FixedSwapPolicy(True))
    swapped(tier, content(1), content(2))
    assert not tier.keep(SwappedBlocks(1, 1, [], [content(3)]), 1, 1)
    assert tier.keep(SwappedBlocks(1, 1, [], [content(2)]), 1, 1), "a name that another row keeps takes no more room"


def test_reset_drops_all_blocks_also_those_of_swapped_rows() -> None:
    tier = HostTier(2, 2, FixedSwapPolicy(True))
    row = swapped(tier, content(1))
    tier.on_evict(3, content(1))
    tier.on_evict(4, content(2))
    tier.reset()
    assert row.names == [] and not tier.holds(content(1)) and copies(tier) == ([], [])
    other = swapped(tier, content(1))
    assert tier.release(row) == [], "a row from before the reset does not release the blocks of another"
    assert tier.release(other) == [content(1)]
    tier.check()


def test_cost_policy_swaps_only_if_that_is_cheaper() -> None:
    policy = CostSwapPolicy(StepCosts(copy_block=1e-3, compute_token=1e-4))
    assert policy.should_swap(num_blocks=10, num_tokens=201) and not policy.should_swap(num_blocks=10, num_tokens=200)


def config(**settings: object) -> EngineConfig:
    return EngineConfig(ModelConfig(model="m"), cache=CacheConfig(block_size=16, **settings))  # type: ignore[arg-type]


def test_tier_sizes_follow_the_settings() -> None:
    spec = KVSpec(num_layers=2, block_size=16, page_bytes=1 << 20)
    assert host_blocks(config(), spec) == (0, 0)
    assert host_blocks(config(swap_space=1, kv_offloading_size=0.5), spec) == (512, 256)
    with pytest.raises(ConfigError, match=r"swap_space=0.001 GiB is less than one KV cache block of 0.0020 GiB"):
        host_blocks(config(swap_space=0.001), spec)


def test_swap_policy_follows_the_settings() -> None:
    executor = DelayExecutor(16)
    assert isinstance(make_tier(config(), 0, 0, executor), NoTier)
    for mode, answer in {"swap": True, "recompute": False}.items():
        tier = make_tier(config(swap_space=1, preemption_mode=mode), 8, 0, executor)
        assert tier.keep(SwappedBlocks(1, 1, [], [content(1)]), 1, 1) is answer
    executor.measure_costs = lambda: StepCosts(1.0, 0.3)  # type: ignore[method-assign]
    tier = make_tier(config(swap_space=1), 8, 0, executor)
    assert tier.keep(SwappedBlocks(1, 1, [], [content(1)]), 1, 7)
    assert not tier.keep(SwappedBlocks(1, 1, [], [content(2)]), 1, 6)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs host memory to swap to"):
        config(preemption_mode="swap")
    with pytest.raises(ConfigError, match="enable_prefix_caching is off"):
        config(kv_offloading_size=1, enable_prefix_caching=False)


# ---------------------------------------------------------------- in a core


@pytest.mark.parametrize("lookahead", [0, 1])
def test_an_evicted_prefix_is_restored(lookahead: int) -> None:
    core = make_core(lookahead, num_blocks=17, max_model_len=64, host=(0, 40))
    prompt = list(range(33))
    core.add(request(0, prompt, 2))
    run(core)
    core.add(request(1, [40] * 50, 12))  # takes all blocks
    run(core)
    core.add(request(2, prompt, 4))
    got = run(core)
    assert got.tokens[2] == expected(prompt, 4) and got.cached[2] == 32
    stats = core.stats()
    assert stats.restored_blocks > 0 and stats.host_cache_hits == 4 * stats.restored_blocks
    assert stats.host_cached_blocks > 0 and stats.host_used_blocks == 0 and stats.host_blocks == 40
    assert core.reset_prefix_cache() and core.stats().host_cached_blocks == 0
    core.add(request(3, prompt, 1))
    assert run(core).cached[3] == 0, "a reset drops all cached content"


def crowded(lookahead: int, caching: bool) -> tuple[EngineCore, Collector]:
    core = make_core(lookahead, num_blocks=13, max_model_len=48, caching=caching, host=(40, 0))
    got = Collector()
    for key in range(4):
        core.add(request(key, [key] * 9, 30))
    while not core.scheduler.cache.tier.stats.swapped_out_blocks:
        got.take(core.run_step())
    return core, got


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("steps_later", [0, 1])
def test_aborting_a_swapped_request_frees_both_tiers(lookahead: int, caching: bool, steps_later: int) -> None:
    core, got = crowded(lookahead, caching)
    for _ in range(steps_later):
        got.take(core.run_step())
    waiting = [waits for waits in core.scheduler.waiting if waits.swapped is not None and waits.swapped.names]
    assert waiting and core.scheduler.cache.tier.num_used
    for waits in waiting:
        assert core.abort(waits.key)
        check_blocks(core)
    assert core.scheduler.cache.tier.num_used == 0
    while core.has_work():
        got.take(core.run_step())
        check_blocks(core)
    left = {0, 1, 2, 3} - {waits.key for waits in waiting}
    assert {key: got.tokens[key] for key in left} == {key: expected([key] * 9, 30) for key in left}


def test_aborting_a_request_that_just_resumed_frees_all_its_blocks() -> None:
    core, got = crowded(1, False)
    before = core.scheduler.cache.tier.stats.swapped_in_blocks
    while core.scheduler.cache.tier.stats.swapped_in_blocks == before:
        got.take(core.run_step())
    back = core.scheduler.rows.requests[core.scheduler.rows.order[-1]]
    assert core.abort(back.key)
    check_blocks(core)
    while core.has_work():
        got.take(core.run_step())
    assert all(got.tokens[key] == expected([key] * 9, 30) for key in {0, 1, 2, 3} - {back.key})
    assert core.scheduler.cache.tier.num_used == core.scheduler.cache.pool.num_used == 0


@pytest.mark.parametrize("caching", [False, True])
def test_blocks_that_another_row_holds_are_not_copied(caching: bool) -> None:
    core = make_core(0, num_blocks=30, max_model_len=48, caching=caching, host=(40, 0))
    prompt = list(range(20))
    core.add(request(0, prompt, 20))
    got = Collector()
    got.take(core.run_step())
    core.scheduler.fork(0, request(1, prompt, 20))
    got.take(core.run_step())
    core.scheduler._preempt()  # the fork, as it came last
    assert core.stats().swapped_preemptions == 1
    while core.has_work():
        got.take(core.run_step())
        check_blocks(core)
    assert got.tokens == {0: expected(prompt, 20), 1: expected(prompt, 20)}
    assert core.stats().swapped_out_blocks == 0
