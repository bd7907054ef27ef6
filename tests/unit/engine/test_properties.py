"""Random arrivals, lengths, forks, aborts and small pools: no block leaks, every request ends, every text is right.

The fake device keeps tokens in its pages and reads them back through the block tables, so any block that is lost,
shared wrongly or written at the wrong time changes the text.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import event, given
from hypothesis import strategies as st

from tests.builders import Collector, check_blocks, expected, make_core, request

MAX_LEN = 40


@dataclass
class Arrival:
    prompt: list[int]
    max_tokens: int
    stop: tuple[int, ...]
    stream: bool
    fork_after: int | None  # fork a child once this many tokens came out
    abort_after: int | None
    steps_before: int


# Few different prompts with long common starts, so that prefixes really are shared.
prompts = st.builds(
    lambda stem, cut, tail: (stem * 24)[:cut] + tail,
    st.lists(st.integers(0, 3), min_size=1, max_size=2),
    st.integers(0, 24),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
arrivals = st.builds(
    Arrival,
    prompt=prompts,
    max_tokens=st.integers(1, 12),
    stop=st.lists(st.integers(0, 49), max_size=2).map(tuple),
    stream=st.booleans(),
    fork_after=st.none() | st.integers(1, 6),
    abort_after=st.none() | st.integers(0, 8),
    steps_before=st.integers(0, 4),
)


@given(
    st.lists(arrivals, min_size=1, max_size=12),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 20),
    st.integers(1, 6),
    st.integers(1, 24),
    st.booleans(),
    st.sampled_from([0, 1]),
    st.sampled_from([0, 3]),
    st.sampled_from([(None,), (None,), (None, 3), (None, 7, 7), (None, 1, 20)]),
    st.sampled_from([(0, 0), (50, 0), (3, 0), (0, 5), (20, 20)]),  # blocks in host memory
)
def test_any_load_gives_the_same_text_as_running_alone(
    load: list[Arrival],
    block_size: int,
    spare_blocks: int,
    rows: int,
    budget: int,
    caching: bool,
    lookahead: int,
    threshold: int,
    windows: tuple[int | None, ...],
    host: tuple[int, int],
) -> None:
    smallest = -(-MAX_LEN // block_size) * len(windows) + 1
    core = make_core(
        lookahead,
        num_blocks=smallest + spare_blocks,
        block_size=block_size,
        max_num_seqs=rows,
        budget=max(budget, rows),
        max_model_len=MAX_LEN,
        caching=caching,
        threshold=threshold,
        windows=windows,
        host=host if caching else (host[0], 0),
    )
    got = Collector()
    wanted: dict[int, list[int]] = {}
    aborted: set[int] = set()
    forks: dict[int, Arrival] = {}

    def watch(key: int, arrival: Arrival) -> None:
        """Fork or abort once enough of the text is out, as a client that watches the stream would."""
        so_far = got.tokens.get(key, [])
        if arrival.abort_after is not None and len(so_far) >= arrival.abort_after and key not in got.reasons:
            if core.abort(key):
                aborted.add(key)
        elif arrival.fork_after is not None and len(so_far) >= arrival.fork_after and key not in forks:
            forks[key] = arrival
            prompt = arrival.prompt + so_far
            if key not in got.reasons and len(prompt) + 3 <= MAX_LEN:
                child = 1000 + key
                wanted[child] = expected(prompt, 3)
                core.scheduler.fork(key, request(child, prompt, 3))

    def step() -> None:
        got.take(core.run_step())
        check_blocks(core)
        for key, arrival in enumerate(load):
            if key in wanted and key not in aborted and (arrival.stream or arrival.abort_after == 0):
                watch(key, arrival)

    for key, arrival in enumerate(load):
        wanted[key] = expected(arrival.prompt, arrival.max_tokens, arrival.stop)
        core.add(request(key, arrival.prompt, arrival.max_tokens, arrival.stop, stream=arrival.stream))
        for _ in range(arrival.steps_before):
            step()
    steps = 0
    while core.has_work():
        step()
        steps += 1
        assert steps < 4000, "the engine does not finish"

    for key, text in wanted.items():
        if key in aborted:
            assert got.tokens.get(key, []) == text[: len(got.tokens.get(key, []))]
        else:
            assert got.tokens[key] == text
    assert set(got.reasons) == set(wanted) - aborted
    pool = core.scheduler.cache.pool
    assert pool.num_used == 0 and pool.num_free == pool.usable
    tier = core.scheduler.cache.tier
    assert tier.num_used == 0 and (host[1] or tier.num_cached == 0), "a host block is kept for no request"
    assert core.reset_prefix_cache() and pool.num_cached == tier.num_cached == 0
    _report_events(core)


def _report_events(core) -> None:  # type: ignore[no-untyped-def]
    stats, cache = core.scheduler.stats, core.scheduler.cache
    for name, count in {
        "preemption": stats.preemptions,
        "chunking": stats.partial_prefills,
        "prefix hit": cache.stats.prefix_cache_hits,
        "copy on write": cache.stats.copied_blocks,
        "eviction": cache.pool.evictions,
        "out of the window": cache.stats.freed_blocks,
        "dropped": stats.dropped_tokens,
        "swapped": cache.tier.stats.swapped_preemptions,
        "swapped in": cache.tier.stats.swapped_in_blocks,
        "restored": cache.tier.stats.restored_blocks,
        "lost": cache.tier.stats.host_lost_blocks,
        "recomputed": cache.stats.recomputed_tokens,
    }.items():
        if count:
            event(name)
