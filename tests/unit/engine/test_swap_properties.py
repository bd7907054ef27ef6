"""Crowded pools with a host tier: rows are preempted all the time, and their text is the same as when they run alone.

The fake device keeps tokens in its pages, in both tiers, and reads them back through the block tables: a block that is
copied too late, to the wrong place, or from a block that was reused changes the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvasir.engine.core import EngineCore
from tests.builders import AlternatingSwapPolicy, Collector, check_blocks, expected, make_core, request

MAX_LEN = 48


@dataclass
class Now:
    """Something that happens between two steps."""

    step: int
    what: str  # "abort" or "fork" the request, "reset" the cache, "break" the step off
    key: int


texts = st.builds(
    lambda stem, cut, tail: ([stem] * 24)[:cut] + tail,
    st.integers(0, 2),
    st.integers(0, 20),
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
)
happenings = st.builds(
    Now, st.integers(1, 40), st.sampled_from(["abort", "fork", "fork", "reset", "break"]), st.integers(0, 9)
)


@given(
    load=st.lists(st.tuples(texts, st.integers(8, 20)), min_size=4, max_size=10),
    happens=st.lists(happenings, max_size=6),
    block_size=st.sampled_from([1, 2, 4, 8]),
    spare_blocks=st.integers(0, 4),
    budget=st.integers(6, 40),
    caching=st.booleans(),
    lookahead=st.sampled_from([0, 1, 1, 2]),
    windows=st.sampled_from([(None,), (None,), (None, 5), (None, 3, 9)]),
    host=st.sampled_from([(200, 0), (12, 0), (2, 3), (0, 6), (12, 200)]),
    answers=st.sampled_from([[True], [True], [True, False], [False]]),
)
def test_a_crowded_pool_gives_the_same_text_as_running_alone(
    load: list[tuple[list[int], int]],
    happens: list[Now],
    block_size: int,
    spare_blocks: int,
    budget: int,
    caching: bool,
    lookahead: int,
    windows: tuple[int | None, ...],
    host: tuple[int, int],
    answers: list[bool],
) -> None:
    core = make_core(
        lookahead,
        num_blocks=-(-MAX_LEN // block_size) * len(windows) + 1 + spare_blocks,
        block_size=block_size,
        max_num_seqs=6,
        budget=budget,
        max_model_len=MAX_LEN,
        caching=caching,
        windows=windows,
        host=host if caching else (host[0], 0),
        swap_policy=AlternatingSwapPolicy(answers),
    )
    wanted = {}
    for key, (prompt, count) in enumerate(load):
        core.add(request(key, prompt, count))
        wanted[key] = expected(prompt, count)
    got = Collector()
    aborted: set[int] = set()
    steps = 0
    while core.has_work():
        for now in [now for now in happens if now.step == steps]:
            happen(core, now, load, got, wanted, aborted)
        got.take(core.run_step())
        check_blocks(core)
        steps += 1
        assert steps < 3000, "the engine does not finish"
    for key, text in wanted.items():
        said = got.tokens.get(key, [])
        assert said == (text[: len(said)] if key in aborted else text)
    check_all_is_free(core)
    report_events(core)


def happen(
    core: EngineCore,
    now: Now,
    load: list[tuple[list[int], int]],
    got: Collector,
    wanted: dict[int, list[int]],
    aborted: set[int],
) -> None:
    if now.what == "reset":
        core.reset_prefix_cache()
    elif now.what == "abort" and core.abort(now.key):
        aborted.add(now.key)
    elif now.what == "break":
        core.results.clear()
        core.scheduler.start_over()
    elif now.what == "fork" and now.key < len(load) and now.key not in got.reasons:
        prompt = load[now.key][0] + got.tokens.get(now.key, [])
        child = 1000 + now.step * 10 + now.key
        if len(prompt) + 6 <= MAX_LEN and now.key not in aborted and child not in wanted:
            wanted[child] = expected(prompt, 6)
            core.scheduler.fork(now.key, request(child, prompt, 6))
    check_blocks(core)


def check_all_is_free(core: EngineCore) -> None:
    cache = core.scheduler.cache
    assert cache.pool.num_used == cache.tier.num_used == 0
    assert cache.caching or cache.pool.num_cached == cache.tier.num_cached == 0, "a private name outlived its row"
    assert core.reset_prefix_cache() and cache.pool.num_cached == cache.tier.num_cached == 0


def report_events(core: EngineCore) -> None:
    cache, tier = core.scheduler.cache, core.scheduler.cache.tier.stats
    for name, count in {
        "swapped": tier.swapped_preemptions,
        "swapped in": tier.swapped_in_blocks,
        "restored": tier.restored_blocks,
        "lost": tier.host_lost_blocks,
        "recomputed": cache.stats.recomputed_tokens,
        "copy on write": cache.stats.copied_blocks,
    }.items():
        if count:
            event(name)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_counters_show_that_each_path_was_taken(lookahead: int, caching: bool, windows: tuple[int | None, ...]) -> None:
    def run(**settings: object) -> EngineCore:
        core = make_core(
            lookahead, num_blocks=14 * len(windows) + 1, max_model_len=MAX_LEN, caching=caching, windows=windows,
            **settings,
        )  # fmt: skip
        for key in range(6):
            core.add(request(key, [key] * 9, 24))
        got = Collector()
        while core.has_work():
            got.take(core.run_step())
            check_blocks(core)
        assert got.tokens == {key: expected([key] * 9, 24) for key in range(6)}
        check_all_is_free(core)
        return core

    plain, swapped, declined = run(), run(host=(100, 0)), run(host=(100, 0), swap_policy=AlternatingSwapPolicy([False]))
    assert plain.stats().preemptions >= 2 and plain.stats().recomputed_tokens > 0
    assert plain.stats().swapped_preemptions == plain.stats().host_blocks == 0
    stats = swapped.stats()
    assert stats.swapped_preemptions == stats.preemptions >= 2
    assert stats.swapped_out_blocks >= stats.swapped_in_blocks > 0
    assert stats.recomputed_tokens == 0, "all computed tokens were swapped in"
    assert stats.scheduled_tokens < plain.stats().scheduled_tokens
    stats = declined.stats()
    assert stats.swapped_out_blocks == stats.swapped_preemptions == 0
    assert stats.recomputed_tokens == plain.stats().recomputed_tokens
