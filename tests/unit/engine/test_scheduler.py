"""Each mechanism of the scheduler alone; a counter shows that it was used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvasir.engine.cache import prefix_groups
from kvasir.engine.scheduler import Scheduler
from kvasir.errors import RequestError
from kvasir.executor.fake import fake_config
from kvasir.frontend.requests import metrics
from kvasir.messages import FinishReason, StepResult
from kvasir.server.engine_metrics import cache_metric
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
    run(core)  # steps of 8, 8, 8 and 6 tokens of the prompt, one generated with the last; three that generate one
    one, eight = metrics.step_histogram(core.stats()), metrics.step_histogram(metrics.sum_stats([core.stats()] * 8))
    assert (one.sum, one.count, one.buckets["1.0"], one.buckets["8.0"], one.buckets["16.0"]) == (34, 7, 3, 7, 7)
    assert (eight.sum, eight.count, eight.buckets["1.0"]) == (8 * 34, 8 * 7, 8 * 3)
    assert list(one.buckets)[-2:] == ["16384.0", "+Inf"]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_generated_tokens_are_counted_at_every_step(lookahead: int) -> None:
    core = make_core(lookahead)
    core.add(request(9, [4, 4], 3))
    run(core)
    core.start_counting()  # as a server does after the token of its start
    core.add(request(0, [1, 2, 3], 20, stream=False))
    core.add(request(1, [3, 2, 1], 20))
    outputs = [core.run_step() for _ in range(6)]
    streamed = sum(int(output.counts.sum()) for output in outputs if output.keys.tolist() == [1])
    assert streamed == 6 - lookahead and not any(0 in output.keys for output in outputs)
    assert core.stats().generated_tokens == 2 * streamed, "also those that no output has"
    run(core)
    assert core.stats().generated_tokens == 40


def test_tokens_that_nobody_gets_are_not_counted() -> None:
    core = make_core(num_blocks=18)
    stop = expected([8, 8], 6)[-1]
    core.add(request(8, [8, 8], 30, (stop,)))
    for key in range(4):
        core.add(request(key, [key + 1, 2, 3], 25, stream=key % 2 == 0))
    got, stats = run(core), core.stats()
    assert stats.preemptions and stats.dropped_tokens, "tokens are sampled twice, and after the end"
    assert stats.generated_tokens == sum(map(len, got.tokens.values())) == 4 * 25 + len(expected([8, 8], 30, (stop,)))
    counters = {each.name: each.value for each in metrics.read_metrics(stats, {})}
    assert counters["kvasir:generation_tokens"] == stats.generated_tokens


@pytest.mark.parametrize(("windows", "shown"), [((None,), None), ((None, 8), None), ((8,), 8), ((8, 16), 16)])
def test_a_window_of_all_layers_is_shown(windows: tuple[int | None, ...], shown: int | None) -> None:
    stats = make_core(windows=windows).stats()
    assert stats.sliding_window == shown == metrics.sum_stats([stats, stats]).sliding_window
    (sample,) = cache_metric(fake_config(), [stats]).samples
    assert sample.labels["sliding_window"] == str(shown)


def test_decodes_continue_while_a_long_prompt_is_chunked() -> None:
    scheduler = make_scheduler(budget=8)
    scheduler.add(request(0, [1, 2, 3], 20))
    answer(scheduler, scheduler.schedule())
    scheduler.add(request(1, LONG, 4))
    plan = scheduler.schedule()
    assert plan.num_tokens.tolist() == [1, 7] and plan.num_decodes == 1
    assert plan.samples.tolist() == [True, False]
    assert scheduler.stats.partial_prefills == 1


def test_without_chunked_prefill_a_prompt_waits_for_a_step_with_room_for_all_of_it() -> None:
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
    assert core.scheduler.cache.stats.prefix_cache_hits == 28


def test_the_next_turn_of_a_chat_hits_generated_tokens() -> None:
    core = make_core()
    core.add(request(0, LONG, 8))
    first = run(core).tokens[0]
    core.add(request(1, LONG + first + [5], 2))
    assert run(core).cached[1] == 36  # 37 of the 38 tokens were computed: nine full blocks of four


def test_requests_admitted_in_one_step_share_a_prefix() -> None:
    core = make_core(budget=64)
    core.add(request(0, [*LONG, 1], 2))
    core.add(request(1, [*LONG, 2], 2))
    plan = core.scheduler.schedule()
    assert sorted(plan.num_tokens.tolist()) == [3, 31]
    core.executor.execute(plan)
    started = core.scheduler.update(core.executor.sample().result()).started
    assert [(start.key, start.num_cached_tokens) for start in started] == [(0, 0), (1, 28)]
    run(core)


def test_started_says_how_long_the_request_waited() -> None:
    core = make_core(lookahead=0, max_num_seqs=1)
    core.scheduler.context.clock = clock = Clock()
    clock.tick(core)
    core.add(request(0, [1, 2, 3], 4))
    core.add(request(1, [4, 5], 1))
    assert run(core).waited == {0: 0.0, 1: 4.0}


@pytest.mark.parametrize("stream", [True, False])
def test_finished_has_the_time_of_the_first_token_unless_tokens_are_streamed(stream: bool) -> None:
    core = make_core(lookahead=0, budget=4, max_num_seqs=2)
    core.scheduler.context.clock = clock = Clock()
    clock.tick(core)
    core.add(request(0, list(range(10)), 5, stream=stream))  # whose prompt takes three steps
    finished = []
    while core.has_work():
        finished += core.run_step().finished
    assert [end.first_token for end in finished] == [None if stream else 3.0]
    assert not core.scheduler._no_token_yet


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


def test_a_preempted_request_resumes_with_the_same_text() -> None:
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
    assert core.scheduler.cache.stats.shared_blocks == 8  # 31 tokens in blocks of four, the last one half full
    check_blocks(core)
    got = run(core)
    assert core.scheduler.cache.stats.copied_blocks == 1
    assert used <= 9, "the child took no blocks of its own until it wrote"
    assert got.tokens[1] == expected(prompt, 6)


def test_abort_of_a_waiting_and_of_a_running_request() -> None:
    core = make_core(max_num_seqs=1)
    core.add(request(0, LONG, 12))
    core.add(request(1, LONG, 12))
    core.run_step()
    assert core.abort(0) and core.abort(1)
    assert not core.abort(0), "it has been aborted already"
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


def test_a_request_that_ends_by_length_computes_no_extra_token() -> None:
    core = make_core()
    core.add(request(0, LONG, 5))
    run(core)
    assert core.scheduler.stats.dropped_tokens == 0
    assert core.scheduler.stats.scheduled_tokens == 34  # the KV of the last token is never computed


def test_a_request_that_can_never_fit_is_refused_with_numbers() -> None:
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


def test_reset_drops_prefixes_only_when_idle() -> None:
    core = make_core()
    core.add(request(0, LONG, 4))
    core.run_step()
    assert not core.reset_prefix_cache()
    run(core)
    assert core.reset_prefix_cache()
    core.add(request(1, LONG, 1))
    assert run(core).cached[1] == 0


def test_plan_has_the_prefix_groups_of_its_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_groups, "MIN_GROUP_ROWS", 3)
    monkeypatch.setattr("kvasir.engine.scheduler.MIN_GROUP_ROWS", 3)
    monkeypatch.setattr(prefix_groups, "is_worthwhile", lambda sequences, tokens: sequences >= 3 and tokens >= 4)
    scheduler = make_scheduler(budget=256, max_model_len=64)
    stem = LONG[:20]
    for key in range(3):
        scheduler.add(request(key, [*stem, 40 + key], 8))
    answer(scheduler, scheduler.schedule())
    assert shared_by(scheduler) == {20: [0, 1, 2]}
    scheduler.add(request(3, [9] * 10, 8))
    assert shared_by(scheduler) == {20: [0, 1, 2]}, "only decodes are grouped in a step that also has a prompt"
    assert shared_by(scheduler) == {20: [0, 1, 2]}, "the new request shares nothing"
    scheduler.abort(0)
    assert shared_by(scheduler) == {}, "two are too few"
    for key in range(4, 7):
        scheduler.add(request(key, [*stem[:8], *[50 + key] * 10], 8))
    scheduler.schedule()
    assert shared_by(scheduler) == {8: [1, 2, 4, 5, 6]}, "a larger group with a shorter prefix saves more"


def shared_by(scheduler: Scheduler) -> dict[int, list[int]]:
    """Return the keys of the next step's requests, by the number of tokens that they share."""
    plan = scheduler.schedule()
    if plan.shared is None:
        return {}
    lines = np.split(plan.shared.members, plan.shared.starts[1:-1])
    keys = scheduler.rows.key[plan.rows]
    return {int(n): sorted(keys[own].tolist()) for n, own in zip(plan.shared.tokens, lines, strict=True)}


def test_requests_that_sample_nothing_end_with_their_prompt() -> None:
    scheduler = make_scheduler(budget=16)
    scheduler.add(replace(request(0, LONG, 1), max_tokens=0))
    scheduler.add(request(1, [1, 2], 3))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert not first.samples.any(), "the first part of the prompt, and nothing else yet"
    assert second.num_tokens.tolist()[0] == 14 and second.samples.tolist() == [False, True]
    assert not answer(scheduler, first).finished
    output = answer(scheduler, second)
    assert [(end.key, end.reason) for end in output.finished] == [(0, FinishReason.STOP)]
    assert len(scheduler.rows) == 1, "the other goes on"


def test_a_model_without_a_cache_takes_no_blocks() -> None:
    scheduler = make_scheduler(budget=64, windows=(), num_blocks=2, caching=False, chunked=False)
    for key in range(3):
        scheduler.add(replace(request(key, LONG, 1), max_tokens=0))
    plan = scheduler.schedule()
    assert plan.num_tokens.tolist() == [30, 30] and not len(plan.table_index), "prompts are computed whole"
    assert [end.key for end in answer(scheduler, plan).finished] == [0, 1]
    assert scheduler.schedule().num_tokens.tolist() == [30]
    assert scheduler.cache.pool.num_used == 0


def test_a_request_that_samples_nothing_can_fail_alone() -> None:
    scheduler = make_scheduler(budget=64)
    for key in range(2):
        scheduler.add(replace(request(key, LONG[key:], 1), max_tokens=0))
    plan = scheduler.schedule()
    tokens = np.zeros((2, 1), np.int32)
    output = scheduler.update(StepResult(tokens, np.zeros(2, np.int32), failures={0: "broken"}))
    reasons = {end.key: (end.reason, end.error) for end in output.finished}
    assert len(plan.rows) == 2
    assert reasons == {0: (FinishReason.ERROR, "broken"), 1: (FinishReason.STOP, None)}
