"""AsyncLLM: runs the engine in its own process and streams outputs in an event loop. The server is built on it.

from kvasir import AsyncLLM, EngineArgs, SamplingParams

llm = AsyncLLM.from_engine_args(EngineArgs("path/to/model"))
async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Self, cast

from kvasir.config.args import EngineArgs
from kvasir.config.engine import EngineConfig
from kvasir.engine.stats import EngineStats
from kvasir.entrypoints import MissingVllmMethods
from kvasir.errors import ConfigError, EngineDeadError, KvasirError, RequestError
from kvasir.frontend.clients.engine_client import EngineClient
from kvasir.frontend.clients.launch import ExecutorFactory
from kvasir.frontend.requests.choices import BeamState
from kvasir.frontend.requests.input import InputProcessor, default_sampling_params, make_terms, process_all
from kvasir.frontend.requests.metrics import Metric, read_metrics, sum_stats
from kvasir.frontend.requests.output import OutputProcessor
from kvasir.frontend.requests.pooling import PoolingParams
from kvasir.frontend.requests.prompts import PromptType, TextPool
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.frontend.text.tokenizer_files import tokenizer_of
from kvasir.log import get_logger
from kvasir.lora.host import Adapter, AdapterCatalog, LoRARequest
from kvasir.messages import EngineOutput, FinishReason, Terms
from kvasir.outputs import PoolingRequestOutput, RequestOutput
from kvasir.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

logger = get_logger(__name__)
Params = SamplingParams | BeamSearchParams | PoolingParams | None
# Seconds after a deadline in which the engine, which knows all tokens, may end the request itself.
_DEADLINE_GRACE = 0.5


class AsyncLLM(MissingVllmMethods):
    """Belongs to one event loop at a time: the one it is first used in."""

    def __init__(
        self, config: EngineConfig, executor: ExecutorFactory = None, *, client: EngineClient | None = None
    ) -> None:
        """`executor` replaces the model: a 'module:name' or picklable callable that makes an executor from the config.

        `client` is one that was started or attached before; the engine of `config` is started otherwise.
        """
        self._client = client or EngineClient.start(config, executor)
        try:
            self.config = self._client.config
            self.tokenizer = tokenizer_of(self.config.model)
            self.input_processor = InputProcessor(self.config, self.tokenizer, remote=True)
            if self.tokenizer is not None:
                self.tokenizer.prepare_limits()  # while the model is being loaded
                self.input_processor.structured.prepare()
            self._client.wait_ready()
        except BaseException:
            self._client.close()
            raise
        self.output_processor = OutputProcessor(self.tokenizer)
        self.text_pool = TextPool(self.config.model.max_model_len)
        self._client.listener = self
        self._streams: dict[str, Stream] = {}
        self._ids = itertools.count()
        self._resumed: asyncio.Event | None = None  # set while generation is paused
        self._adapters: AdapterCatalog | None = None  # made when the first is asked for

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, start_engine_loop: bool = True) -> Self:
        """Start the engine and wait until it is ready. If it cannot start, this raises the engine's own error."""
        if not start_engine_loop:
            raise ConfigError("start_engine_loop=False is not possible: the engine's process runs from the start.")
        return cls(engine_args.create_engine_config())

    @classmethod
    def from_vllm_config(cls, vllm_config: EngineConfig) -> Self:
        return cls(vllm_config)

    @classmethod
    def attach(cls, address: str) -> Self:
        """Use the engine that another process of this user owns; `address` is the other AsyncLLM's."""
        client = EngineClient.attach(address)
        return cls(client.config, client=client)

    @property
    def startup_seconds(self) -> dict[str, float]:
        """How long each phase of the engine's start took."""
        return self._client.startup_seconds

    @property
    def address(self) -> str:
        """The directory of the engine's sockets, for `attach` in another process."""
        return self._client.directory

    # ------------------------------------------------------------ requests

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: Params = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        timeout: float | None = None,
        arrival_time: float | None = None,
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | Adapter | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Add a request and yield its outputs as they come. Closing the generator aborts the request."""
        stream = await self.add_request(
            request_id,
            prompt,
            sampling_params,
            priority=priority,
            tenant=tenant,
            weight=weight,
            timeout=timeout,
            arrival_time=arrival_time,
            data_parallel_rank=data_parallel_rank,
            lora_request=lora_request,
        )
        try:
            while (output := await stream.next()) is not None:
                yield output
        finally:
            if not stream.finished:
                self._abort([stream.request_id])

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        timeout: float | None = None,
        arrival_time: float | None = None,
        lora_request: None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Add a request to a pooling model and yield its one output. Closing the generator aborts the request."""
        stream = await self.add_request(
            request_id,
            prompt,
            pooling_params or PoolingParams(),
            priority=priority,
            tenant=tenant,
            weight=weight,
            timeout=timeout,
            arrival_time=arrival_time,
            lora_request=lora_request,
        )
        try:
            while (output := await stream.next()) is not None:
                yield cast(Any, output)
        finally:
            if not stream.finished:
                self._abort([stream.request_id])

    async def add_request(
        self,
        request_id: str | None,
        prompt: PromptType,
        params: Params = None,
        *,
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        timeout: float | None = None,
        arrival_time: float | None = None,
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | Adapter | None = None,
    ) -> Stream:
        """Send a request to the engine and return the stream of its outputs; a request_id of None gets a new one.

        `priority` (lower is scheduled first), `tenant` and its `weight` count for the scheduling policies that use
        them; a request that is not done `timeout` seconds after `arrival_time` (of time.time; None: now) ends with
        finish_reason "timeout".
        """
        adapter = lora_request
        if adapter is not None and not isinstance(adapter, Adapter):
            adapter = await asyncio.to_thread((await self.adapters()).find, adapter)
        policy = self.config.scheduler.scheduling_policy
        times: dict[str, float | None] = {"arrival_time": arrival_time, "timeout": timeout}
        terms = make_terms(policy, priority=priority, tenant=tenant, weight=weight, **times)
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str) and not isinstance(params, PoolingParams):
            (prompt,) = await self.text_pool.run(len(text), lambda: self.input_processor.prompts.tokenize([prompt]))
        elif isinstance(text, str) and isinstance(params, PoolingParams):
            pooling = self.input_processor.pooling
            (prompt,) = await self.text_pool.run(len(text), lambda: pooling.tokenize([prompt], params))
        structured = params.structured_outputs if isinstance(params, SamplingParams) else None
        if structured is not None:  # `_add` finds the grammar compiled
            await asyncio.to_thread(self.input_processor.structured.check, structured)
        while self._resumed is not None:
            await self._resumed.wait()
        return self._add(prompt, params, request_id, terms, data_parallel_rank, adapter)

    async def adapters(self) -> AdapterCatalog:
        """The adapters that this process has read."""
        if self._adapters is None:
            self._adapters = AdapterCatalog(self.config, await self.call("resource_targets"))
        return self._adapters

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests. Each stream gets a last output with finish_reason "abort"; unknown ids are ignored."""
        self._abort([request_id] if isinstance(request_id, str) else list(request_id))

    def _add(
        self,
        prompt: PromptType,
        params: Params,
        request_id: str | None,
        terms: Terms,
        engine: int | None,
        adapter: Adapter | None = None,
    ) -> Stream:
        self._client.bind_event_loop()
        if params is None:
            params = default_sampling_params(self.config)
        elif isinstance(params, BeamSearchParams):
            params = params.to_sampling_params()
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        if name in self.output_processor:
            raise RequestError(f"request id {name!r} is in use by a request that still runs", "request_id")
        keys, arrived = self._client.keys, time.time() - (time.monotonic() - terms.arrival)
        request, states = process_all(self.input_processor, name, prompt, params, keys, arrived, terms, adapter)
        self._client.add(request, engine)
        if isinstance(states, BeamState):
            self.output_processor.add_search(states)
        else:
            self.output_processor.add(*states, num_returned=1 if isinstance(params, PoolingParams) else params.n)
        stream = self._streams[name] = Stream(name, params.output_kind)
        if terms.deadline is not None:
            left = max(0.0, terms.deadline - time.monotonic()) + _DEADLINE_GRACE
            stream.timer = asyncio.get_running_loop().call_later(left, self._expire, stream)
        return stream

    def _expire(self, stream: Stream) -> None:
        """End a request whose deadline has passed. The engine does that, unless it hangs or is late."""
        if not stream.finished:
            self._abort([stream.request_id], FinishReason.TIMEOUT)

    def _abort(self, request_ids: list[str], reason: FinishReason = FinishReason.ABORT) -> None:
        keys: list[tuple[int, int | None]] = []
        for some, output in self.output_processor.abort(request_ids, time.time(), reason):
            keys += [(key, None) for key in some]
            self._put(output)
        self._client.abort(keys)
        self._end_broken()

    # ------------------------------------------------------------ EngineListener

    def on_output(self, output: EngineOutput) -> None:
        outputs, stopped = self.output_processor.process(output, time.time())
        if stopped:
            self._client.abort([(stop.key, stop.num_tokens_kept) for stop in stopped])
        for each in outputs:
            self._put(each)
        self._end_broken()

    def _end_broken(self) -> None:
        """End the requests whose outputs could not be handled."""
        for broken in self.output_processor.take_broken():
            self._client.abort([(key, None) for key in broken.keys])
            if (stream := self._streams.pop(broken.request_id, None)) is not None:
                stream.fail(broken.error)

    def _put(self, output: RequestOutput) -> None:
        stream = self._streams.pop(output.request_id) if output.finished else self._streams[output.request_id]
        stream.put(output)

    def on_refusal(self, key: int, error: KvasirError) -> None:
        request_id = self.output_processor.withdraw(key)
        if request_id is not None:
            self._streams.pop(request_id).fail(error)

    def on_death(self, error: KvasirError) -> None:
        self.output_processor.abort(self.output_processor.request_ids(), time.time())
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineDeadError(str(error)))
        self._resume()  # requests that wait for it fail too

    # ------------------------------------------------------------ health and statistics

    @property
    def is_running(self) -> bool:
        return not self._client.closed and self.dead_error is None

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def dead_error(self) -> KvasirError | None:
        return self._client.dead

    async def check_health(self) -> None:
        """Raise EngineDeadError if an engine has ended, EngineError if one is stuck (stall_timeout)."""
        self.check_stall(self.config.scheduler.stall_timeout, "stall_timeout")
        self.ping()

    def check_stall(self, limit: float, setting: str) -> None:
        """Raise as `check_health` does, with `limit` in place of stall_timeout; `setting` is the limit's name."""
        self._client.check_death()
        self._client.check_alive()
        self._client.check_progress(limit, setting)

    def ping(self) -> None:
        """Ask all engines for a sign of life, by which `check_health` finds one that hangs while it has no requests."""
        self._client.ping()

    @property
    def seconds_unanswered(self) -> float:
        """Seconds for which an engine has owed the answer to a ping."""
        return self._client.seconds_unanswered

    async def call(self, name: str, *args: Any, engine: int = 0) -> Any:
        """Call a method of one engine's core and return its result."""
        return await self._client.call(engine, name, *args)

    async def call_all(self, name: str, *args: Any) -> list[Any]:
        """Call a method of every engine's core and return the results in order."""
        calls = [self.call(name, *args, engine=index) for index in range(len(self._client.connections))]
        return list(await asyncio.gather(*calls))

    async def stats(self) -> EngineStats:
        """Statistics of all engines together."""
        return sum_stats(await self.call_all("stats"))

    async def get_metrics(self) -> list[Metric]:
        own = self.output_processor.metrics.snapshot()
        router = self._client.router
        return read_metrics(await self.stats(), own) + ([] if router is None else router.metrics())

    async def do_log_stats(self) -> None:
        stats = await self.stats()
        logger.info(
            "%d running and %d waiting requests; %.1f%% of the KV cache in use; %d of %d prompt tokens were cached",
            *(stats.num_running, stats.num_waiting, 100 * stats.num_used_blocks / max(1, stats.num_blocks)),
            *(stats.prefix_cache_hits, stats.prefix_cache_queries),
        )

    # ------------------------------------------------------------ control

    async def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Hold new requests until `resume_generation`. Running ones are aborted, or finish first with mode "wait"."""
        if mode not in ("abort", "wait"):
            raise RequestError(f"mode={mode!r} is not possible; use 'abort' or 'wait'", "mode")
        if self._resumed is None:
            self._resumed = asyncio.Event()
        if mode == "abort" and not wait_for_inflight_requests:
            self._abort(list(self._streams))
        await asyncio.gather(*(stream.wait_finished() for stream in self._streams.values()))
        if clear_cache and self._resumed is not None:
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        self._resume()

    def _resume(self) -> None:
        waiting, self._resumed = self._resumed, None
        if waiting is not None:
            waiting.set()

    async def is_paused(self) -> bool:
        return self._resumed is not None

    async def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache. An engine that has running requests keeps its cache; then this returns False."""
        return all(await self.call_all("reset_prefix_cache"))

    async def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer, because it was made with skip_tokenizer_init=True")
        return self.tokenizer

    async def list_loras(self) -> set[int]:
        """The lora_int_id of all adapters that requests of this process have used."""
        return set() if self._adapters is None else set(self._adapters.used_ids)

    async def is_sleeping(self) -> bool:
        """Exists for vLLM's callers; this engine has no sleep mode."""
        return False

    def shutdown(self) -> None:
        """End the engine, if this process owns it. Requests that still run fail with EngineDeadError."""
        self._client.close()


AsyncLLMEngine = AsyncLLM  # vLLM's name


# ---------------------------------------------------------------- streams


class Stream:
    """The outputs of one request on their way to its reader, in one event loop.

    The engine never waits for a reader: a slow one finds the outputs that it missed merged into one.
    """

    def __init__(self, request_id: str, kind: RequestOutputKind) -> None:
        self.request_id = request_id
        self.finished = False  # the last output, or the error, has arrived
        self._merges = kind is RequestOutputKind.DELTA
        self._pending: RequestOutput | None = None
        self._error: BaseException | None = None
        self.timer: asyncio.TimerHandle | None = None  # ends the request after its deadline
        self._reader: asyncio.Future[None] | None = None  # set while a task waits in `next`
        self._end: asyncio.Future[None] | None = None  # set while tasks wait in `wait_finished`

    def put(self, output: RequestOutput) -> None:
        if self.finished:
            return
        if self._pending is not None and self._merges:
            output = merge(self._pending, output)
        self._pending = output
        self.finished = output.finished
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error. Its reader first gets the outputs that came before."""
        if not self.finished:
            self._error, self.finished = error, True
            self._wake()

    async def next(self) -> RequestOutput | None:
        """The next output; None after the last one."""
        while self._pending is None:
            if self._error is not None:
                raise self._error
            if self.finished:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        output, self._pending = self._pending, None
        return output

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        output = await self.next()
        if output is None:
            raise StopAsyncIteration
        return output

    async def wait_finished(self) -> None:
        """Wait until the last output has arrived, whether or not anything reads it."""
        if not self.finished:
            self._end = self._end or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._end)

    def _wake(self) -> None:
        if self.finished and self.timer is not None:
            self.timer.cancel()
        if self.finished and self._end is not None and not self._end.done():
            self._end.set_result(None)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def merge(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    """Merge a delta into the next one of its request."""
    completions = {each.index: each for each in older.outputs}
    for each in newer.outputs:
        if (before := completions.get(each.index)) is not None:
            each.text, each.token_ids = before.text + each.text, before.token_ids + each.token_ids
            if before.logprobs is not None and each.logprobs is not None:
                each.logprobs = before.logprobs + each.logprobs  # type: ignore[operator]
        completions[each.index] = each
    newer.outputs = [completions[index] for index in sorted(completions)]
    if newer.prompt_logprobs is None:
        newer.prompt_logprobs = older.prompt_logprobs
    return newer
