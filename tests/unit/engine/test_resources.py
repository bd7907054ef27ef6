"""Resources that requests need before they run, such as adapters: nobody runs without his own, nobody else waits for a
load, nobody starves. The fake device's keys depend on the resource in a row's slot, so a stale one changes the text."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvasir.engine.core import EngineCore
from kvasir.engine.resources import MOST_OVERTAKING
from kvasir.errors import RequestError
from kvasir.executor.fake import FAILS, EchoExecutor
from kvasir.messages import EngineRequest, FinishReason, Resource
from tests.builders import Collector, check_blocks, expected, make_core, request, run


def resource(number: int, source: str = "") -> Resource:
    return Resource(sha256(b"%d" % number).digest(), source)


def asking(key: int, number: int | None, prompt: list[int], max_tokens: int = 6, **fields: object) -> EngineRequest:
    """A request for a resource. Its salt is the resource's digest, as the API process makes it."""
    if number is None:
        return request(key, prompt, max_tokens, **fields)
    own = resource(number)
    return request(key, prompt, max_tokens, resource=own, cache_salt=own.digest, **fields)


def core_with(slots: int, load_steps: int = 0, lookahead: int = 1, **settings: object) -> EngineCore:
    core = make_core(lookahead, num_resources=slots, **settings)
    assert isinstance(core.executor, EchoExecutor)
    core.executor.load_steps = load_steps
    return core


@dataclass
class Arrival:
    number: int | None
    prompt: list[int]
    max_tokens: int
    abort_after: int | None
    num_forks: int
    steps_before: int


arrivals = st.builds(
    Arrival,
    number=st.none() | st.integers(0, 7),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
    max_tokens=st.integers(1, 10),
    abort_after=st.none() | st.integers(0, 6),
    num_forks=st.sampled_from([0, 0, 0, 2]),
    steps_before=st.integers(0, 3),
)


@given(
    st.lists(arrivals, min_size=1, max_size=24),
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(0, 1),
    st.integers(1, 6),
    st.integers(0, 30),
)
def test_every_text_is_that_of_its_own_resource(
    load: list[Arrival], slots: int, load_steps: int, lookahead: int, rows: int, spare: int
) -> None:
    core = core_with(
        slots, load_steps, lookahead, num_blocks=12 + spare, max_num_seqs=rows, budget=16, max_model_len=40
    )
    collector, aborted = Collector(), set()
    for key, arrival in enumerate(load):
        for _ in range(arrival.steps_before):
            collector.take(core.run_step())
        forks = tuple(
            asking(1000 * (key + 1) + i, arrival.number, arrival.prompt, arrival.max_tokens)
            for i in range(arrival.num_forks)
        )
        core.add(asking(key, arrival.number, arrival.prompt, arrival.max_tokens, forks=forks))
    steps = 0
    while core.has_work():
        collector.take(core.run_step())
        for key, arrival in enumerate(load):
            if arrival.abort_after == steps and core.abort(key):
                aborted.add(key)
        steps += 1
        assert steps < 5000, "the engine does not finish"
    event(f"evictions: {core.scheduler.resources.stats.resource_evictions > 0}")
    for key, arrival in enumerate(load):
        own = None if arrival.number is None else resource(arrival.number)
        text = expected(arrival.prompt, arrival.max_tokens, (), own)
        for each in (key, *(1000 * (key + 1) + i for i in range(arrival.num_forks))):
            found = collector.tokens.get(each, [])
            assert found == text[: len(found)]
            assert each in aborted or key in aborted or found == text
    check_blocks(core)
    assert not len(core.scheduler.resources) and not core.scheduler.resources.num_used


def test_others_run_while_one_waits_for_its_load() -> None:
    """The request that waits is first in the queue, and others are served meanwhile."""
    core = core_with(1, load_steps=20)
    core.add(asking(0, 1, [1, 2, 3], 4))
    for key in range(1, 4):
        core.add(asking(key, None, [key, 5], 6))
    ended: list[int] = []
    collector = Collector()
    while core.has_work():
        collector.take(core.run_step())
        ended += [key for key in collector.reasons if key not in ended]
    assert ended[-1] == 0 and collector.tokens[0] == expected([1, 2, 3], 4, (), resource(1))
    assert core.stats().resource_loads == 1


def test_a_slot_is_kept_until_another_resource_needs_it() -> None:
    core = core_with(2)
    for key, number in enumerate([1, 2, 1, 2, 3, 1, 2]):  # 3 takes the place of 1, 1 that of 2, and 2 that of 3
        core.add(asking(key, number, [4, 5]))
        run(core)
    stats = core.stats()
    assert (stats.resource_loads, stats.resource_evictions, stats.resource_hits) == (5, 3, 2)
    assert (stats.resource_slots, stats.resource_slots_used) == (2, 0)


def test_busy_resources_cannot_keep_all_slots_for_ever() -> None:
    """One slot, a stream of requests for its resource that never ends, and one for another."""
    core = core_with(1, max_num_seqs=4)
    collector, key = Collector(), 0
    core.add(asking(0, 1, [1], 8))
    core.add(asking(1, 2, [2], 2))
    while 1 not in collector.reasons:
        key += 1
        core.add(asking(1 + key, 1, [1], 8))
        collector.take(core.run_step())
        assert key < 50 * MOST_OVERTAKING, "the other resource starves"
    assert collector.tokens[1] == expected([2], 2, (), resource(2))
    for waiting in range(2, key + 2):
        core.abort(waiting)
    run(core)


def test_a_load_that_fails_ends_its_requests_alone() -> None:
    core = core_with(1)
    bad = Resource(b"bad", FAILS)
    core.add(asking(0, None, [7], 3))
    for key in (1, 2):
        core.add(request(key, [1, 2], 4, resource=bad, cache_salt=b"bad"))
    core.add(asking(3, 1, [5, 6], 4))
    collector = run(core)
    for key in (1, 2):
        assert collector.reasons[key] == FinishReason.ERROR and collector.errors[key] == "it fails"
    assert collector.tokens[0] == expected([7], 3) and collector.tokens[3] == expected([5, 6], 4, (), resource(1))


@pytest.mark.parametrize("stream", [False, True])
def test_a_load_that_fails_ends_forks_too(stream: bool) -> None:
    """They wait for the prompt of their parent, which is never computed."""
    core = core_with(1, load_steps=2)
    fields = {"resource": Resource(b"bad", FAILS), "cache_salt": b"bad", "stream": stream}
    forks = tuple(request(key, [1, 2], 4, **fields) for key in (2, 3))
    core.add(request(1, [1, 2], 4, forks=forks, **fields))
    core.add(asking(4, 1, [5, 6], 4))
    collector = run(core)
    for key in (1, 2, 3):
        assert collector.reasons[key] == FinishReason.ERROR and collector.errors[key] == "it fails"
        assert collector.tokens.get(key, []) == []
    assert collector.tokens[4] == expected([5, 6], 4, (), resource(1))
    assert not core.groups.keys and not core.scheduler.resources.num_used


@pytest.mark.parametrize("when", [0, 1, 3])
def test_an_abort_gives_the_slot_to_the_next(when: int) -> None:
    core = core_with(1, load_steps=2)
    core.add(asking(0, 1, [1], 30))
    core.add(asking(1, 2, [2], 3))
    collector = Collector()
    for _ in range(when):
        collector.take(core.run_step())
    assert core.abort(0) and core.stats().num_waiting == 1
    found = run(core)
    assert (collector.tokens.get(1, []) + found.tokens.get(1, [])) == expected([2], 3, (), resource(2))


def test_an_engine_without_slots_refuses() -> None:
    with pytest.raises(RequestError, match="enable_lora=True"):
        make_core().add(asking(0, 1, [1]))
