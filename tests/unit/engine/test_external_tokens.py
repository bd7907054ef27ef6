"""Requests with external tokens, and forks that wait for the prompt of another request."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir.engine.core import EngineCore
from kvasir.executor.fake import echo_next
from kvasir.messages import EngineRequest
from tests.builders import VOCAB, check_blocks, expected, make_core, request, run


def proposals(core: EngineCore, want: set[int]) -> dict[int, int]:
    """Step until each of these requests has proposed a token."""
    found: dict[int, int] = {}
    for _ in range(50):
        output = core.run_step()
        for key, tokens, count in zip(output.keys.tolist(), output.token_ids, output.counts.tolist(), strict=True):
            if key in want:
                assert count == 0, "a proposal is not a token of the request"
                found[key] = int(tokens[0])
        if found.keys() >= want:
            return found
    raise AssertionError("the requests wait for ever")


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_request_continues_with_external_tokens(lookahead: int) -> None:
    core = make_core(lookahead)
    core.add(request(1, [3, 4, 5], max_tokens=30, external_tokens=True, awaited=True))
    core.add(request(2, [9, 8], max_tokens=40))
    text = [3, 4, 5]
    for token in (7, 1, 1, 30, 2, 2, 41):
        assert proposals(core, {1}) == {1: echo_next(text, VOCAB)}
        core.scheduler.append(1, [token])
        text.append(token)
        check_blocks(core)
    core.abort(1)
    rest = run(core)
    assert 1 not in rest.tokens and 2 in rest.tokens


def test_it_waits_for_an_external_token_while_others_continue() -> None:
    core = make_core(1)
    core.add(request(1, [3, 4, 5], max_tokens=30, external_tokens=True, awaited=True))
    core.add(request(2, [9, 8], max_tokens=20))
    proposals(core, {1})
    steps = core.scheduler.stats.scheduled_tokens
    said: list[int] = []
    while len(core.scheduler) > 1:
        output = core.run_step()
        assert 1 not in output.keys.tolist()
        said += [int(tokens[0]) for key, tokens in zip(output.keys, output.token_ids, strict=True) if key == 2]
    assert said == expected([9, 8], 20)[-len(said) :]
    assert core.scheduler.stats.scheduled_tokens - steps <= 20
    core.abort(1)


def test_an_external_token_can_be_appended_to_a_preempted_request() -> None:
    core = make_core(1)
    core.add(request(1, [3, 4, 5], max_tokens=30, external_tokens=True, awaited=True))
    core.add(request(2, [7, 7], max_tokens=2, external_tokens=True, awaited=True))
    proposals(core, {1, 2})
    while core.results:
        core.scheduler.update(core.results.popleft().result())
    core.scheduler._preempt()  # the second, as it came last
    core.scheduler.append(2, [11])
    core.scheduler.append(1, [12])
    assert proposals(core, {1, 2}) == {1: echo_next([3, 4, 5, 12], VOCAB), 2: echo_next([7, 7, 11], VOCAB)}


def test_a_proposal_sampled_after_the_external_token_is_dropped() -> None:
    core = make_core(1)
    core.add(request(1, [3, 4, 5], max_tokens=30, external_tokens=True, awaited=True))
    core.add(request(2, [9], max_tokens=30))
    plan = core.scheduler.schedule()
    assert plan is not None
    core.executor.execute(plan)
    in_flight = core.executor.sample()
    core.scheduler.append(1, [20])  # the caller knows the proposal from an earlier run of the same step
    late = core.scheduler.update(in_flight.result())
    assert late.keys.tolist() == [2]
    assert proposals(core, {1}) == {1: echo_next([3, 4, 5, 20], VOCAB)}


def forked(key: int, prompt: list[int], forks: int, max_tokens: int = 6) -> EngineRequest:
    first = request(key, prompt, max_tokens)
    first.forks = tuple(request(key + 1 + i, prompt, max_tokens) for i in range(forks))
    return first


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("caching", [False, True])
def test_forks_share_the_prompt_under_any_load(lookahead: int, caching: bool) -> None:
    core = make_core(lookahead, caching=caching, budget=8)
    prompt = list(range(14))
    core.add(forked(10, prompt, 3))
    core.add(forked(20, prompt[:5], 3, max_tokens=1))
    done = run(core)
    assert all(done.tokens[key] == expected(prompt, 6) for key in range(10, 14))
    assert all(done.tokens[key] == expected(prompt[:5], 1) for key in range(20, 24))
    assert core.scheduler.cache.stats.shared_blocks == 3 * 4 + 3 * 1
    assert core.scheduler.cache.stats.copied_blocks > 0
    core.scheduler.cache.pool.check()
    assert core.scheduler.cache.pool.num_used == 0 and not core.groups.keys


def test_forks_of_an_aborted_parent_run_as_requests_of_their_own() -> None:
    core = make_core(1, budget=4)
    core.add(forked(10, list(range(14)), 2))
    core.run_step()
    assert core.abort(12), "a fork that has not started can be aborted"
    assert core.abort(10)
    done = run(core)
    assert done.tokens.keys() == {11} and done.tokens[11] == expected(list(range(14)), 6)
    assert np.flatnonzero(core.scheduler.cache.pool.ref_counts).tolist() == []
