"""Properties of every queue policy under any load: the same text, no lost block, an answer to each request, its order.

It also checks each policy's own promises: no starvation, tokens proportional to weights, and met deadlines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, example, given, reject, settings
from hypothesis import strategies as st

from kvasir.engine.core import EngineCore
from kvasir.engine.policies import POLICIES, Context, EarliestDeadlineFirst, Priority, WeightedRoundRobin
from kvasir.engine.request import Request
from kvasir.errors import RequestError
from kvasir.executor.fake import DelayExecutor
from kvasir.messages import BeamSpec, FinishReason, StepPlan, Terms
from tests.builders import (
    AlternatingSwapPolicy,
    Clock,
    Collector,
    ScoringExecutor,
    check_blocks,
    expected,
    make_core,
    request,
    run,
)

MAX_LEN = 40
AGING_SECONDS, AGING_BEST, DEFAULT_DEADLINE = 8.0, -1, 20.0
NAMES = [*POLICIES, "aging"]


def make_context(clock: Clock, name: str) -> Context:
    seconds = AGING_SECONDS if name == "aging" else 0.0
    return Context(clock, aging_seconds=seconds, aging_best=AGING_BEST, default_deadline=DEFAULT_DEADLINE)


# ---------------------------------------------------------------- any load


@dataclass
class Arrival:
    prompt: list[int]
    max_tokens: int
    stream: bool
    priority: int
    tenant: str
    weight: float
    patience: int | None  # seconds from arrival to deadline
    abort_after: int | None  # steps
    steps_before: int


prompts = st.builds(
    lambda stem, cut, tail: (stem * 24)[:cut] + tail,
    st.lists(st.integers(0, 3), min_size=1, max_size=2),
    st.integers(0, 20),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
arrivals = st.builds(
    Arrival,
    prompt=prompts,
    max_tokens=st.integers(1, 16),
    stream=st.booleans(),
    priority=st.integers(-2, 3),
    tenant=st.sampled_from("abc"),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    patience=st.none() | st.none() | st.integers(0, 120),
    abort_after=st.none() | st.none() | st.integers(0, 60),
    steps_before=st.integers(0, 2),
)


def order_of(name: str, clock: Clock) -> Callable[[Request], Any] | None:
    """Return the order that a policy documents, as a rank, to compare with its behaviour."""

    def aged(r: Request) -> float:
        value = r.spec.terms.priority
        return min(value, max(AGING_BEST, value - (clock.now - r.arrival) / AGING_SECONDS))

    def due(r: Request) -> float:
        return r.arrival + DEFAULT_DEADLINE if r.spec.terms.deadline is None else r.spec.terms.deadline

    return {
        "fcfs": lambda r: r.seq,
        "priority": lambda r: (r.spec.terms.priority, r.arrival, r.seq),
        "aging": lambda r: (aged(r), r.arrival, r.seq),
        "deadline": lambda r: (due(r), r.arrival, r.seq),
        "wrr": None,  # who was given what is checked below
        "fair": None,  # likewise
    }[name]


def check_order(core: EngineCore, name: str, clock: Clock) -> None:
    """From now on, check that the policy admits the first request of its order and preempts the last."""
    rank = order_of(name, clock)
    if rank is None:
        return
    queue = core.scheduler.waiting
    peek, select_to_preempt = queue.peek, queue.select_to_preempt

    def checked_peek() -> Request:
        assert peek() is min(queue, key=rank)
        return peek()

    def checked_selection(running: list[Request]) -> Request:
        assert select_to_preempt(running) is max(running, key=rank)
        return select_to_preempt(running)

    queue.peek, queue.select_to_preempt = checked_peek, checked_selection  # type: ignore[method-assign]


@pytest.mark.parametrize("name", NAMES)
@given(
    load=st.lists(arrivals, min_size=1, max_size=12),
    block_size=st.sampled_from([1, 2, 4]),
    spare_blocks=st.integers(0, 4),
    rows=st.integers(1, 6),
    budget=st.integers(1, 64),
    caching=st.booleans(),
    lookahead=st.sampled_from([0, 1]),
    watermark=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
)
def test_any_load_under_any_policy(
    name: str,
    load: list[Arrival],
    block_size: int,
    spare_blocks: int,
    rows: int,
    budget: int,
    caching: bool,
    lookahead: int,
    watermark: float,
) -> None:
    clock = Clock()
    core = make_core(
        lookahead,
        num_blocks=-(-MAX_LEN // block_size) + 1 + spare_blocks,
        block_size=block_size,
        max_num_seqs=rows,
        budget=max(budget, rows),
        max_model_len=MAX_LEN,
        caching=caching,
        watermark=watermark,
        policy=POLICIES["priority" if name == "aging" else name](make_context(clock, name)),
    )
    serve(core, name, clock, load)


def serve(core: EngineCore, name: str, clock: Clock, load: list[Arrival]) -> None:
    """Serve a load and check that every request gets its text and that no block is left."""
    clock.tick(core)
    check_order(core, name, clock)
    got, aborted, deadlines = Collector(), set[int](), dict[int, float]()
    steps = 0

    def step() -> None:
        nonlocal steps
        got.take(core.run_step())
        check_blocks(core)
        steps += 1
        assert steps < 4000, "the engine does not finish"
        for key, arrival in enumerate(load):
            if arrival.abort_after is not None and steps >= arrival.abort_after and core.abort(key):
                aborted.add(key)

    for key, arrival in enumerate(load):
        deadlines[key] = clock.now + arrival.patience if arrival.patience is not None else float("inf")
        terms = Terms(
            clock.now, arrival.priority, arrival.tenant, arrival.weight,
            None if arrival.patience is None else deadlines[key],
        )  # fmt: skip
        core.add(request(key, arrival.prompt, arrival.max_tokens, terms=terms, stream=arrival.stream))
        for _ in range(arrival.steps_before):
            step()
    while core.has_work():
        step()

    assert set(got.reasons) | aborted == set(range(len(load))), "every request gets an answer"
    for key, arrival in enumerate(load):
        text, said = expected(arrival.prompt, arrival.max_tokens), got.tokens.get(key, [])
        if got.reasons.get(key) is FinishReason.LENGTH:
            assert said == text
        else:
            assert said == text[: len(said)]
        if got.reasons.get(key) is FinishReason.TIMEOUT:
            event("timeout")
            assert got.errors[key] and deadlines[key] < float("inf")
    pool, stats = core.scheduler.cache.pool, core.stats()
    assert pool.num_used == 0 and pool.num_free == pool.usable and stats.num_waiting_tokens == 0
    assert stats.host_used_blocks == 0, "no host block is kept for a request that has ended"
    event(f"preemptions: {stats.preemptions > 0}")
    event(f"held back: {stats.held_back > 0}")
    timeouts = sum(reason is FinishReason.TIMEOUT for reason in got.reasons.values())
    assert stats.timeouts_waiting + stats.timeouts_running == timeouts


crowds = st.builds(
    replace,
    arrivals,
    max_tokens=st.integers(8, 16),
    patience=st.none() | st.integers(10, 120),
    abort_after=st.none() | st.integers(4, 60),
    steps_before=st.integers(0, 1),
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=settings().max_examples // 4)
@given(
    load=st.lists(crowds, min_size=5, max_size=10),
    block_size=st.sampled_from([1, 2, 4]),
    spare_blocks=st.integers(0, 4),
    budget=st.integers(16, 64),
    caching=st.booleans(),
    lookahead=st.sampled_from([0, 1]),
    host=st.sampled_from([(200, 0), (200, 0), (6, 0), (4, 5)]),
    answers=st.sampled_from([[True], [True], [True, False]]),
)
def test_any_policy_with_swapped_rows(
    name: str,
    load: list[Arrival],
    block_size: int,
    spare_blocks: int,
    budget: int,
    caching: bool,
    lookahead: int,
    host: tuple[int, int],
    answers: list[bool],
) -> None:
    clock = Clock()
    core = make_core(
        lookahead,
        num_blocks=-(-MAX_LEN // block_size) + 1 + spare_blocks,
        block_size=block_size,
        max_num_seqs=6,
        budget=budget,
        max_model_len=MAX_LEN,
        caching=caching,
        policy=POLICIES["priority" if name == "aging" else name](make_context(clock, name)),
        host=host if caching else (host[0], 0),
        swap_policy=AlternatingSwapPolicy(answers),
    )
    serve(core, name, clock, load)
    event(f"swapped: {core.stats().swapped_in_blocks > 0}")


@pytest.mark.parametrize("host", [(0, 0), (100, 0)], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("name", NAMES)
def test_every_policy_preempts_and_the_text_is_the_same(name: str, host: tuple[int, int]) -> None:
    clock, rng, got = Clock(), np.random.default_rng(5), Collector()
    policy = POLICIES["priority" if name == "aging" else name](make_context(clock, name))
    core = make_core(1, num_blocks=14, max_model_len=MAX_LEN, policy=policy, host=host)
    clock.tick(core)
    check_order(core, name, clock)
    texts = dict[int, tuple[list[int], int]]()
    for key in range(30):
        texts[key] = rng.integers(0, 9, int(rng.integers(4, 20))).tolist(), int(rng.integers(8, 20))
    for key, (prompt, max_tokens) in texts.items():
        terms = Terms(clock.now, int(rng.integers(-2, 4)), "abc"[key % 3], 1.0 + key % 3, 1e6 - float(rng.integers(9)))
        core.add(request(key, prompt, max_tokens, terms=terms))
        if key % 2:
            got.take(core.run_step())
    while core.has_work():
        got.take(core.run_step())
    assert got.tokens == {key: expected(prompt, max_tokens) for key, (prompt, max_tokens) in texts.items()}
    stats = core.stats()
    assert stats.preemptions > 5 and stats.num_used_blocks == stats.host_used_blocks == 0
    assert stats.swapped_preemptions == (stats.preemptions if host[0] else 0)
    assert (stats.swapped_in_blocks > 0, stats.recomputed_tokens > 0) == ((True, False) if host[0] else (False, True))


@pytest.mark.parametrize("name", NAMES)
@given(
    num_blocks=st.integers(14, 20),
    caching=st.booleans(),
    lookahead=st.sampled_from([0, 1]),
    watermark=st.sampled_from([0.0, 0.1, 0.3, 0.5]),
    beam=st.tuples(st.integers(1, 12), st.integers(8, 16), st.sampled_from([2, 3])),
    head_start=st.integers(0, 15),
    others=st.lists(st.tuples(st.sampled_from([1, 4, 20, 28, 32]), st.integers(4, 20)), min_size=1, max_size=6),
)
@example(  # a watermark that kept a beam waiting would deadlock here
    num_blocks=18, caching=False, lookahead=1, watermark=0.5, beam=(8, 20, 2), head_start=3, others=[(2, 19)] * 6
)  # fmt: skip
@settings(max_examples=settings().max_examples // 2)
def test_beams_that_wait_for_each_other_do_not_deadlock(
    name: str,
    num_blocks: int,
    caching: bool,
    lookahead: int,
    watermark: float,
    beam: tuple[int, int, int],
    head_start: int,
    others: list[tuple[int, int]],
) -> None:
    """A preempted beam must be admitted before requests that rank higher, or the other beams wait forever."""
    executor = ScoringExecutor(4, 6, 60)
    executor.allocate_kv(num_blocks)
    policy = POLICIES["priority" if name == "aging" else name](make_context(Clock(), name))
    core = make_core(
        lookahead, executor, num_blocks=num_blocks, max_num_seqs=6, max_model_len=60, caching=caching,
        watermark=watermark, policy=policy,
    )  # fmt: skip
    prompt, max_tokens, width = beam
    search = request(0, [*range(prompt)], max_tokens, terms=Terms(priority=9, tenant="a", deadline=1e9))
    try:
        core.add(replace(search, beam=BeamSpec(width)))
    except RequestError:
        reject()  # this many beams may not fit
    for _ in range(head_start):
        core.run_step()
    for key, (prompt, max_tokens) in enumerate(others, 1):
        core.add(request(key, [key] * prompt, max_tokens, terms=Terms(tenant="b", deadline=1e6 + key)))
        core.run_step()
    run(core, max_steps=1500)
    event(f"preemptions: {core.stats().preemptions > 0}")
    assert core.stats().num_used_blocks == 0


# ---------------------------------------------------------------- no starvation


def flood(clock: Clock, policy: Priority | EarliestDeadlineFirst, terms: Terms, rival: Callable[[], Terms]) -> float:
    """Return the seconds until a request is served under overload; at most 500."""
    core = make_core(0, DelayExecutor(4), max_num_seqs=2, caching=False, policy=policy)
    clock.tick(core)
    keys = iter(range(1, 10**6))
    got = Collector()
    core.add(request(0, [1] * 8, 4, terms=terms))
    came = clock.now
    while 0 not in got.reasons and clock.now < came + 500:
        for _ in range(2):  # two requests of four steps each in every step, for two rows
            core.add(request(next(keys), [1] * 8, 4, terms=rival()))
        got.take(core.run_step())
    return clock.now - came


def test_aging_bounds_the_time_a_request_can_be_overtaken() -> None:
    clock = Clock()
    policy = Priority(Context(clock, aging_seconds=5.0))
    # 3 levels of 5 seconds; those that came meanwhile go first: 32 requests of 4 steps, on two rows
    waited = flood(clock, policy, Terms(clock.now, priority=3), lambda: Terms(clock.now))
    assert 15 < waited < 15 + 32 * 4 / 2 + 8


@pytest.mark.parametrize(("seconds", "best"), [(0.0, 0), (5.0, 1)])
def test_without_aging_or_beyond_its_bound_lower_values_starve_a_request(seconds: float, best: int) -> None:
    clock = Clock()
    policy = Priority(Context(clock, aging_seconds=seconds, aging_best=best))
    assert flood(clock, policy, Terms(clock.now, priority=3), lambda: Terms(clock.now)) == 500


def test_a_request_without_a_deadline_is_not_overtaken_forever() -> None:
    clock = Clock()
    policy = EarliestDeadlineFirst(Context(clock, default_deadline=30.0))
    waited = flood(clock, policy, Terms(clock.now), lambda: Terms(clock.now, deadline=clock.now + 20))
    assert 10 < waited < 60  # ten seconds of rivals are before it, unless they end in a timeout


# ---------------------------------------------------------------- weights


class Served:
    """Counts the tokens of each tenant from the plans; recomputed tokens count once."""

    def __init__(self, core: EngineCore, tenants: list[str]) -> None:
        self.tokens = dict.fromkeys(tenants, 0)
        rows, execute = core.scheduler.rows, core.executor.execute
        reached = dict[int, int]()  # by key

        def counting(plan: StepPlan) -> None:
            for row, length in zip(plan.rows.tolist(), plan.bounds.tolist(), strict=True):
                owner = rows.requests[row]
                assert owner is not None
                self.tokens[owner.spec.terms.tenant] += max(0, length - reached.get(owner.key, 0))
                reached[owner.key] = max(length, reached.get(owner.key, 0))
            execute(plan)

        core.executor.execute = counting  # type: ignore[method-assign]


@given(
    weights=st.lists(st.sampled_from([1.0, 1.5, 2.0, 4.0]), min_size=2, max_size=3),
    sizes=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 16)), min_size=4, max_size=4),
    rows=st.integers(2, 4),
    spare_blocks=st.sampled_from([0, 40]),
    seed=st.integers(0, 99),
)
@settings(max_examples=4)
def test_tokens_follow_the_weights(
    weights: list[float], sizes: list[tuple[int, int]], rows: int, spare_blocks: int, seed: int
) -> None:
    core = make_core(
        0,
        DelayExecutor(4),
        num_blocks=11 + spare_blocks,
        max_num_seqs=rows,
        max_model_len=MAX_LEN,
        caching=False,
        policy=WeightedRoundRobin(),
    )
    tenants = {f"tenant {i}": weight for i, weight in enumerate(weights)}
    served, rng, batch = Served(core, list(tenants)), np.random.default_rng(seed), rows * MAX_LEN
    keys = iter(range(10**6))
    low: dict[tuple[str, str], float] = {}
    needed = 20 * batch * sum(weights) / min(weights)  # a batch holds at most 5% of the tokens of the lowest weight
    while sum(served.tokens.values()) < needed:
        waiting = [r.spec.terms.tenant for r in core.scheduler.waiting]
        for tenant, (most_in, most_out) in zip(tenants, sizes, strict=False):
            for _ in range(rows + 1 - waiting.count(tenant)):  # every tenant always has waiting requests
                prompt, max_tokens = [1] * int(rng.integers(1, most_in + 1)), int(rng.integers(1, most_out + 1))
                core.add(request(next(keys), prompt, max_tokens, terms=Terms(tenant=tenant, weight=tenants[tenant])))
        core.run_step()
        for i, j in ((i, j) for i in tenants for j in tenants if i != j):  # no tenant starves, in any interval
            ahead = served.tokens[j] / tenants[j] - served.tokens[i] / tenants[i]
            low[i, j] = min(low.get((i, j), 0.0), ahead)
            assert ahead - low[i, j] <= batch / tenants[i] + batch / tenants[j]
    event(f"preemptions: {core.stats().preemptions > 0}")
    total = sum(served.tokens.values())
    for tenant, weight in tenants.items():
        assert served.tokens[tenant] / total == pytest.approx(weight / sum(weights), rel=0.05)


# ---------------------------------------------------------------- deadlines


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10), st.integers(0, 3)), min_size=1, max_size=10).flatmap(
        lambda jobs: st.tuples(st.just(jobs), st.permutations(range(len(jobs))))
    )
)
@settings(max_examples=settings().max_examples // 2)
def test_deadlines_that_can_all_be_met_are_met(case: tuple[list[tuple[int, int, int]], list[int]]) -> None:
    """One row, all at once: if any order meets all deadlines, earliest first does (Jackson's rule). Deadlines are made
    from such an order, which is not the one in which the requests come."""
    jobs, order = case
    budget, clock = 8, Clock()
    deadlines, done = {}, clock.now
    for key in order:
        prompt, max_tokens, slack = jobs[key]
        done += -(-prompt // budget) + max_tokens - 1
        deadlines[key] = done + slack
    policy = EarliestDeadlineFirst(Context(clock))
    core = make_core(0, max_num_seqs=1, budget=budget, policy=policy, caching=False)
    clock.tick(core)
    for key, (prompt, max_tokens, _) in enumerate(jobs):
        terms = Terms(clock.now, deadline=float(deadlines[key]))
        core.add(request(key, [key] * prompt, max_tokens, terms=terms, min_tokens=max_tokens))
    got = run(core)
    assert set(got.reasons.values()) == {FinishReason.LENGTH}, f"{got.errors}"
    assert core.stats().timeouts_foreseen == 0


def test_ending_unreachable_requests_early_lets_others_meet_their_deadlines() -> None:
    """The load is twice the capacity. Requests that are ended as soon as they cannot meet their deadline leave their
    time to others."""
    done = {}
    for name in ("fcfs", "deadline"):
        clock = Clock()
        policy = POLICIES[name](Context(clock))
        core = make_core(0, DelayExecutor(4), max_num_seqs=1, budget=8, caching=False, policy=policy)
        clock.tick(core)
        got = Collector()
        for key in range(200):  # ten steps each, every five steps
            terms = Terms(clock.now, deadline=clock.now + 35)
            core.add(request(key, [1] * 40, 6, terms=terms, min_tokens=6))
            for _ in range(5):
                got.take(core.run_step())
        while core.has_work():
            got.take(core.run_step())
        done[name] = sum(reason is FinishReason.LENGTH for reason in got.reasons.values())
        assert core.stats().timeouts_foreseen > 50 if name == "deadline" else core.stats().timeouts_foreseen == 0
    assert done["deadline"] >= 95, "there is time for a hundred requests"
    assert done["deadline"] > 1.2 * done["fcfs"]
