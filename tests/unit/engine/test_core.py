"""The loop: it runs ahead of the device, and a device that fails stops it cleanly."""

from __future__ import annotations

import pytest

from kvasir.errors import EngineDeadError, EngineError
from kvasir.executor.fake import DelayExecutor
from tests.builders import expected, make_core, request, run


def launched_before_done(lookahead: int) -> list[bool]:
    """For each step but the first: was it launched while the step before was still running?"""
    executor = DelayExecutor(block_size=4, delay=0.02)
    core = make_core(lookahead, executor)
    core.add(request(0, [1, 2, 3], 6))
    run(core)
    times = {(event, step): at for event, step, at in executor.log}
    return [times["execute", step] < times["done", step - 1] for step in range(2, 7)]


def test_next_step_is_scheduled_before_the_result_of_this_one() -> None:
    assert launched_before_done(lookahead=1) == [True] * 5


def test_without_lookahead_every_step_waits() -> None:
    assert launched_before_done(lookahead=0) == [False] * 5


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_lookahead_does_not_change_the_text(lookahead: int) -> None:
    core = make_core(lookahead, budget=16)
    prompts = {key: [key, 1, 2] * (key + 1) for key in range(6)}
    for key, prompt in prompts.items():
        core.add(request(key, prompt, 10, stop=(3,)))
    got = run(core)
    assert got.tokens == {key: expected(prompt, 10, (3,)) for key, prompt in prompts.items()}


def test_failing_device_kills_the_engine_with_its_cause() -> None:
    class Broken(DelayExecutor):
        def execute(self, plan) -> None:  # type: ignore[no-untyped-def]
            raise RuntimeError("the device fell off the bus")

    core = make_core(executor=Broken(block_size=4))
    core.add(request(0, [1], 1))
    with pytest.raises(EngineError, match="fell off the bus"):
        core.run_step()
    with pytest.raises(EngineDeadError, match="fell off the bus"):
        core.run_step()
