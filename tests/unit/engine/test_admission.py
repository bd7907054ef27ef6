"""Queue limits, the watermark and deadlines: requests that are refused, held back or ended, and their counters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir.engine.core import EngineCore
from kvasir.engine.observers import ServiceRate
from kvasir.engine.policies import Context, EarliestDeadlineFirst, FirstComeFirstServed
from kvasir.engine.queue import QueueLimits
from kvasir.errors import OverloadedError
from kvasir.messages import BeamSpec, FinishReason, Terms
from tests.builders import Clock, ScoringExecutor, expected, make_core, request, run

LONG = [i % 7 for i in range(30)]


def due(deadline: float) -> Terms:
    return Terms(arrival=1.0, deadline=deadline)


def timed_core(clock: Clock, lookahead: int = 0, seconds: float = 1.0, **settings: object) -> EngineCore:
    """Return a core whose steps take `seconds` each."""
    core = make_core(lookahead, **{"policy": FirstComeFirstServed(Context(clock)), **settings})  # type: ignore[arg-type]
    clock.tick(core, seconds)
    return core


# ---------------------------------------------------------------- the queue is full


def test_requests_beyond_the_limit_are_refused_once_all_rows_are_taken() -> None:
    core = make_core(max_num_seqs=2, queue_limits=QueueLimits(max_requests=3))
    for key in range(5):  # two of them find a row
        core.add(request(key, [key], 4))
    with pytest.raises(OverloadedError, match="5 requests wait, and max_queued_requests=3; try again in 1 s") as error:
        core.add(request(5, [5], 4))
    assert error.value.retry_after == 1.0
    core.run_step()
    with pytest.raises(OverloadedError, match="3 requests wait"):
        core.add(request(5, [5], 4))
    assert core.stats().refused_requests == 2
    got = run(core)
    assert set(got.reasons) == set(range(5)), "refused requests get no output"
    core.add(request(5, [5], 4))


def test_prompt_tokens_beyond_the_limit_are_refused_unless_the_queue_is_empty() -> None:
    core = make_core(queue_limits=QueueLimits(max_tokens=20))
    core.add(request(0, LONG, 4))
    with pytest.raises(OverloadedError, match="prompts of 35 tokens would wait, and max_queued_tokens=20"):
        core.add(request(1, [1] * 5, 4))
    core.run_step()
    assert core.stats().num_waiting_tokens == 0
    for key in range(2, 6):
        core.add(request(key, [1] * 5, 4))
    with pytest.raises(OverloadedError):
        core.add(request(6, [1], 4))
    assert core.stats().num_waiting_tokens == 20
    run(core)
    assert core.stats().num_waiting_tokens == 0 and core.stats().refused_requests == 2


def test_waiting_beam_searches_count() -> None:
    core = make_core(max_num_seqs=2, queue_limits=QueueLimits(max_requests=2))
    for key in range(4):
        core.add(replace(request(key, [1, 2], 4), beam=BeamSpec(width=2)))
    assert core.stats().num_waiting == 4
    with pytest.raises(OverloadedError, match="4 requests wait"):
        core.add(request(9, [1], 1))


def test_retry_after_is_the_time_in_which_half_the_queue_is_served() -> None:
    clock = Clock()
    core = timed_core(clock, max_num_seqs=1, queue_limits=QueueLimits(max_requests=20))
    for key in range(20):
        core.add(request(key, [1], 2))
    for _ in range(20):  # two seconds a request
        core.run_step()
    for key in range(20, 30):
        core.add(request(key, [1], 2))
    with pytest.raises(OverloadedError) as error:
        for key in range(30, 40):
            core.add(request(key, [1], 2))
    assert 18 <= error.value.retry_after <= 22


def test_retry_after_is_bounded() -> None:
    clock = Clock()
    core = timed_core(clock, seconds=1000.0, max_num_seqs=1, queue_limits=QueueLimits(max_requests=9))
    with pytest.raises(OverloadedError) as error:
        for key in range(100):
            core.add(request(key, [1], 1))
            if key % 3 == 0:
                core.run_step()
    assert error.value.retry_after == 60.0


# ---------------------------------------------------------------- the watermark


def grown(watermark: float) -> EngineCore:
    """Run eight requests that all fit when they are admitted, but not when they have grown."""
    core = make_core(num_blocks=41, max_num_seqs=8, budget=256, max_model_len=40, caching=False, watermark=watermark)
    for key in range(8):
        core.add(request(key, [key] * 16, 24))
    got = run(core)
    assert all(got.tokens[key] == expected([key] * 16, 24) for key in range(8))
    return core


def test_a_watermark_avoids_preemptions() -> None:
    without, with_it = grown(0.0), grown(0.3)
    assert without.stats().held_back == 0 < with_it.stats().held_back
    assert with_it.stats().preemptions < without.stats().preemptions


def test_a_request_that_runs_alone_ignores_the_watermark() -> None:
    core = make_core(num_blocks=11, max_model_len=40, watermark=0.5)
    for key in range(3):
        core.add(request(key, [key] * 30, 10))
    got = run(core)
    assert all(got.tokens[key] == expected([key] * 30, 10) for key in range(3))


# ---------------------------------------------------------------- deadlines


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_running_request_ends_at_its_deadline_with_its_tokens(lookahead: int, stream: bool) -> None:
    clock = Clock()
    core = timed_core(clock, lookahead)
    core.add(request(0, LONG, 30, terms=due(7.0), stream=stream))
    core.add(request(1, LONG[::-1], 30, stream=stream))
    got = run(core)
    assert got.reasons == {0: FinishReason.TIMEOUT, 1: FinishReason.LENGTH}
    assert 0 < len(got.tokens[0]) < 10 and got.tokens[0] == expected(LONG, 30)[: len(got.tokens[0])]
    assert got.tokens[1] == expected(LONG[::-1], 30)
    assert got.errors[0] == "its deadline of 6 s passed while it ran"
    stats = core.stats()
    assert (stats.timeouts_running, stats.timeouts_waiting, stats.num_used_blocks) == (1, 0, 0)


def test_a_waiting_request_ends_at_its_deadline() -> None:
    clock = Clock()
    core = timed_core(clock, max_num_seqs=1)
    core.add(request(0, LONG, 20))
    core.add(request(1, LONG, 20, terms=due(5.0), stream=False))
    got = run(core)
    assert got.reasons == {0: FinishReason.LENGTH, 1: FinishReason.TIMEOUT}
    assert got.tokens[1] == [] and got.errors[1] == "its deadline of 4 s passed while it waited"
    stats = core.stats()
    assert (stats.timeouts_running, stats.timeouts_waiting) == (0, 1)


@pytest.mark.parametrize(("allowed", "told"), [(1e-6, "1e-06"), (0.2, "0.2"), (1500.0, "1500")])
def test_the_error_states_the_timeout_as_given_after_a_long_uptime(allowed: float, told: str) -> None:
    long_up = 54321987.6543  # a clock whose readings are 7 nanoseconds apart
    clock = Clock(long_up)
    core = timed_core(clock, seconds=2000.0, max_num_seqs=1)
    core.add(request(0, LONG, 5))
    core.add(request(1, LONG, 5, terms=Terms(arrival=long_up, deadline=long_up + allowed), stream=False))
    assert run(core).errors[1] == f"its deadline of {told} s passed while it waited"


def test_a_deadline_that_has_passed_already_still_gets_an_answer() -> None:
    core = make_core(policy=FirstComeFirstServed(Context(Clock(9.0))))
    core.add(request(0, LONG, 20, terms=due(5.0)))
    got = run(core)
    assert got.reasons == {0: FinishReason.TIMEOUT} and core.stats().steps == 0


def test_a_request_that_ends_in_time_is_left_alone() -> None:
    clock = Clock()
    core = timed_core(clock)
    core.add(request(0, LONG, 4, terms=due(1.0 + 4)))
    got = run(core)
    assert got.reasons == {0: FinishReason.LENGTH} and clock.now == 5.0
    clock.now = 100.0
    core.add(request(1, LONG, 4))
    assert run(core).reasons == {1: FinishReason.LENGTH}


def test_a_preempted_request_times_out_with_the_tokens_it_had() -> None:
    clock = Clock()
    core = timed_core(clock, num_blocks=12, max_model_len=44, caching=False)
    core.add(request(0, [1] * 12, 30))
    core.add(request(1, [2] * 12, 30, terms=due(14.0), stream=False))
    got = run(core)
    assert core.scheduler.stats.preemptions == 1
    assert got.reasons[1] is FinishReason.TIMEOUT and core.stats().timeouts_waiting == 1
    assert 5 < len(got.tokens[1]) < 30 and got.tokens[1] == expected([2] * 12, 30)[: len(got.tokens[1])]


@pytest.mark.parametrize("deadline", [2.0, 9.0])
def test_completions_of_one_prompt_time_out_together(deadline: float) -> None:
    """At 2 s the prompt is not computed yet, and the others wait for it; at 9 s all run."""
    clock = Clock()
    core = timed_core(clock, budget=8)
    forks = tuple(request(key, LONG, 25, terms=due(deadline)) for key in (1, 2))
    core.add(replace(request(0, LONG, 25, terms=due(deadline)), forks=forks))
    core.add(request(3, LONG[::-1], 4))
    got = run(core)
    assert got.reasons == {**dict.fromkeys(range(3), FinishReason.TIMEOUT), 3: FinishReason.LENGTH}
    assert core.stats().timeouts_running + core.stats().timeouts_waiting == 3
    assert core.stats().num_used_blocks == 0


def test_beam_searches_time_out_running_and_waiting() -> None:
    clock = Clock()
    executor = ScoringExecutor(4, 4, 60)
    executor.allocate_kv(64)
    core = timed_core(clock, executor=executor, max_num_seqs=4, max_model_len=60)
    for key in range(2):
        core.add(replace(request(key, [1, 2], 20, terms=due(6.0 + key)), beam=BeamSpec(width=3)))
    got = run(core)
    assert got.reasons == dict.fromkeys(range(2), FinishReason.TIMEOUT)
    assert (core.stats().timeouts_running, core.stats().timeouts_waiting) == (2, 0)
    for key in range(2, 4):
        core.add(replace(request(key, [1, 2], 20, terms=due(clock.now + 3)), beam=BeamSpec(width=3)))
    got = run(core)
    assert set(got.reasons) == {2, 3}
    assert (core.stats().timeouts_running, core.stats().timeouts_waiting) == (3, 1)
    assert core.stats().num_used_blocks == 0 and not core.has_work()


def test_requests_ended_early_are_counted_and_have_a_reason() -> None:
    clock = Clock()
    core = timed_core(clock, policy=EarliestDeadlineFirst(Context(clock)), budget=8, max_num_seqs=2)
    for key in range(6):
        core.add(request(key, [key] * 30, 8))
    run(core)
    core.add(request(6, LONG, 8, terms=Terms(clock.now, deadline=clock.now + 2)))
    core.add(request(7, LONG, 8, terms=Terms(clock.now, deadline=clock.now + 40)))
    got = run(core)
    assert got.reasons == {6: FinishReason.TIMEOUT, 7: FinishReason.LENGTH}
    assert got.errors[6] == "its deadline is 2 s away and it needs at least 3.75 s"
    assert core.stats().timeouts_foreseen == core.stats().timeouts_waiting == 1


def test_deadlines_of_ended_requests_are_dropped() -> None:
    core = make_core()
    for key in range(2000):
        core.add(request(key, [1], 1, terms=due(1e12)))
        if key % 8 == 7:
            run(core)
    assert len(core.deadlines._heap) < 600


def test_deadlines_of_waiting_forks_are_not_searched_for_every_request() -> None:
    core = make_core()
    heap = core.deadlines._heap
    for key in range(0, 1600, 16):
        parent = request(key, [1, 2], 1, terms=due(1e12))
        core.add(replace(parent, forks=tuple(replace(parent, key=key + i) for i in range(1, 16))))
    assert core.deadlines._heap is heap and len(heap) == 1600, "no request has ended, so none is dropped"
    assert len(core.groups.keys) == 1500 and 1599 in core.groups.keys
    assert core.abort(1599) and len(core.groups.keys) == 1499 and 1599 not in core.groups.keys
    assert len(run(core).reasons) == 1599 and not core.groups.keys


# ---------------------------------------------------------------- service rate


def test_idle_time_does_not_count_as_a_step() -> None:
    rate = ServiceRate()
    for i in range(50):  # a step of 0.1 s every ten seconds
        rate.record_step(10.0 * i, 10.0 * i + 0.1, 100, True)
    assert rate.least_seconds(1000, 1) == pytest.approx(1.0)
    assert rate.least_seconds(1, 11) == pytest.approx(1.1)


def test_steps_planned_ahead_are_timed_from_the_previous_result() -> None:
    rate = ServiceRate()
    for i in range(50):  # planned two steps early
        rate.record_step(float(i - 2), float(i), 10, False)
    assert rate.least_seconds(10**9, 1) == pytest.approx(1.0), "no full step was seen: prompts count one step"


def test_requests_per_second() -> None:
    rate = ServiceRate()
    assert rate.ends_per_second(5.0) is None
    for i in range(1000):
        rate.record_request(i * 0.5, 0.0, is_done=True)
        rate.record_request(i * 0.5, 0.0, is_done=False)
    assert rate.ends_per_second(500.0) == pytest.approx(2.0, rel=0.02)


def test_chance_of_meeting_a_deadline_counts_requests_that_timed_out() -> None:
    rate = ServiceRate()
    assert rate.chance(0.0) == 1.0, "nothing was measured"
    for seconds in range(30):
        rate.record_request(1.0 + seconds / 100, 0.0, is_done=True)
    assert rate.chance(0.9) == 0.0 and rate.chance(2.0) == 1.0
    for _ in range(70):  # they had two seconds, which was not enough
        rate.record_request(2.0, 0.0, is_done=False)
    assert rate.chance(1.5) == pytest.approx(0.3)
    assert rate.chance(9.0) == pytest.approx(0.3)


def test_a_timed_out_request_lowers_the_chance() -> None:
    clock = Clock()
    core = timed_core(clock)
    for key in range(16):
        core.add(request(key, [key], 4, terms=Terms(clock.now, deadline=clock.now + 2 if key % 2 else None)))
        run(core)
    assert core.scheduler.context.service_rate.chance(3.9) == 0.0
    assert core.scheduler.context.service_rate.chance(4.0) == 1.0, "no request with this much time timed out"
