"""Several engines behind one client: how requests are routed, and that outputs do not depend on it."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest

from kvasir import LLM, LLMEngine
from kvasir.entrypoints.async_llm import AsyncLLM
from kvasir.errors import ConfigError, EngineDeadError, RequestError
from kvasir.executor.fake import fake_config
from kvasir.frontend.clients.router import Router
from kvasir.frontend.clients.sync_clients import ProcessClient
from kvasir.messages import EngineRequest
from kvasir.sampling_params import BeamSearchParams
from tests.builders import VOCAB, expected
from tests.process_builders import (
    ECHO,
    engine,
    engine_pids,
    fails_to_start,
    gone,
    greedy,
    is_idle,
    last,
    run,
    slow,
    tokens,
    until,
)


def asked(key: int, *prompt: int, salt: bytes = b"", reads_cache: bool = True) -> EngineRequest:
    return EngineRequest(key, np.array(prompt, np.int32), 8, cache_salt=salt, reads_cache=reads_cache)


IDLE = [0, 0, 0]


def test_idle_engines_take_turns() -> None:
    router = Router(3, 4)
    found = []
    for key in range(6):
        found.append(router.route(asked(key, key, 1, 2), IDLE))
        router.remove(key)
    assert found == [0, 1, 2, 0, 1, 2]


def test_load_is_shared() -> None:
    router = Router(3, 4)
    found = [router.route(asked(key, key, *range(20)), IDLE) for key in range(9)]
    assert sorted(found) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert router.stats.requests == [3, 3, 3]
    first = found.index(1)
    router.remove(first)
    assert router.route(asked(100, 77), IDLE) == 1, "where one has ended there is room"


def test_a_prefix_goes_where_it_is_cached() -> None:
    router = Router(3, 4)
    system = list(range(100))
    home = router.route(asked(0, *system, 1), IDLE)
    router.remove(0)
    for key in range(1, 10):
        assert router.route(asked(key, *system, key + 7, 3), IDLE) == home
        router.remove(key)
    assert router.stats.prefix_tokens == 9 * 100 and router.stats.diverted == 0
    assert router.route(asked(11, *system, 5, salt=b"other"), IDLE) != home, "another salt shares nothing"
    router.remove(11)
    assert router.route(asked(12, *system, 5, reads_cache=False), IDLE) != home, "nor does who does not read the cache"


def test_load_outweighs_a_short_prefix() -> None:
    router = Router(2, 4)
    home = router.route(asked(0, *range(8), 1), [0, 0])
    for key in range(1, 4):
        router.route(asked(key, *range(8), 50 + key), [0, 0])
    assert router.stats.diverted > 0, "eight tokens are not worth a queue"
    assert 0 < router.stats.requests[home] < 4


def test_other_clients_requests_count_as_load() -> None:
    router = Router(2, 4)
    assert router.route(asked(0, 1, 2), [5, 0]) == 1
    assert router.route(asked(1, 1, 2), [5, 1]) == 1
    assert router.route(asked(2, 1, 2), [0, 9]) == 0


def test_two_engines_say_what_one_says() -> None:
    async def work(llm: AsyncLLM) -> None:
        prompts = [[i, i + 1, i + 2] for i in range(30)]
        found = await asyncio.gather(*(last(llm, tokens(*prompt), greedy(10)) for prompt in prompts))
        assert [output.outputs[0].token_ids for output in found] == [expected(prompt, 10) for prompt in prompts]
        steps = [stats.steps for stats in await llm.call_all("stats")]
        assert len(steps) == 2 and min(steps) > 0, "both engines ran"
        sent = [metric.value for metric in await llm.get_metrics() if metric.name == "kvasir:router_requests"]
        assert sum(sent) == 30 and min(sent) >= 10
        await until(lambda: is_idle(llm))
        other = await last(llm, tokens(3, 4, 5), greedy(10), data_parallel_rank=1)
        assert other.outputs[0].token_ids == expected([3, 4, 5], 10)
        with pytest.raises(RequestError, match="data_parallel_rank"):
            await last(llm, tokens(1), greedy(), data_parallel_rank=2)

    with engine(data_parallel_size=2, vocab_size=VOCAB) as llm:
        assert len(engine_pids(llm)) == 2
        run(work(llm))


def test_prefixes_are_found_again_in_the_engine_that_has_them() -> None:
    async def work(llm: AsyncLLM) -> None:
        systems = [[group + 2] * 48 for group in range(4)]
        for turn in range(3):
            for system in systems:
                await last(llm, tokens(*system, turn + 1, 9), greedy(2))
        stats = await llm.stats()
        assert stats.prefix_cache_hits == 2 * 4 * 48, "every prompt but the first of its kind found all it could"
        used = [each.prefix_cache_hits for each in await llm.call_all("stats")]
        assert used == [2 * 2 * 48] * 2, "and the prefixes are spread over both"

    with engine(data_parallel_size=2, max_num_seqs=4) as llm:
        run(work(llm))


def test_one_dead_engine_answers_all_callers() -> None:
    async def work(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(last(llm, tokens(i), greedy(1000))) for i in range(12)]
        await until(lambda: both_run(llm))
        os.kill(engine_pids(llm)[1], signal.SIGKILL)
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(error) for error in errors} == {EngineDeadError}

    with engine(slow(0.01), data_parallel_size=2, max_model_len=2048) as llm:
        pids = engine_pids(llm)
        run(work(llm))
    assert all(gone(pid) for pid in pids)


async def both_run(llm: AsyncLLM) -> bool:
    return all(stats.num_running > 0 for stats in await llm.call_all("stats"))


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="device"):
        AsyncLLM(fake_config(data_parallel_size=2, device="cuda:1"), ECHO)
    with pytest.raises(Exception, match="no such device"):
        AsyncLLM(fake_config(data_parallel_size=2), fails_to_start)


# ---------------------------------------------------------------- without an event loop


def process_engine(**settings: object) -> LLMEngine:
    client = ProcessClient(fake_config(vocab_size=VOCAB, **settings), ECHO)
    return LLMEngine(client.config, client)


@pytest.mark.parametrize("size", [1, 2])
def test_llm_engine_over_processes(size: int) -> None:
    with process_engine(data_parallel_size=size) as engine:
        for i in range(20):
            engine.add_request(str(i), tokens(i, 2), greedy(6))
        found = {}
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step() if output.finished}
        for i in range(20):
            assert found[str(i)].outputs[0].token_ids == expected([i, 2], 6)
        assert engine.client.call("has_work") is False
        assert engine.reset_prefix_cache() is True
        stats = engine.client.stats()
        assert stats.num_used_blocks == 0 and stats.steps > 0
        assert engine.get_metrics()
        assert engine.step() == []


def test_llm_engine_raises_what_the_core_refuses() -> None:
    with process_engine() as engine:
        engine.add_request("good", tokens(1), greedy(4))
        engine.add_request("bad", tokens(1), BeamSearchParams(beam_width=64, max_tokens=4).to_sampling_params())
        finished = []
        with pytest.raises(RequestError, match="beams"):
            while engine.has_unfinished_requests():
                finished += [output.request_id for output in engine.step() if output.finished]
        while engine.has_unfinished_requests():
            finished += [output.request_id for output in engine.step() if output.finished]
        assert finished == ["good"]


def test_llm_engine_tells_of_every_request_that_is_refused() -> None:
    search = BeamSearchParams(beam_width=64, max_tokens=4).to_sampling_params()
    with process_engine() as engine:
        engine.add_request("good", tokens(1), greedy(4))
        for name in ("a", "b", "aborted", "c"):
            engine.add_request(name, tokens(1), search)
        assert isinstance(engine.client, ProcessClient)
        while len(engine.client._refused) < 4:  # all at once
            engine.client._receive()
        engine.abort_request("aborted")
        finished, refused = [], []
        while engine.has_unfinished_requests():
            try:
                finished += [output.request_id for output in engine.step() if output.finished]
            except RequestError as error:
                refused.append(error.request_id)
        assert (finished, refused) == (["good"], ["a", "b", "c"])
        assert engine.step() == []


def test_llm_engine_whose_process_dies() -> None:
    with process_engine(max_model_len=4096) as engine:
        engine.add_request("a", tokens(1), greedy(4000))
        engine.step()
        assert isinstance(engine.client, ProcessClient)
        (connection,) = engine.client.engines.connections
        assert connection.process is not None
        connection.process.kill()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            while True:
                engine.step()
        assert not engine.has_unfinished_requests()
        with pytest.raises(EngineDeadError):
            engine.add_request("b", tokens(1), greedy())


def test_llm_takes_data_parallel_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way from LLM to engine processes, with a fake device at its end."""
    made, config = ProcessClient.__init__, fake_config(data_parallel_size=2)
    monkeypatch.setattr(ProcessClient, "__init__", lambda self, asked: made(self, config, ECHO))
    with LLM("fake", data_parallel_size=2) as llm:
        found = llm.generate([tokens(1, i) for i in range(8)], greedy(5), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in found] == [expected([1, i], 5) for i in range(8)]
        with pytest.raises(RequestError, match="prompt 1"):
            llm.generate([tokens(1), tokens(999)], greedy(5), use_tqdm=False)
