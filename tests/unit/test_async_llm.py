"""AsyncLLM over an engine process with a fake device: its outputs, and how they are split."""

from __future__ import annotations

import asyncio
import inspect
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest

from kvasir import AsyncEngineArgs, AsyncLLM, AsyncLLMEngine, EngineArgs
from kvasir.config.engine import all_settings
from kvasir.entrypoints.async_llm import merge
from kvasir.errors import ConfigError, EngineDeadError, OverloadedError, RequestError
from kvasir.executor.fake import fake_config
from kvasir.outputs import CompletionOutput, Logprob, RequestOutput
from kvasir.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from tests.builders import VOCAB, expected
from tests.conftest import ROOT
from tests.process_builders import (
    ECHO,
    deltas,
    engine,
    engine_pids,
    gone,
    greedy,
    is_idle,
    last,
    one_by_one,
    outputs,
    run,
    slow,
    tokens,
    until,
)


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    with engine(max_num_seqs=8, vocab_size=VOCAB, num_gpu_blocks_override=40) as llm:
        yield llm


def test_tokens_are_what_the_core_would_say(llm: AsyncLLM) -> None:
    async def work() -> None:
        prompts = [[i, i + 1, i + 2] for i in range(20)]
        found = await asyncio.gather(*(last(llm, tokens(*prompt), greedy(10)) for prompt in prompts))
        for prompt, output in zip(prompts, found, strict=True):
            assert output.finished and output.prompt_token_ids == prompt
            assert output.outputs[0].token_ids == expected(prompt, 10)
            assert output.outputs[0].finish_reason == "length"
        assert await is_idle(llm)

    run(work())


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_output_kinds(llm: AsyncLLM, kind: RequestOutputKind) -> None:
    async def work() -> None:
        found = await outputs(llm, tokens(3, 4), greedy(6, output_kind=kind))
        said = [output.outputs[0].token_ids for output in found]
        whole = expected([3, 4], 6)
        if kind is RequestOutputKind.DELTA:
            assert [token for some in said for token in some] == whole
        else:
            assert said[-1] == whole
        if kind is RequestOutputKind.FINAL_ONLY:
            assert len(found) == 1
        assert [output.finished for output in found] == [False] * (len(found) - 1) + [True]

    run(work())


def test_times_are_in_order_for_a_request_that_arrived_earlier(llm: AsyncLLM) -> None:
    """A server gives the arrival of the HTTP request; its body and its prompt took time since then."""

    async def work(kind: RequestOutputKind) -> None:
        arrived = time.time() - 5
        output = await last(llm, tokens(3, 4), greedy(6, output_kind=kind), arrival_time=arrived)
        times = output.metrics
        assert times is not None and times.arrival_time == pytest.approx(arrived, abs=0.5)
        assert times.first_scheduled_time is not None and times.first_token_time is not None
        assert arrived + 4 < times.first_scheduled_time <= times.first_token_time + 0.01
        assert times.last_token_time is not None and times.first_token_time <= times.last_token_time + 0.01

    for kind in RequestOutputKind:
        run(work(kind))


def test_tokens_stream_as_they_come(tmp_path: Path) -> None:
    """The device gives out a token when the reader has got the one before."""
    allowed = tmp_path / "allowed"
    allowed.write_text("x")

    async def work(llm: AsyncLLM) -> None:
        sizes = []
        async for output in llm.generate(tokens(1), deltas(5)):
            sizes.append(len(output.outputs[0].token_ids))
            allowed.write_text("x" * (len(sizes) + 1))
        assert sizes == [1] * 5, "every token comes by itself"

    with engine(partial(one_by_one, file=str(allowed))) as llm:
        run(work(llm))


def test_an_engine_that_is_quicker_than_its_client_does_not_keep_readers_waiting() -> None:
    """All tokens wait for a client that was elsewhere; its readers get them in many pieces all the same."""

    async def work(llm: AsyncLLM) -> None:
        readers = [asyncio.create_task(outputs(llm, tokens(i), deltas(300))) for i in range(32)]
        await asyncio.sleep(0)  # they have asked
        while llm._client.connections[0].progress.num_steps < 300:
            time.sleep(0.01)  # without a turn of the event loop
        for some in await asyncio.gather(*readers):
            assert sum(len(output.outputs[0].token_ids) for output in some) == 300
            assert len(some) > 20, "tokens came to the reader while others were on their way"

    with engine(slow(0.0), max_num_seqs=32, max_model_len=512) as llm:
        run(work(llm))


def test_a_slow_reader_gets_all_it_missed_at_once() -> None:
    async def work(llm: AsyncLLM) -> None:
        generator = llm.generate(tokens(1), deltas(40, logprobs=None), request_id="slow")
        first = await anext(generator)
        others = await asyncio.gather(*(last(llm, tokens(2), greedy(40)) for _ in range(3)))
        assert all(other.finished for other in others), "nobody waits for the slow one"
        rest = [output async for output in generator]
        assert len(rest) <= 2
        said = first.outputs[0].token_ids + [token for output in rest for token in output.outputs[0].token_ids]
        assert said == [7] * 40 and rest[-1].finished

    with engine(slow(0.002)) as llm:
        run(work(llm))


def test_merged_deltas_leave_nothing_out() -> None:
    said: dict[int, tuple[str, list[int], list[dict[int, Logprob]], str | None]] = {}
    first = [{7: Logprob(-1.0)}, None]
    deltas = [
        RequestOutput("r", None, [1], first, [CompletionOutput(1, "a", [1], None, [{1: Logprob(-0.1)}])], False),
        RequestOutput("r", None, [1], None, [CompletionOutput(0, "b", [2], None, [{2: Logprob(-0.2)}])], False),
        RequestOutput("r", None, [1], None, [CompletionOutput(1, "c", [3], None, [{3: Logprob(-0.3)}], "stop")], True),
    ]
    merged = reduce(merge, deltas)
    for each in merged.outputs:
        said[each.index] = each.text, each.token_ids, list(each.logprobs or []), each.finish_reason
    assert list(said) == [0, 1] and merged.finished and merged.prompt_logprobs is first
    assert said[0] == ("b", [2], [{2: Logprob(-0.2)}], None)
    assert said[1] == ("ac", [1, 3], [{1: Logprob(-0.1)}, {3: Logprob(-0.3)}], "stop")


def test_branches(llm: AsyncLLM) -> None:
    async def work() -> None:
        output = await last(llm, tokens(5, 6, 7), SamplingParams(n=3, max_tokens=4))
        assert [each.token_ids for each in output.outputs] == [expected([5, 6, 7], 4)] * 3
        assert await is_idle(llm)

    run(work())


def test_closing_a_generator_aborts_the_request() -> None:
    async def work(llm: AsyncLLM) -> None:
        generator = llm.generate(tokens(1), greedy(1000), request_id="a")
        await anext(generator)
        assert (await llm.stats()).num_running == 1
        await generator.aclose()
        await until(lambda: is_idle(llm))
        task = asyncio.create_task(last(llm, tokens(1), greedy(1000), request_id="a"))
        await until(lambda: _runs(llm, 1))
        task.cancel()
        await until(lambda: is_idle(llm))

    with engine(slow(0.005), max_model_len=2048) as llm:
        run(work(llm))


async def _runs(llm: AsyncLLM, count: int) -> bool:
    return (await llm.stats()).num_running == count


def test_abort_by_id_gives_a_last_output() -> None:
    async def work(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(last(llm, tokens(i), greedy(1000), request_id=f"r{i}")) for i in range(4)]
        await until(lambda: _runs(llm, 4))
        with pytest.raises(RequestError, match="in use"):
            await last(llm, tokens(1), greedy(), request_id="r1")
        await llm.abort("r0")
        await llm.abort(["r1", "r2", "nobody"])
        for task in tasks[:3]:
            output = await task
            assert output.finished and output.outputs[0].finish_reason == "abort"
        assert not tasks[3].done()
        await llm.abort("r3")
        await tasks[3]
        await until(lambda: is_idle(llm))

    with engine(slow(0.005), max_model_len=2048) as llm:
        run(work(llm))


def test_stop_strings_end_the_request_in_the_engine(starter_model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        said = (await last(llm, "Hello", greedy(40))).outputs[0].text
        stop = said[len(said) // 2 : len(said) // 2 + 3]
        output = await last(llm, "Hello", greedy(1000, stop=stop))
        assert output.outputs[0].finish_reason == "stop" and output.outputs[0].stop_reason == stop
        assert output.outputs[0].text == said[: said.index(stop)]
        await until(lambda: is_idle(llm))

    with engine(vocab_size=49152, max_model_len=2048, tokenizer=str(starter_model)) as llm:
        run(work(llm))


def test_what_the_core_refuses_is_raised_as_it_is(llm: AsyncLLM) -> None:
    async def work() -> None:
        with pytest.raises(RequestError, match="beams") as refused:
            await last(llm, tokens(1), BeamSearchParams(beam_width=64, max_tokens=4))
        assert refused.value.parameter == "beam_width"
        assert (await last(llm, tokens(1), greedy(3))).finished, "the engine goes on"
        assert await is_idle(llm) and len(llm.output_processor) == 0

    run(work())


@pytest.mark.skipif("max_queued_requests" not in all_settings(), reason="no queue limits in this tree")
def test_full_queues_and_deadlines_cross_the_boundary() -> None:
    async def work(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(last(llm, tokens(i), greedy(100))) for i in range(20)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [each for each in found if isinstance(each, OverloadedError)]
        assert refused and all(error.retry_after > 0 for error in refused)
        assert all(isinstance(each, OverloadedError | RequestOutput) for each in found)
        late = await last(llm, tokens(1), greedy(4000), timeout=0.3)
        assert late.outputs[0].finish_reason == "timeout" and "deadline" in str(late.outputs[0].stop_reason)
        await until(lambda: is_idle(llm))

    with engine(slow(0.005), max_model_len=4096, max_queued_requests=4, max_num_seqs=4) as llm:
        run(work(llm))


def test_wrong_requests(llm: AsyncLLM) -> None:
    def wrong(match: str, prompt: Any = None, params: Any = None, **rest: Any) -> None:
        with pytest.raises(RequestError, match=match):
            run(last(llm, prompt or tokens(1), params or greedy(), **rest))

    wrong("vocabulary", tokens(VOCAB + 5))
    wrong("tokenizer", "a text")
    wrong("another process.*module:name", None, greedy(logits_processors=[lambda ids, logits: logits]))
    wrong("extra_args", None, greedy(extra_args={"a": 1}))
    wrong("timeout", timeout=-1)
    wrong("weight", weight=0)
    wrong("priority", priority=1.5)
    wrong("tenant", tenant=7)
    wrong("lora_request", lora_request="an adapter")
    run(until(lambda: is_idle(llm)))


def test_names_of_vllm(llm: AsyncLLM) -> None:
    assert AsyncLLMEngine is AsyncLLM and AsyncEngineArgs is EngineArgs

    async def work() -> None:
        assert await llm.list_loras() == set() and not await llm.is_sleeping()
        await llm.do_log_stats()
        with pytest.raises(RequestError, match="tokenizer"):
            await llm.get_tokenizer()
        stream = await llm.add_request("by hand", tokens(9), greedy(4))
        assert [output async for output in stream][-1].outputs[0].token_ids == expected([9], 4)

    run(work())


def test_add_request_has_all_parameters_of_generate(llm: AsyncLLM) -> None:
    own, generate = (inspect.signature(each).parameters for each in (AsyncLLM.add_request, AsyncLLM.generate))
    assert own.keys() - {"params"} == generate.keys() - {"sampling_params"}

    async def work() -> None:
        stream = await llm.add_request(None, tokens(9), greedy(4), timeout=60, data_parallel_rank=0)
        assert stream.request_id and not stream.finished
        while (output := await stream.next()) is not None:
            last_output = output
        assert stream.finished and last_output.outputs[0].token_ids == expected([9], 4)
        for name, value in {"data_parallel_rank": 1, "timeout": -1, "weight": 0, "lora_request": "an adapter"}.items():
            with pytest.raises(RequestError, match=name):
                await llm.add_request("wrong", tokens(9), greedy(4), **{name: value})  # type: ignore[arg-type]
        stream = await llm.add_request("aborted", tokens(9), deltas(100))
        await llm.abort(stream.request_id)
        aborted = await stream.next()
        assert aborted is not None and aborted.outputs[0].finish_reason == "abort" and await stream.next() is None
        await until(lambda: is_idle(llm))

    run(work())


def test_calls_of_the_core(llm: AsyncLLM) -> None:
    async def work() -> None:
        assert await llm.call("has_work") is False
        assert await llm.reset_prefix_cache() is True
        for name in ("_failure", "nothing", "lookahead"):
            with pytest.raises(RequestError, match=name):
                await llm.call(name)
        with pytest.raises(Exception, match="abort"):
            await llm.call("abort", 1, 2, 3, 4)
        with pytest.raises(RequestError, match="engine=1"):
            await llm.call("stats", engine=1)
        names = {metric.name for metric in await llm.get_metrics()}
        assert {"kvasir:num_requests_running", "kvasir:generation_tokens"} <= names

    run(work())


def test_pause_and_resume() -> None:
    async def work(llm: AsyncLLM) -> None:
        running = asyncio.create_task(last(llm, tokens(1), greedy(1000)))
        await until(lambda: _runs(llm, 1))
        await llm.pause_generation()
        assert (await running).outputs[0].finish_reason == "abort" and await llm.is_paused()
        waiting = asyncio.create_task(last(llm, tokens(1), greedy(3)))
        for _ in range(5):
            assert (await llm.stats()).num_running == 0
        assert not waiting.done()
        await llm.resume_generation()
        assert (await waiting).outputs[0].finish_reason == "length" and not await llm.is_paused()
        finishing = asyncio.create_task(last(llm, tokens(1), greedy(500)))  # long enough to be seen running
        await until(lambda: _runs(llm, 1))
        await llm.pause_generation(mode="wait")
        assert (await finishing).outputs[0].finish_reason == "length"
        await llm.resume_generation()
        with pytest.raises(RequestError, match="keep"):
            await llm.pause_generation(mode="keep")

    with engine(slow(0.005), max_model_len=2048) as llm:
        run(work(llm))


@pytest.mark.parametrize("size", [1, 2])
def test_any_mix_of_readers_leaves_the_others_text_alone(size: int) -> None:
    """Quick, slow, final-only, branching, aborted and closed ones, in a cache so small that requests are preempted."""
    rng = random.Random(size)

    async def one(llm: AsyncLLM, number: int) -> None:
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
        count, way = rng.randrange(1, 30), rng.choice(["read", "slow", "final", "branches", "abort", "close"])
        await asyncio.sleep(rng.random() * 0.3)
        kind = RequestOutputKind.FINAL_ONLY if way == "final" else rng.choice(list(RequestOutputKind)[:2])
        params = SamplingParams(max_tokens=count, n=2 if way == "branches" else 1, output_kind=kind)
        said: dict[int, list[int]] = {}
        generator = llm.generate(tokens(*prompt), params, str(number))
        async for output in generator:
            for each in output.outputs:
                before = said.get(each.index, []) if kind is RequestOutputKind.DELTA else []
                said[each.index] = before + each.token_ids
            if way == "slow":
                await asyncio.sleep(0.01)
            elif way == "abort":
                await llm.abort(str(number))
            elif way == "close":
                break
        await generator.aclose()
        whole = expected(prompt, count)
        for text in said.values():
            assert text == whole[: len(text)], (number, way)
            assert len(text) == count or way in ("abort", "close"), (number, way)

    async def work(llm: AsyncLLM) -> None:
        await asyncio.gather(*(one(llm, number) for number in range(200)))
        await until(lambda: is_idle(llm))
        assert len(llm.output_processor) == 0 and not llm._streams and not llm._client.num_unfinished
        assert (await llm.stats()).preemptions > 0

    tight = {"block_size": 4, "num_gpu_blocks_override": 24, "max_num_batched_tokens": 24}
    with engine(vocab_size=VOCAB, data_parallel_size=size, **tight) as llm:
        run(work(llm))


def test_two_clients_share_an_engine() -> None:
    program = (
        "import asyncio, sys\n"
        "from tests.process_builders import *\n"
        "from kvasir.entrypoints.async_llm import AsyncLLM\n"
        "llm = AsyncLLM.attach(sys.argv[1])\n"
        "async def work():\n"
        "    output = await last(llm, tokens(1, 2, 3), greedy(6))\n"
        "    print(output.outputs[0].token_ids, flush=True)\n"
        "    await outputs(llm, tokens(1, 2, 3), greedy(100000))\n"
        "run(work())\n"
    )

    async def work(llm: AsyncLLM) -> None:
        other = subprocess.Popen([sys.executable, "-c", program, llm.address], cwd=ROOT, stdout=subprocess.PIPE)
        assert other.stdout is not None
        line = await asyncio.to_thread(other.stdout.readline)
        assert line.decode().strip() == str([7] * 6)
        await until(lambda: _runs(llm, 1))
        own = await asyncio.gather(*(last(llm, tokens(i), greedy(6)) for i in range(5)))
        assert [output.outputs[0].token_ids for output in own] == [[7] * 6] * 5
        assert await _runs(llm, 1), "the other's request goes on meanwhile"
        other.kill()
        other.wait()
        other.stdout.close()
        await until(lambda: is_idle(llm))

    with engine(slow(0.005), max_model_len=200_000, block_size=128) as llm:
        run(work(llm))


def test_an_attached_client_learns_that_the_engine_is_gone() -> None:
    with engine() as llm:
        other = AsyncLLM.attach(llm.address)
        assert "KV cache" in llm.startup_seconds == other.startup_seconds
        assert run(last(other, tokens(4), greedy(5))).outputs[0].token_ids == expected([4], 5)
        assert run(last(llm, tokens(4), greedy(5))).outputs[0].token_ids == expected([4], 5)
        address = llm.address
        llm.shutdown()
        with pytest.raises(EngineDeadError):
            run(last(other, tokens(4), greedy(5)))
        other.shutdown()
    assert not Path(address).exists(), "nothing is left in the file system"
    with pytest.raises(EngineDeadError, match="no engine"):
        AsyncLLM.attach(address)


def test_the_api_process_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "from tests.process_builders import *\n"
        "with engine() as llm:\n"
        "    run(last(llm, tokens(1), greedy(3)))\n"
        "    print(*[name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


def test_after_shutdown(llm: AsyncLLM) -> None:
    other = AsyncLLM(fake_config(), ECHO)
    pids = engine_pids(other)
    other.shutdown()
    other.shutdown()
    assert not other.is_running
    assert all(gone(pid) for pid in pids)
    with pytest.raises(EngineDeadError, match="shut down"):
        run(last(other, tokens(1), greedy()))
    with pytest.raises(EngineDeadError, match="shut down"):
        run(other.check_health())


def test_settings_that_cannot_be_sent() -> None:
    with pytest.raises(ConfigError, match="importable"):
        AsyncLLM(fake_config(), lambda config: None)
    with pytest.raises(ConfigError, match="module:name"):
        AsyncLLM(fake_config(), "kvasir.executor.fake:nothing")
    with pytest.raises(ConfigError, match="logits_processors"):
        AsyncLLM(fake_config(logits_processors=["nowhere:at_all"]), ECHO)
