"""Beam searches among other requests: their beams' keys stay inside the core, and a fault in one ends only that one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvasir.engine.core import EngineCore
from kvasir.engine.policies import Context, FirstComeFirstServed
from kvasir.engine.request import Request
from kvasir.engine.request_groups import BeamGroups
from kvasir.messages import BeamSpec, EngineOutput, EngineRequest, FinishReason, SampleInputs, StepResult, Terms
from tests.builders import VOCAB, Clock, Collector, ScoringExecutor, check_blocks, expected, make_core, request, run

PLAIN = 3
SEARCH = 100


def make(policy: type[FirstComeFirstServed] = FirstComeFirstServed, **settings: Any) -> tuple[EngineCore, Clock]:
    clock = Clock()
    executor = ScoringExecutor(4, 8, 64, VOCAB)
    core = make_core(executor=executor, policy=policy(Context(clock=clock)), **settings)
    executor.allocate_kv(core.scheduler.cache.pool.num_blocks, 1)
    for key in range(PLAIN):
        core.add(request(key, [key + 1, 2, 3], 40))
    return core, clock


def search(width: int = 4, key: int = SEARCH, **fields: Any) -> EngineRequest:
    return EngineRequest(key, np.array([9, 8, 7], np.int32), 30, beam=BeamSpec(width), **fields)


def keys_in(output: EngineOutput) -> list[int]:
    found: list[int] = output.keys.tolist()
    return found + [each.key for group in (output.started, output.finished, output.beams) for each in group]


class Watch:
    """Runs a core, and checks every output for keys that no client has."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.seen = Collector()

    def steps(self, count: int = 10_000) -> None:
        while count and self.core.has_work():
            output = self.core.run_step()
            assert all(key >= 0 for key in keys_in(output)), "a private key left the core"
            self.seen.take(output)
            count -= 1
        assert count, "the engine does not finish"

    def finish(self) -> None:
        self.steps()
        check_blocks(self.core)
        for key in range(PLAIN):
            assert self.seen.tokens[key] == expected([key + 1, 2, 3], 40), "the others go on"


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("after", range(1, 8))
@pytest.mark.parametrize("how", ["deadline", "abort"])
def test_beams_of_an_ended_search_are_in_no_output(how: str, after: int, lookahead: int) -> None:
    core, clock = make(lookahead=lookahead)
    watch = Watch(core)
    for _ in range(2):
        watch.seen.take(core.run_step())
    core.add(search(terms=Terms(arrival=clock.now, deadline=clock.now + 1)))
    for _ in range(after):
        watch.seen.take(core.run_step())
    if how == "abort":
        core.abort(SEARCH)
    else:
        clock.now += 2
    watch.finish()
    assert watch.seen.reasons.get(SEARCH) == (FinishReason.TIMEOUT if how == "deadline" else None)


class HastyPolicy(FirstComeFirstServed):
    """Ends every waiting request with a deadline at once, beams included."""

    def find_unreachable(self) -> tuple[Request, str] | None:
        return next(((each, "hopeless") for each in self if each.spec.terms.deadline is not None), None)


def test_a_policy_that_ends_a_beam_ends_its_search() -> None:
    core, clock = make(HastyPolicy)
    core.add(search(terms=Terms(arrival=clock.now, deadline=clock.now + 100)))
    watch = Watch(core)
    watch.finish()
    assert watch.seen.reasons[SEARCH] is FinishReason.TIMEOUT and watch.seen.errors[SEARCH] == "hopeless"


def test_a_beam_that_fails_on_the_device_ends_its_search_with_an_error() -> None:
    core, _ = make()
    core.add(search(stream=False))
    sample = core.executor.sample

    def fails(inputs: SampleInputs | None = None) -> Any:
        ready: Any = sample(inputs)
        result: StepResult = ready.value
        plan = core.executor._plan  # type: ignore[attr-defined]
        beams = [line for line, row in enumerate(plan.rows.tolist()) if core.scheduler.rows.key[row] < 0]
        if len(beams) == 4 and plan.samples[beams].all():
            result.failures = dict.fromkeys(beams[1:3], "its logits are not numbers")
        return ready

    core.executor.sample = fails  # type: ignore[method-assign]
    watch = Watch(core)
    watch.finish()
    assert watch.seen.reasons[SEARCH] is FinishReason.ERROR
    assert watch.seen.errors[SEARCH] == "its logits are not numbers"


@pytest.mark.parametrize("part", ["_continue", "_result"])
def test_a_fault_in_one_search_ends_it_alone(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core, _ = make()
    original = getattr(BeamGroups, part)

    def breaks(groups: BeamGroups, group: Any, *rest: Any) -> Any:
        found = original(groups, group, *rest)
        if group.request.key == SEARCH:
            raise KeyError("a bug")
        return found

    monkeypatch.setattr(BeamGroups, part, breaks)
    core.add(search())
    core.add(search(2, key=SEARCH + 1))
    watch = Watch(core)
    done = []
    while core.has_work():
        output = core.run_step()
        done += [beam.key for beam in output.beams if beam.finished]
        watch.seen.take(output)
    watch.finish()
    assert watch.seen.reasons[SEARCH] is FinishReason.ERROR and "KeyError" in str(watch.seen.errors[SEARCH])
    assert done == [SEARCH + 1]
    assert f"key {SEARCH}" in caplog.text


def test_a_search_generates_a_token_per_beam_and_step() -> None:
    core, _ = make()
    run(core)
    before = core.stats().generated_tokens
    assert before == PLAIN * 40
    core.add(search(width=4))
    run(core)
    assert core.stats().generated_tokens - before == 4 * 30
