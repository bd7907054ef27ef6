"""The tier in host memory, alone and behind a cache: who waits for what, and what is copied when."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir.config.engine import CacheConfig, EngineConfig, ModelConfig
from kvasir.engine.build import host_blocks, make_tier
from kvasir.engine.cache.host_tier import HostTier
from kvasir.engine.cache.prefix import private_name
from kvasir.engine.cache.tier import Always, CostModel, NoTier, Parked
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


def parked(tier: HostTier, *names: bytes) -> Parked:
    row = Parked(1, 1, list(names), list(names))
    assert tier.keep(row, 1, 1)
    return row


def test_evicted_text_lives_on_until_the_oldest_must_go() -> None:
    tier = HostTier(0, 2, Always(True))
    for number in (1, 2, 3):
        tier.evicted(10 + number, content(number))
        tier.check()
    assert [tier.holds(content(number)) for number in (1, 2, 3)] == [False, True, True]
    assert copies(tier) == (pairs((13, 1), (12, 2)), []), "one copy for each host block: the last"
    assert tier.stats.offloaded == 3 and tier.num_cached == 2 and tier.num_used == 0
    tier.evicted(20, content(2))
    assert copies(tier) == ([], []), "it is there already ..."
    tier.evicted(21, content(4))
    assert tier.holds(content(2)) and not tier.holds(content(3)), "... and was used last"


def test_what_is_read_in_a_step_is_not_given_away_before() -> None:
    tier = HostTier(0, 1, Always(True))
    tier.evicted(5, content(1))
    tier.take_copies()
    held = tier.fetch([content(1)])
    tier.evicted(6, content(2))
    assert tier.stats.lost == 1 and not tier.holds(content(2))
    tier.bring(held, [7])
    assert copies(tier) == ([], pairs((held[0], 7)))
    tier.evicted(6, content(2))
    assert tier.holds(content(2)) and not tier.holds(content(1))


def test_kept_names_are_kept_and_others_are_dropped_for_them() -> None:
    tier = HostTier(2, 1, Always(True))
    for number in (1, 2, 3):
        tier.evicted(number, content(number))
    row = parked(tier, content(1), private_name())
    tier.check()
    tier.evicted(9, row.names[1])
    assert not tier.holds(content(2)), "the oldest that nobody waits for"
    for number in (4, 5, 6):
        tier.evicted(number, content(number))
    assert tier.holds(row.names[0]) and tier.holds(row.names[1]) and tier.num_used == 2
    assert set(tier.let_go(row)) == set(row.names)
    assert tier.holds(content(1)) and not tier.holds(row.names[1]), "only content may be asked for again"
    assert tier.num_used == 0
    tier.check()


def test_two_rows_may_wait_for_one_block() -> None:
    tier = HostTier(3, 0, Always(True))
    first, second = parked(tier, content(1), content(2)), parked(tier, content(1))
    tier.evicted(4, content(1))
    tier.evicted(5, content(3))
    assert not tier.holds(content(3)), "without room for evicted text only what is waited for is copied"
    assert tier.let_go(first) == [content(2)] and tier.holds(content(1))
    assert tier.let_go(second) == [content(1)] and not tier.holds(content(1))
    assert tier.let_go(second) == [], "once"
    assert tier.stats.swapped_out == 1


def test_no_more_is_kept_than_there_is_room() -> None:
    tier = HostTier(2, 5, Always(True))
    parked(tier, content(1), content(2))
    assert not tier.keep(Parked(1, 1, [], [content(3)]), 1, 1)
    assert tier.keep(Parked(1, 1, [], [content(2)]), 1, 1), "a name that is kept anyway takes no room"


def test_reset_forgets_all_and_parked_rows_find_nothing() -> None:
    tier = HostTier(2, 2, Always(True))
    row = parked(tier, content(1))
    tier.evicted(3, content(1))
    tier.evicted(4, content(2))
    tier.reset()
    assert row.names == [] and not tier.holds(content(1)) and copies(tier) == ([], [])
    other = parked(tier, content(1))
    assert tier.let_go(row) == [], "what another waits for now is not let go by a row from before"
    assert tier.let_go(other) == [content(1)]
    tier.check()


def test_the_cheaper_way_is_taken() -> None:
    model = CostModel(StepCosts(copy_block=1e-3, compute_token=1e-4))
    assert model.pays(num_blocks=10, num_tokens=201) and not model.pays(num_blocks=10, num_tokens=200)


def config(**settings: object) -> EngineConfig:
    return EngineConfig(ModelConfig(model="m"), cache=CacheConfig(block_size=16, **settings))  # type: ignore[arg-type]


def test_sizes_come_from_the_settings() -> None:
    spec = KVSpec(num_layers=2, block_size=16, page_bytes=1 << 20)
    assert host_blocks(config(), spec) == (0, 0)
    assert host_blocks(config(swap_space=1, kv_offloading_size=0.5), spec) == (512, 256)
    with pytest.raises(ConfigError, match=r"swap_space=0.001 GiB is less than one KV cache block of 0.0020 GiB"):
        host_blocks(config(swap_space=0.001), spec)


def test_the_choice_comes_from_the_settings() -> None:
    executor = DelayExecutor(16)
    assert isinstance(make_tier(config(), 0, 0, executor), NoTier)
    for mode, answer in {"swap": True, "recompute": False}.items():
        tier = make_tier(config(swap_space=1, preemption_mode=mode), 8, 0, executor)
        assert tier.keep(Parked(1, 1, [], [content(1)]), 1, 1) is answer
    executor.measure_costs = lambda: StepCosts(1.0, 0.3)  # type: ignore[method-assign]
    tier = make_tier(config(swap_space=1), 8, 0, executor)
    assert tier.keep(Parked(1, 1, [], [content(1)]), 1, 7)
    assert not tier.keep(Parked(1, 1, [], [content(2)]), 1, 6)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs host memory to swap to"):
        config(preemption_mode="swap")
    with pytest.raises(ConfigError, match="enable_prefix_caching is off"):
        config(kv_offloading_size=1, enable_prefix_caching=False)


# ---------------------------------------------------------------- in a core


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prefix_that_was_evicted_comes_back(lookahead: int) -> None:
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
    assert run(core).cached[3] == 0, "nothing outlives a reset"


def crowded(lookahead: int, caching: bool) -> tuple[EngineCore, Collector]:
    core = make_core(lookahead, num_blocks=13, max_model_len=48, caching=caching, host=(40, 0))
    got = Collector()
    for key in range(4):
        core.add(request(key, [key] * 9, 30))
    while not core.scheduler.cache.tier.stats.swapped_out:
        got.take(core.run_step())
    return core, got


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("steps_later", [0, 1])
def test_aborting_a_parked_request_frees_both_tiers(lookahead: int, caching: bool, steps_later: int) -> None:
    core, got = crowded(lookahead, caching)
    for _ in range(steps_later):
        got.take(core.run_step())
    waiting = [waits for waits in core.scheduler.waiting if waits.parked is not None and waits.parked.names]
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


def test_a_request_aborted_in_the_step_of_its_return_leaves_nothing() -> None:
    core, got = crowded(1, False)
    before = core.scheduler.cache.tier.stats.swapped_in
    while core.scheduler.cache.tier.stats.swapped_in == before:
        got.take(core.run_step())
    back = core.scheduler.rows.requests[core.scheduler.rows.order[-1]]
    assert core.abort(back.key)
    check_blocks(core)
    while core.has_work():
        got.take(core.run_step())
    assert all(got.tokens[key] == expected([key] * 9, 30) for key in {0, 1, 2, 3} - {back.key})
    assert core.scheduler.cache.tier.num_used == core.scheduler.cache.pool.num_used == 0


@pytest.mark.parametrize("caching", [False, True])
def test_what_another_row_shares_is_not_copied_while_it_is_held(caching: bool) -> None:
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
