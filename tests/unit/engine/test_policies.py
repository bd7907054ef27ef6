"""Each queue policy alone: its order, its choice for preemption, and the requests that it ends early."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.config.engine import POLICY_NAMES
from kvasir.engine.policies import (
    POLICIES,
    Context,
    EarliestDeadlineFirst,
    FirstComeFirstServed,
    Policy,
    Priority,
    RankedPolicy,
    WeightedRoundRobin,
    make_policy,
)
from kvasir.engine.policies.base import RequestHeap
from kvasir.engine.request import Request
from kvasir.errors import ConfigError
from kvasir.messages import Terms
from tests.builders import Clock, make_scheduler, request


def waiting(key: int, num_tokens: int = 4, **terms: object) -> Request:
    spec = request(key, [1] * num_tokens, terms=Terms(**terms))  # type: ignore[arg-type]
    return Request.new(spec, spec.terms.arrival, key)


def drain(policy: Policy) -> list[int]:
    keys = []
    while len(policy):
        keys.append(policy.peek().key)
        policy.remove(policy.peek())
    return keys


# ---------------------------------------------------------------- first come, first served; heaps


def test_fcfs_keeps_the_order_and_admits_preempted_requests_first() -> None:
    policy = FirstComeFirstServed()
    first, *others = [waiting(key) for key in range(4)]
    for each in others:
        policy.add(each)
    policy.put_back(first)
    assert policy.select_to_preempt(others) is others[-1]
    assert drain(policy) == [0, 1, 2, 3]


@given(st.lists(st.tuples(st.sampled_from("arp"), st.integers(0, 12)), max_size=300))
def test_heap_behaves_like_a_sorted_list(moves: list[tuple[str, int]]) -> None:
    heap, model = RequestHeap(lambda r: len(r.token_ids)), list[Request]()
    for seq, (move, number) in enumerate(moves):
        if move == "a":
            new = waiting(seq, number + 1)
            heap.add(new)
            model.append(new)
        elif model and move == "r":
            heap.remove(model.pop(number % len(model)))
        elif model:
            assert heap.first(number) == sorted(model, key=lambda r: (len(r.token_ids), r.seq))[:number]
            assert heap.peek() is min(model, key=lambda r: (len(r.token_ids), r.seq))
    assert list(heap) == sorted(model, key=lambda r: (len(r.token_ids), r.seq))


def test_heap_drops_entries_of_removed_requests() -> None:
    heap = RequestHeap(lambda r: r.seq)
    heap.add(waiting(0))
    for key in range(1, 1000):
        heap.add(again := waiting(key))
        heap.remove(again)
    assert len(heap) == 1 and len(heap._heap) < 100


# ---------------------------------------------------------------- priority


def test_lowest_priority_value_is_admitted_first_and_highest_is_preempted_first() -> None:
    policy = Priority()
    found = [waiting(key, priority=p, arrival=1.0 + key) for key, p in enumerate([2, 0, -1, 0])]
    for each in found:
        policy.add(each)
    assert policy.select_to_preempt(found) is found[0]
    assert policy.select_to_preempt(found[1:]) is found[3], "among equal values the latest is preempted"
    assert [r.key for r in policy] == drain(policy) == [2, 1, 3, 0]


def test_aging_lowers_the_value_by_one_per_period() -> None:
    clock = Clock(0.0)
    policy = Priority(Context(clock, aging_seconds=10.0))
    policy.add(waiting(0, priority=2, arrival=0.0))
    for key, (late, first) in enumerate([(19.9, 1), (20.1, 0)], 1):
        clock.now = late
        policy.add(rival := waiting(key, priority=0, arrival=late))
        assert (policy.peek() is not rival) == (first == 0), f"after {late} s"
        policy.remove(rival)


def test_aging_stops_at_the_bound() -> None:
    clock = Clock(0.0)
    policy = Priority(Context(clock, aging_seconds=10.0, aging_best=1))
    policy.add(waiting(0, priority=4, arrival=0.0))
    policy.add(waiting(1, priority=1, arrival=1.0))
    clock.now = 10_000.0
    policy.add(waiting(2, priority=1, arrival=clock.now))
    policy.add(waiting(3, priority=0, arrival=clock.now))
    assert drain(policy) == [3, 0, 1, 2]


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 30), st.sampled_from("arnp"))),
    st.sampled_from([0.0, 3.0, 10.0]),
    st.integers(-2, 2),
)
def test_priority_behaves_like_a_list_sorted_each_time(
    moves: list[tuple[int, int, str]], period: float, best: int
) -> None:
    clock = Clock(0.0)
    policy, model = Priority(Context(clock, aging_seconds=period, aging_best=best)), list[Request]()

    def rank(r: Request) -> tuple[float, float, int]:
        value = r.spec.terms.priority
        if period and value > best:
            value = max(best, value - (clock.now - r.arrival) / period)
        return value, r.arrival, r.seq

    for seq, (priority, seconds, move) in enumerate(moves):
        clock.now += seconds
        if move == "a" or not model:
            model.append(waiting(seq, priority=priority, arrival=clock.now))
            policy.add(model[-1])
        elif move == "n":
            policy.remove(policy.peek())
            model.remove(min(model, key=rank))
        elif move == "r":
            policy.remove(model.pop(seconds % len(model)))
        else:
            assert policy.select_to_preempt(model) is max(model, key=rank)
        assert list(policy) == sorted(model, key=rank)
        assert not model or policy.peek() is min(model, key=rank)


# ---------------------------------------------------------------- weighted round robin


def admit(policy: WeightedRoundRobin, num_tokens: int | None = None) -> str:
    """Admit the next request and count its prompt."""
    next_one = policy.peek()
    policy.remove(next_one)
    policy.join(next_one, len(next_one.token_ids) if num_tokens is None else num_tokens)
    return next_one.spec.terms.tenant


def fill(policy: WeightedRoundRobin, tenant: str, count: int, num_tokens: int = 4, weight: float = 1.0) -> None:
    for _ in range(count):
        policy.add(waiting(next(KEYS), num_tokens, tenant=tenant, weight=weight))


KEYS = iter(range(10**6))


def test_wrr_counts_tokens_and_not_requests() -> None:
    policy = WeightedRoundRobin()
    fill(policy, "long", 20, num_tokens=30)
    fill(policy, "short", 60, num_tokens=10)
    turns = [admit(policy) for _ in range(40)]
    assert turns.count("short") == 3 * turns.count("long")


def test_wrr_follows_the_weights() -> None:
    policy = WeightedRoundRobin()
    fill(policy, "a", 60, weight=3.0)
    fill(policy, "b", 60, weight=1.0)
    assert [admit(policy) for _ in range(40)].count("a") == 30


def test_wrr_counts_tokens_of_running_requests() -> None:
    policy = WeightedRoundRobin()
    fill(policy, "a", 9)
    fill(policy, "b", 9)
    talker = policy.account(policy.peek())
    assert admit(policy) == "a"
    policy.count(np.bincount([talker], weights=[100]).astype(np.float64))  # it generates a hundred tokens
    assert [admit(policy) for _ in range(9)] == ["b"] * 9


def test_wrr_preempts_the_tenant_with_the_most_tokens() -> None:
    policy = WeightedRoundRobin()
    running = [waiting(next(KEYS), tenant=name) for name in "abab"]
    for each in running:
        policy.join(each, 4)
    policy.count(np.array([50.0, 10.0]))
    assert policy.select_to_preempt(running) is running[2]


def test_wrr_gives_no_credit_for_time_without_requests() -> None:
    policy = WeightedRoundRobin()
    fill(policy, "busy", 200)
    for _ in range(100):
        admit(policy)
    fill(policy, "late", 100)
    turns = [admit(policy) for _ in range(40)]
    assert turns.count("late") == 20


def test_wrr_remembers_tokens_of_a_tenant_that_was_idle_for_a_moment() -> None:
    policy = WeightedRoundRobin()
    fill(policy, "a", 1, num_tokens=1000)
    fill(policy, "b", 50, num_tokens=4)
    assert admit(policy) == "a"
    fill(policy, "a", 1)
    assert [admit(policy) for _ in range(50)] == ["b"] * 50


def test_wrr_drops_idle_tenants() -> None:
    policy = WeightedRoundRobin()
    stays = waiting(next(KEYS), tenant="stays")
    policy.join(stays, 4)
    for number in range(5000):
        fill(policy, f"tenant {number}", 1)
        one = policy.peek()
        admit(policy)
        policy.leave(one)
    assert len(policy._tenants) <= 1030 and len(policy._accounts) <= 1030
    assert policy._accounts[policy.account(stays)].name == "stays"  # type: ignore[union-attr]


# ---------------------------------------------------------------- deadline


def measured(clock: Clock, step: float = 1.0, full_step_tokens: int = 32) -> Context:
    """A context with measurements of twenty full steps of the same length."""
    context = Context(clock, default_deadline=60.0)
    for i in range(20):
        context.service_rate.record_step(i * step, (i + 1) * step, full_step_tokens, True)
    return context


def test_earliest_deadline_is_admitted_first_and_latest_is_preempted_first() -> None:
    policy = EarliestDeadlineFirst(Context(Clock(0.0), default_deadline=60.0))
    found = [waiting(key, deadline=d, arrival=float(key)) for key, d in enumerate([90.0, None, 50.0, 61.5])]
    for each in found:
        policy.add(each)
    assert policy.select_to_preempt(found) is found[0]
    assert drain(policy) == [2, 1, 3, 0]


def test_a_request_that_cannot_meet_its_deadline_is_found_on_arrival() -> None:
    policy = EarliestDeadlineFirst(measured(Clock(100.0)))
    policy.add(waiting(0, 32, deadline=100.5))
    policy.add(late := waiting(1, 320, deadline=109.0))
    policy.add(waiting(2, 320, deadline=111.0))
    found = policy.find_unreachable()
    assert found is not None and found[0].key == 0
    policy.remove(found[0])
    found = policy.find_unreachable()
    assert found is not None and found[0] is late
    assert found[1] == "its deadline is 9 s away and it needs at least 10 s"
    policy.remove(late)
    assert policy.find_unreachable() is None and len(policy) == 1


def test_a_request_that_waited_too_long_is_found_when_it_is_next() -> None:
    clock = Clock(100.0)
    policy = EarliestDeadlineFirst(measured(clock))
    policy.add(waiting(0, 320, deadline=111.0))
    assert policy.find_unreachable() is None
    clock.now = 101.5
    assert policy.find_unreachable() is not None


def test_only_min_tokens_count_as_certain_to_be_generated() -> None:
    policy = EarliestDeadlineFirst(measured(Clock(100.0)))
    for key, (least, deadline) in enumerate([(1, 105.0), (5, 105.0), (6, 105.0)]):
        spec = request(key, [1], 500, terms=Terms(deadline=deadline), min_tokens=least)
        policy.add(Request.new(spec, 0.0, key))
    found = policy.find_unreachable()
    assert found is not None and found[0].key == 2
    policy.remove(found[0])
    assert policy.find_unreachable() is None


def test_no_request_is_unreachable_before_measurements_or_without_a_deadline() -> None:
    policy = EarliestDeadlineFirst(Context(Clock(100.0)))
    policy.add(waiting(0, 10**6, deadline=100.1))
    assert policy.find_unreachable() is None
    policy = EarliestDeadlineFirst(measured(Clock(100.0)))
    policy.add(waiting(0, 10**6, arrival=1.0))
    assert policy.find_unreachable() is None


def test_cached_tokens_take_no_time() -> None:
    clock = Clock(100.0)
    scheduler = make_scheduler(budget=32, policy=EarliestDeadlineFirst(measured(clock, full_step_tokens=4)))
    prompt = [i % 7 for i in range(30)]
    scheduler.add(request(0, prompt, 1))
    scheduler.schedule()
    scheduler.add(request(1, prompt, 1, terms=Terms(deadline=104.0)))
    scheduler.add(request(2, prompt[::-1], 1, terms=Terms(deadline=104.0)))
    found = scheduler.waiting.find_unreachable()
    assert found is not None and found[0].key == 2


def test_a_waiting_request_with_little_chance_is_ended_for_those_behind_it() -> None:
    clock = Clock(100.0)
    context = measured(clock)
    for seconds in range(1, 21):
        context.service_rate.record_request(float(seconds), 0.0, is_done=True)
    policy = EarliestDeadlineFirst(context)
    policy.add(early := Request.new(request(0, [1], 500, terms=Terms(deadline=109.5)), 90.0, 0))
    policy.add(Request.new(request(1, [1], 500, terms=Terms(deadline=110.5)), 90.0, 1))
    policy.add(Request.new(request(2, [1], 9, terms=Terms(deadline=109.6)), 90.0, 2))
    assert policy.find_unreachable() is None, "it may be admitted at once"
    for _ in range(2):
        context.service_rate.record_step(20.0, 21.0, 32, True)
    found = policy.find_unreachable()
    assert found is not None and found[0] is early
    assert found[1] == "its deadline is 9.5 s away, and only 45% of recent requests were that fast"
    policy.remove(early)
    assert policy.find_unreachable() is None, "the chances are one half, and no lower"
    context.least_chance = 0.6
    assert policy.find_unreachable() is not None
    policy.remove(policy.find_unreachable()[0])  # type: ignore[index]
    assert len(policy) == 1 and policy.find_unreachable() is None, "no request waits behind it"


# ---------------------------------------------------------------- by name


class ShortestPromptFirst(RankedPolicy):
    def rank(self, request: Request) -> int:
        return len(request.token_ids)


class Forgetful(ShortestPromptFirst):
    def __init__(self, context: Context) -> None:
        super().__init__()


class Demanding(ShortestPromptFirst):
    def __init__(self, context: Context, more: int) -> None:
        super().__init__(context)


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("own_policies")
    for kind in (ShortestPromptFirst, Forgetful, Demanding):
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "own_policies", module)
    return "own_policies"


def test_settings_name_all_policies() -> None:
    assert tuple(POLICIES) == POLICY_NAMES
    for name in POLICY_NAMES:
        assert type(make_policy(name, Context())) is POLICIES[name]


def test_a_policy_written_by_a_user(own_module: str) -> None:
    policy = make_policy(f"{own_module}:ShortestPromptFirst", Context())
    found = [waiting(key, length) for key, length in enumerate([5, 2, 9, 2])]
    for each in found:
        policy.add(each)
    assert policy.select_to_preempt(found) is found[2]
    assert drain(policy) == [1, 3, 0, 2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere_to_be_found:Policy", "cannot be loaded .*fcfs, priority, wrr, deadline, or 'module:Class'"),
        ("own_policies:Missing", "cannot be loaded"),
        ("collections:OrderedDict", "not a class derived from kvasir.engine.policies.Policy"),
        ("own_policies:Forgetful", r"call super\(\).__init__\(context\)"),
        ("own_policies:Demanding", "must accept a single Context"),
        (":", "cannot be loaded"),
    ],
)
def test_an_invalid_policy_is_a_config_error(name: str, message: str, own_module: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(name, Context())
