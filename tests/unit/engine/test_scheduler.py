"""Each mechanism of the scheduler alone, with a counter that shows it was really taken."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir.engine.cache import prefix_groups
from kvasir.engine.scheduler import Scheduler
from kvasir.errors import RequestError
from kvasir.frontend.requests import metrics
from kvasir.messages import FinishReason, StepResult
from tests.builders import Clock, check_blocks, expected, make_core, make_scheduler, request, run

LONG = [i % 7 for i in range(30)]


def answer(scheduler, plan, token=1):  # type: ignore[no-untyped-def]
    tokens = np.full((len(plan.rows), 1), token, np.int32)
    return scheduler.update(StepResult(tokens, plan.samples.astype(np.int32)))


def test_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    core = make_core(budget=8)
    core.add(request(0, LONG, 4))
    sizes = []
    real = core.executor.execute
    core.executor.execute = lambda plan: (sizes.append(plan.total_tokens), real(plan))[1]  # type: ignore[method-assign]
    got = run(core)
    assert sizes[:4] == [8, 8, 8, 6]
    assert got.tokens[0] == expected(LONG, 4)


def test_steps_are_counted_by_their_tokens() -> None:
    core = make_core(budget=8)
    core.add(request(0, LONG, 4))
    run(core)  # steps of 8, 8, 8 and 6 tokens, and three of one
    one, eight = metrics.step_histogram(core.stats()), metrics.step_histogram(metrics.sum_stats([core.stats()] * 8))
    assert (one.sum, one.count, one.buckets["1.0"], one.buckets["8.0"], one.buckets["16.0"]) == (33, 7, 3, 7, 7)
    assert (eight.sum, eight.count, eight.buckets["1.0"]) == (8 * 33, 8 * 7, 8 * 3)
    assert list(one.buckets)[-2:] == ["16384.0", "+Inf"]


def test_decodes_go_on_while_a_long_prompt_is_chunked() -> None:
    scheduler = make_scheduler(budget=8)
    scheduler.add(request(0, [1, 2, 3], 20))
    answer(scheduler, scheduler.schedule())
    scheduler.add(request(1, LONG, 4))
    plan = scheduler.schedule()
    assert plan.num_tokens.tolist() == [1, 7] and plan.num_decodes == 1
    assert plan.samples.tolist() == [True, False]
    assert scheduler.stats.partial_prefills == 1


def test_without_chunking_a_prompt_waits_for_a_step_that_holds_it_whole() -> None:
    scheduler = make_scheduler(budget=32, chunked=False)
    scheduler.add(request(0, LONG, 4))
    scheduler.add(request(1, LONG[::-1], 4))
    assert scheduler.schedule().num_tokens.tolist() == [30]
    assert sorted(scheduler.schedule().num_tokens.tolist()) == [1, 30]
    assert scheduler.stats.partial_prefills == 0


def test_prefill_threshold_bounds_every_prompt() -> None:
    core = make_core(budget=64, threshold=7)
    core.add(request(0, LONG, 2))
    assert core.scheduler.schedule().num_tokens.tolist() == [7]


def test_prefix_hit_skips_prefill() -> None:
    core = make_core()
    core.add(request(0, LONG, 4))
    run(core)
    core.add(request(1, LONG, 4))
    got = run(core)
    assert got.tokens[1] == expected(LONG, 4)
    assert got.cached[1] == 28  # the last token is always computed, so the hit ends at a full block before it
    assert core.scheduler.cache.stats.prefix_hits == 28


def test_generated_text_is_found_by_the_next_turn() -> None:
    core = make_core()
    core.add(request(0, LONG, 8))
    first = run(core).tokens[0]
    core.add(request(1, LONG + first + [5], 2))
    assert run(core).cached[1] == 36  # 37 of the 38 tokens were computed: nine full blocks of four


def test_requests_of_one_step_share_a_prefix() -> None:
    core = make_core(budget=64)
    core.add(request(0, [*LONG, 1], 2))
    core.add(request(1, [*LONG, 2], 2))
    plan = core.scheduler.schedule()
    assert sorted(plan.num_tokens.tolist()) == [3, 31]
    core.executor.execute(plan)
    started = core.scheduler.update(core.executor.sample().result()).started
    assert [(start.key, start.num_cached_tokens) for start in started] == [(0, 0), (1, 28)]
    run(core)


def test_a_start_tells_how_long_the_request_waited() -> None:
    core = make_core(lookahead=0, max_num_seqs=1)
    core.scheduler.context.clock = clock = Clock()
    clock.tick(core)
    core.add(request(0, [1, 2, 3], 4))
    core.add(request(1, [4, 5], 1))
    assert run(core).waited == {0: 0.0, 1: 4.0}


@pytest.mark.parametrize("stream", [True, False])
def test_the_end_tells_when_the_first_token_came_unless_it_was_streamed(stream: bool) -> None:
    core = make_core(lookahead=0, budget=4, max_num_seqs=2)
    core.scheduler.context.clock = clock = Clock()
    clock.tick(core)
    core.add(request(0, list(range(10)), 5, stream=stream))  # whose prompt takes three steps
    finished = []
    while core.has_work():
        finished += core.run_step().finished
    assert [end.first_token for end in finished] == [None if stream else 3.0]
    assert not core.scheduler._silent


def test_salt_keeps_prefixes_apart() -> None:
    core = make_core()
    core.add(request(0, LONG, 1, cache_salt=b"a"))
    run(core)
    core.add(request(1, LONG, 1, cache_salt=b"b"))
    assert run(core).cached[1] == 0


def test_prefix_caching_off_finds_nothing() -> None:
    core = make_core(caching=False)
    for key in range(2):
        core.add(request(key, LONG, 4))
        assert run(core).cached[key] == 0
    assert core.scheduler.cache.pool.num_cached == 0


def test_preempted_request_comes_back_and_loses_nothing() -> None:
    core = make_core(num_blocks=18, max_model_len=60)
    for key in range(3):
        core.add(request(key, [key] * 12, 24))
    got = run(core)
    assert core.scheduler.stats.preemptions > 0
    for key in range(3):
        assert got.tokens[key] == expected([key] * 12, 24)


def test_the_oldest_request_is_never_preempted() -> None:
    core = make_core(num_blocks=18, max_model_len=60)
    for key in range(3):
        core.add(request(key, [key] * 12, 24))
    while core.has_work():
        core.run_step()
        oldest = core.scheduler._requests.get(0)
        assert oldest is None or oldest.num_preemptions == 0


def test_fork_shares_blocks_and_copies_on_the_first_write() -> None:
    core = make_core()
    core.add(request(0, LONG, 12))
    core.run_step()
    core.run_step()
    core.run_step()
    prompt = LONG + expected(LONG, 1)
    core.scheduler.fork(0, request(1, prompt, 6))
    used = core.scheduler.cache.pool.num_used
    assert core.scheduler.cache.stats.shared == 8  # 31 tokens in blocks of four, the last one half full
    check_blocks(core)
    got = run(core)
    assert core.scheduler.cache.stats.copies == 1
    assert used <= 9, "the child took no blocks of its own until it wrote"
    assert got.tokens[1] == expected(prompt, 6)


def test_abort_of_a_waiting_and_of_a_running_request() -> None:
    core = make_core(max_num_seqs=1)
    core.add(request(0, LONG, 12))
    core.add(request(1, LONG, 12))
    core.run_step()
    assert core.abort(0) and core.abort(1)
    assert not core.abort(0), "it is gone already"
    run(core)
    assert core.scheduler.cache.pool.num_used == 0


def test_text_cut_by_a_stop_string_is_not_cached_beyond_the_cut() -> None:
    core = make_core()
    core.add(request(0, LONG, 12))
    for _ in range(12):
        core.run_step()
    core.abort(0, num_kept=2)
    assert core.scheduler.cache.pool.num_cached == 8  # 32 tokens kept


def test_stop_token_ends_at_once_and_the_wasted_row_is_dropped() -> None:
    text = expected(LONG, 8)
    core = make_core()
    core.add(request(0, LONG, 8, stop=(99, text[3])))
    core.add(request(1, LONG[1:], 8))
    got = run(core)
    assert got.tokens[0] == text[: text.index(text[3]) + 1]
    assert got.reasons == {0: FinishReason.STOP, 1: FinishReason.LENGTH}
    assert core.scheduler.stats.dropped_tokens == 1


def test_length_end_wastes_no_row() -> None:
    core = make_core()
    core.add(request(0, LONG, 5))
    run(core)
    assert core.scheduler.stats.dropped_tokens == 0
    assert core.scheduler.stats.scheduled_tokens == 34  # the last token is never fed back


def test_request_that_could_never_fit_is_refused_with_numbers() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=64)
    with pytest.raises(RequestError, match=r"may grow to 40 tokens.*10 KV blocks.*the cache has 5"):
        scheduler.add(request(0, LONG, 10))
    assert len(scheduler) == 0


def test_request_that_needs_its_last_token_waits_for_the_result() -> None:
    scheduler = make_scheduler()
    scheduler.add(request(0, [1, 2, 3], 5, needs_last_token=True))
    first = scheduler.schedule()
    assert scheduler.schedule() is None
    answer(scheduler, first)
    assert scheduler.schedule().num_tokens.tolist() == [1]


def test_reset_forgets_prefixes_only_when_idle() -> None:
    core = make_core()
    core.add(request(0, LONG, 4))
    core.run_step()
    assert not core.reset_prefix_cache()
    run(core)
    assert core.reset_prefix_cache()
    core.add(request(1, LONG, 1))
    assert run(core).cached[1] == 0


def test_plan_tells_which_rows_share_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_groups, "MIN_PREFIX_GROUP_ROWS", 3)
    monkeypatch.setattr(prefix_groups, "pays", lambda sequences, tokens: sequences >= 3 and tokens >= 4)
    scheduler = make_scheduler(budget=256, max_model_len=64)
    stem = LONG[:20]
    for key in range(3):
        scheduler.add(request(key, [*stem, 40 + key], 8))
    answer(scheduler, scheduler.schedule())
    assert shared_by(scheduler) == {20: [0, 1, 2]}
    scheduler.add(request(3, [9] * 10, 8))
    assert shared_by(scheduler) == {20: [0, 1, 2]}, "of the single tokens of a step with a prompt in it"
    assert shared_by(scheduler) == {20: [0, 1, 2]}, "the newcomer shares nothing"
    scheduler.abort(0)
    assert shared_by(scheduler) == {}, "two are too few"
    for key in range(4, 7):
        scheduler.add(request(key, [*stem[:8], *[50 + key] * 10], 8))
    scheduler.schedule()
    assert shared_by(scheduler) == {8: [1, 2, 4, 5, 6]}, "what few share is less than what more do"


def shared_by(scheduler: Scheduler) -> dict[int, list[int]]:
    """Keys of the next step's requests, by how many tokens they share."""
    plan = scheduler.schedule()
    if plan.shared is None:
        return {}
    lines = np.split(plan.shared.members, plan.shared.starts[1:-1])
    keys = scheduler.rows.key[plan.rows]
    return {int(n): sorted(keys[own].tolist()) for n, own in zip(plan.shared.tokens, lines, strict=True)}
