"""Fair shares: one tenant's flood does not keep others waiting, and a single tenant notices nothing of the policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.engine.core import EngineCore
from kvasir.engine.policies import Context, FairShare, FirstComeFirstServed, Policy
from kvasir.engine.queue import QueueLimits
from kvasir.errors import OverloadedError
from kvasir.executor.fake import DelayExecutor
from kvasir.messages import BeamSpec, EngineRequest, StepPlan, Terms
from tests.builders import VOCAB, Clock, ScoringExecutor, check_blocks, expected, make_core, request

STEP, TOKEN = 0.01, 0.0001  # seconds: a step of 32 rows takes 13 ms, a prompt of 1000 tokens 100 ms


class Load:
    """A core on a virtual clock, and the times at which requests got their first token and ended."""

    def __init__(self, policy: type[Policy] = FairShare, **settings: Any) -> None:
        self.clock = Clock(0.0)
        settings = {"max_num_seqs": 32, "num_blocks": 4000, "budget": 512, "max_model_len": 2048, **settings}
        settings = {"block_size": 16, "policy": policy(Context(self.clock)), **settings}
        self.core: EngineCore = make_core(1, DelayExecutor(settings["block_size"]), **settings)
        execute = self.core.executor.execute

        def timed(plan: StepPlan) -> None:
            execute(plan)
            self.clock.now += STEP + TOKEN * plan.total_tokens

        self.core.executor.execute = timed  # type: ignore[method-assign]
        self.arrived: dict[int, float] = {}
        self.first: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.tenant: dict[int, str] = {}

    def add(
        self, tenant: str, count: int = 1, prompt: int = 20, max_tokens: int = 200, weight: float = 1.0
    ) -> list[int]:
        keys = list(range(len(self.tenant), len(self.tenant) + count))
        for key in keys:
            terms = Terms(arrival=self.clock.now, tenant=tenant, weight=weight)
            self.core.add(request(key, [key % VOCAB, *range(prompt - 1)], max_tokens, terms=terms))
            self.arrived[key], self.tenant[key] = self.clock.now, tenant
        return keys

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            output = self.core.run_step()
            for key, num in zip(output.keys.tolist(), output.counts.tolist(), strict=True):
                if num:
                    self.first.setdefault(key, self.clock.now)
            self.ended |= {end.key: self.clock.now for end in output.finished}

    def finish(self) -> float:
        while self.core.has_work():
            self.step()
        check_blocks(self.core)
        return self.clock.now

    def first_token(self, keys: list[int]) -> float:
        """The longest time to a first token."""
        return max(self.first[key] - self.arrived[key] for key in keys)

    def rows(self, tenant: str) -> int:
        return sum(each.spec.terms.tenant == tenant for each in self.core.scheduler.rows.requests if each is not None)


@pytest.mark.parametrize("rows", [4, 32, 256])
@pytest.mark.parametrize("host", [(0, 0), (4000, 0)], ids=["recomputed", "swapped"])
def test_a_flood_of_one_tenant_keeps_nobody_waiting(rows: int, host: tuple[int, int]) -> None:
    load = Load(max_num_seqs=rows, host=host)
    load.add("flood", 500, max_tokens=1000)
    load.step(100)
    asked = load.add("other", 1)
    load.step(6)
    assert load.first_token(asked) < 5 * (STEP + TOKEN * 512), "its first token takes a few steps"
    more = load.add("other", min(rows // 2 - 1, 15))
    load.step(6)
    assert load.first_token(more) < 5 * (STEP + TOKEN * 512), "and so it is for a burst, up to an equal share"
    assert load.rows("other") == 1 + len(more) and load.rows("flood") == rows - 1 - len(more), "no row is left empty"


def test_two_floods_share_rows_by_weight() -> None:
    load = Load()
    load.add("a", 200, max_tokens=1000)
    load.step(20)
    load.add("b", 200, max_tokens=1000, weight=3.0)
    load.step(40)
    assert (load.rows("a"), load.rows("b")) == (8, 24)
    preemptions = load.core.stats().preemptions
    assert preemptions == 24, "a request is preempted for each row that changes hands"
    load.step(200)
    assert load.core.stats().preemptions == preemptions, "then nobody is preempted back and forth"


def test_the_share_of_those_who_have_gone_goes_to_the_others() -> None:
    load = Load()
    load.add("a", 200, max_tokens=400)
    load.add("b", 16, max_tokens=40)
    load.step(30)
    assert load.rows("a") == load.rows("b") == 16
    load.step(40)
    assert (load.rows("a"), load.rows("b")) == (32, 0)


@pytest.mark.parametrize("tenants", [33, 100])
def test_more_tenants_than_rows_wait_for_a_row(tenants: int) -> None:
    load = Load()
    for number in range(tenants):
        load.add(str(number), 3, max_tokens=20)
    load.finish()
    assert load.core.stats().preemptions == 0, "taking a tenant's only row would only change who waits"
    ends = [max(time for key, time in load.ended.items() if load.tenant[key] == str(n)) for n in range(tenants)]
    assert len(ends) == tenants


def test_blocks_are_shared_like_rows() -> None:
    load = Load(num_blocks=401, max_num_seqs=64, watermark=0.01)
    load.add("a", 40, prompt=320, max_tokens=640)  # 20 blocks and more each
    load.step(60)
    assert load.core.stats().num_used_blocks > 350 and load.rows("a") < 40
    asked = load.add("b", 1, prompt=320)
    load.step(8)
    assert load.first_token(asked) < 0.5
    load.add("b", 40, prompt=320, max_tokens=640)
    load.step(80)
    held = load.core.scheduler._all_shares.count_blocks()
    order = load.core.scheduler.rows.order
    by_tenant = np.zeros(2)
    for row in order.tolist():
        spec = load.core.scheduler.rows.requests[row].spec  # type: ignore[union-attr]
        by_tenant["ab".index(spec.terms.tenant)] += held[row]
    assert abs(by_tenant[0] - by_tenant[1]) < 0.2 * by_tenant.sum()
    load.finish()
    assert load.core.stats().preemptions < 150, "80 requests of which few fit at once; in order of arrival it is 94"


def test_a_prefix_that_requests_share_counts_once() -> None:
    load = Load(num_blocks=201, max_num_seqs=64)
    for key in range(8):  # a prompt of 80 blocks that all of these share
        load.core.add(request(key, [1] * 1280, 100, terms=Terms(tenant="a")))
        load.tenant[key], load.arrived[key] = "a", 0.0
        load.step(4)
    held = load.core.scheduler._all_shares.count_blocks()
    assert held.sum() == pytest.approx(load.core.stats().num_used_blocks)
    load.add("b", 1, prompt=320)
    load.step(4)
    assert load.rows("b") == 1 and load.core.stats().preemptions == 0


def test_long_prompts_of_one_tenant_do_not_take_every_step() -> None:
    load = Load()
    load.add("a", 100, prompt=2000, max_tokens=2)
    load.step(10)
    short = load.add("b", 1, prompt=100)
    load.step(8)
    assert load.first_token(short) < 0.3
    before = len(load.ended)
    long = load.add("c", 1, prompt=1500, max_tokens=10)
    load.step(40)
    assert load.first_token(long) < 20 * (STEP + TOKEN * 512), "a third of every step is its own"
    assert len(load.ended) > before, "the others go on"
    load.finish()
    assert len(load.ended) == 102


def test_a_small_weight_gets_tokens_while_others_ask_for_all() -> None:
    load = Load(budget=64)
    load.add("heavy", 40, prompt=1500, max_tokens=2, weight=1000.0)
    load.step()
    (key,) = load.add("light", 1, prompt=20, max_tokens=10, weight=0.001)
    load.step(60)
    assert key in load.ended, "one token a step is its least"
    assert len(load.core.scheduler) > 20, "the others still ask for all"
    load.finish()


@pytest.mark.parametrize("every", [5, 50])
def test_throughput_stays_within_five_percent(every: int) -> None:
    """A tenant with single requests beside a flood, against the same requests in order of arrival."""
    times = {}
    for policy in (FirstComeFirstServed, FairShare):
        load = Load(policy)
        load.add("flood", 500, prompt=200, max_tokens=100)
        asked = []
        for _ in range(40):
            load.step(every)
            asked += load.add("other", 1, prompt=100, max_tokens=50)
        times[policy] = load.finish()
        if policy is FairShare:
            assert load.first_token(asked) < 2.0
    assert times[FairShare] < 1.05 * times[FirstComeFirstServed]


# ---------------------------------------------------------------- one tenant

arrivals = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 6), st.booleans()), min_size=1, max_size=14
)


@given(arrivals, st.sampled_from([0, 1]), st.sampled_from([0.0, 0.1]), st.integers(6, 40))
def test_a_single_tenant_is_served_in_order_of_arrival(
    load: list[tuple[int, int, int, bool]], lookahead: int, watermark: float, budget: int
) -> None:
    plans: list[list[tuple[list[int], list[int]]]] = []
    for policy in (FirstComeFirstServed(), FairShare()):
        settings = {"num_blocks": 14, "max_num_seqs": 6, "max_model_len": 52}
        core = make_core(lookahead, budget=budget, watermark=watermark, policy=policy, **settings)
        execute, seen = core.executor.execute, list[tuple[list[int], list[int]]]()

        def watched(plan: StepPlan, execute: Any = execute, seen: Any = seen) -> None:
            seen.append((plan.rows.tolist(), plan.token_ids.tolist()))
            execute(plan)

        core.executor.execute = watched  # type: ignore[method-assign]
        for key, (prompt, max_tokens, steps, leaves) in enumerate(load):
            core.add(request(key, [key] * prompt, max_tokens, terms=Terms(tenant="one")))
            for _ in range(steps):
                core.run_step()
            if leaves:
                core.abort(key)
        while core.has_work():
            core.run_step()
        plans.append(seen)
    assert plans[0] == plans[1]


# ---------------------------------------------------------------- the queue, and searches


def test_a_full_queue_has_room_for_others() -> None:
    load = Load(max_num_seqs=4, queue_limits=QueueLimits(max_requests=100))
    with pytest.raises(OverloadedError):
        load.add("flood", 500)
    assert load.core.stats().num_waiting == 104
    other = load.add("other", 50)
    with pytest.raises(OverloadedError, match="max_queued_requests=100"):
        load.add("other", 1)
    load.finish()
    assert set(other) <= load.ended.keys()


def test_tokens_in_the_queue_are_shared_too() -> None:
    load = Load(max_num_seqs=2, queue_limits=QueueLimits(max_tokens=1000))
    with pytest.raises(OverloadedError):
        load.add("flood", 100, prompt=100)
    other = load.add("other", 5, prompt=100)
    with pytest.raises(OverloadedError, match="max_queued_tokens=1000"):
        load.add("other", 1, prompt=100)
    load.finish()
    assert set(other) <= load.ended.keys()


def test_a_flood_of_searches_does_not_keep_another_search_waiting() -> None:
    executor = ScoringExecutor(4, 8, 64, VOCAB)
    core = make_core(1, executor, policy=FairShare())
    executor.allocate_kv(core.scheduler.cache.pool.num_blocks, 1)
    done: list[int] = []
    for key in range(20):
        core.add(EngineRequest(key, np.array([1, key], np.int32), 12, beam=BeamSpec(4), terms=Terms(tenant="a")))
    for _ in range(3):
        core.run_step()
    core.add(EngineRequest(50, np.array([1, 50], np.int32), 12, beam=BeamSpec(4), terms=Terms(tenant="b")))
    core.add(request(60, [3, 4], 10, terms=Terms(tenant="c")))
    plain: list[int] = []
    while core.has_work():
        output = core.run_step()
        done += [beam.key for beam in output.beams if beam.finished]
        for key, tokens, count in zip(output.keys.tolist(), output.token_ids, output.counts.tolist(), strict=True):
            assert key == 60
            plain += tokens[:count].tolist()
        if 60 in [end.key for end in output.finished]:
            assert len(done) < 6, "a plain request gets the next row that a search leaves"
    assert done.index(50) <= 3 and plain == expected([3, 4], 10)
    check_blocks(core)
