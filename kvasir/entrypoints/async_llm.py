"""AsyncLLM: the engine in a process of its own, requests as async generators. What a server is built on.

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
from typing import Any, Self

from kvasir.config.args import EngineArgs
from kvasir.config.engine import EngineConfig
from kvasir.entrypoints.vllm_methods import NotYet
from kvasir.errors import ConfigError, EngineDeadError, KvasirError, RequestError
from kvasir.frontend.clients.async_client import AsyncClient
from kvasir.frontend.clients.engines import Engines
from kvasir.frontend.clients.launch import Executor
from kvasir.frontend.clients.streams import Stream
from kvasir.frontend.requests.choices import BeamState
from kvasir.frontend.requests.input import InputProcessor, default_sampling_params, make_terms, process_all
from kvasir.frontend.requests.metrics import Metric, read_metrics, sum_stats
from kvasir.frontend.requests.output import OutputProcessor
from kvasir.frontend.requests.prompts import PromptType, off_loop
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.frontend.text.tokenizer_files import tokenizer_of
from kvasir.log import get_logger
from kvasir.messages import EngineOutput, EngineStats, Terms
from kvasir.outputs import RequestOutput
from kvasir.sampling_params import BeamSearchParams, SamplingParams

logger = get_logger(__name__)
Params = SamplingParams | BeamSearchParams | None


class AsyncLLM(NotYet):
    """Belongs to one event loop at a time: the one it is first used in."""

    def __init__(self, config: EngineConfig, executor: Executor = None, *, engines: Engines | None = None) -> None:
        """`executor` makes what runs in place of the model: 'module:name' or a picklable callable, given the config."""
        engines = Engines.start(config, executor) if engines is None else engines
        try:
            self.config = engines.config
            self.tokenizer = tokenizer_of(self.config.model)
            self.input_processor = InputProcessor(self.config, self.tokenizer, remote=True)
            engines.wait()
        except BaseException:
            engines.close()
            raise
        self.output_processor = OutputProcessor(self.tokenizer)
        self._client = AsyncClient(engines, self)
        self._streams: dict[str, Stream] = {}
        self._ids = itertools.count()
        self._resumed: asyncio.Event | None = None  # there while generation is paused

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, start_engine_loop: bool = True) -> Self:
        """Start the engine and wait until it serves. What keeps it from that is raised as the engine's own error."""
        if not start_engine_loop:
            raise ConfigError("start_engine_loop=False is not possible: the engine's process runs from the start.")
        return cls(engine_args.create_engine_config())

    @classmethod
    def from_vllm_config(cls, vllm_config: EngineConfig) -> Self:
        return cls(vllm_config)

    @classmethod
    def attach(cls, address: str) -> Self:
        """A client of the engine that another process of this user owns; `address` is that one's."""
        engines = Engines.attach(address)
        return cls(engines.config, engines=engines)

    @property
    def startup_seconds(self) -> dict[str, float]:
        """How long each part of the engine's start took."""
        return self._client.engines.startup

    @property
    def address(self) -> str:
        """What another process attaches to."""
        return self._client.engines.directory

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
        data_parallel_rank: int | None = None,
        lora_request: None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come. Closing the generator aborts the request; `timeout` is in seconds from now."""
        if lora_request is not None:
            raise RequestError("lora_request is not supported yet; leave it out", "lora_request")
        policy = self.config.scheduler.scheduling_policy
        terms = make_terms(policy, priority=priority, tenant=tenant, weight=weight, timeout=timeout)
        stream = await self._start(prompt, sampling_params, request_id, terms, data_parallel_rank)
        try:
            while (output := await stream.next()) is not None:
                yield output
        finally:
            if not stream.finished:
                self._abort([stream.request_id])

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: Params = None,
        *,
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        timeout: float | None = None,
        data_parallel_rank: int | None = None,
    ) -> Stream:
        """The same in two parts, as in vLLM: the request is on its way when this returns; iterate over the result."""
        policy = self.config.scheduler.scheduling_policy
        terms = make_terms(policy, priority=priority, tenant=tenant, weight=weight, timeout=timeout)
        return await self._start(prompt, params, request_id, terms, data_parallel_rank)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their generators give out a last output with finish_reason "abort"."""
        self._abort([request_id] if isinstance(request_id, str) else list(request_id))

    async def _start(
        self, prompt: PromptType, params: Params, request_id: str | None, terms: Terms, engine: int | None
    ) -> Stream:
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str):
            (prompt,) = await off_loop(len(text), lambda: self.input_processor.prompts.tokenize([prompt]))
        while self._resumed is not None:
            await self._resumed.wait()
        return self._add(prompt, params, request_id, terms, engine)

    def _add(
        self, prompt: PromptType, params: Params, request_id: str | None, terms: Terms, engine: int | None
    ) -> Stream:
        self._client.enter()
        if params is None:
            params = default_sampling_params(self.config)
        elif isinstance(params, BeamSearchParams):
            params = params.to_sampling_params()
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        if name in self.output_processor:
            raise RequestError(f"request id {name!r} is in use by a request that still runs", "request_id")
        keys = self._client.engines.keys
        request, states = process_all(self.input_processor, name, prompt, params, keys, time.time(), terms)
        self._client.add(request, engine)
        if isinstance(states, BeamState):
            self.output_processor.add_search(states)
        else:
            self.output_processor.add(*states, num_returned=params.n)
        stream = self._streams[name] = Stream(name, params.output_kind)
        return stream

    def _abort(self, request_ids: list[str]) -> None:
        keys: list[tuple[int, int | None]] = []
        for some, output in self.output_processor.abort(request_ids, time.time()):
            keys += [(key, None) for key in some]
            self._put(output)
        self._client.abort(keys)

    # ------------------------------------------------------------ what the engine says

    def take(self, output: EngineOutput) -> None:
        outputs, stopped = self.output_processor.process(output, time.time())
        self._client.abort([(stop.key, stop.num_tokens_kept) for stop in stopped])
        for each in outputs:
            self._put(each)

    def _put(self, output: RequestOutput) -> None:
        stream = self._streams.pop(output.request_id) if output.finished else self._streams[output.request_id]
        stream.put(output)

    def refuse(self, key: int, error: KvasirError) -> None:
        request_id = self.output_processor.withdraw(key)
        if request_id is not None:
            self._streams.pop(request_id).fail(error)

    def die(self, error: KvasirError) -> None:
        self.output_processor.abort(self.output_processor.request_ids(), time.time())
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineDeadError(str(error)))
        self._resume()  # whoever waits for that is told too

    # ------------------------------------------------------------ how it is

    @property
    def is_running(self) -> bool:
        return not self._client.closed and self.dead_error is None

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def dead_error(self) -> KvasirError | None:
        return self._client.engines.dead

    async def check_health(self) -> None:
        """Raise EngineDeadError if an engine has ended, EngineError if one is stuck (stall_timeout)."""
        self._client.look_for_death()
        self._client.check_alive()
        self._client.engines.check_progress(self.config.scheduler.stall_timeout)

    async def call(self, name: str, *args: Any, engine: int = 0) -> Any:
        """Ask the core of an engine: its method of this name."""
        return await self._client.call(engine, name, *args)

    async def call_all(self, name: str, *args: Any) -> list[Any]:
        """The same question to the core of every engine."""
        calls = [self.call(name, *args, engine=index) for index in range(len(self._client.engines.links))]
        return list(await asyncio.gather(*calls))

    async def stats(self) -> EngineStats:
        """Of all engines together."""
        return sum_stats(await self.call_all("stats"))

    async def get_metrics(self) -> list[Metric]:
        own = self.output_processor.metrics.snapshot()
        return read_metrics(await self.stats(), own) + self._client.engines.router.metrics()

    async def do_log_stats(self) -> None:
        stats = await self.stats()
        logger.info(
            "%d requests run, %d wait; %.1f%% of the KV cache in use; %d of %d prompt tokens were cached",
            *(stats.num_running, stats.num_waiting, 100 * stats.num_used_blocks / stats.num_blocks),
            *(stats.prefix_cache_hits, stats.prefix_cache_queries),
        )

    # ------------------------------------------------------------ around it

    async def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """New requests wait for `resume_generation`; those that run are aborted, or finish first (mode "wait")."""
        if mode not in ("abort", "wait"):
            raise RequestError(f"mode={mode!r} is not possible; use 'abort' or 'wait'", "mode")
        if self._resumed is None:
            self._resumed = asyncio.Event()
        if mode == "abort" and not wait_for_inflight_requests:
            self._abort(list(self._streams))
        await asyncio.gather(*(stream.ended() for stream in self._streams.values()))
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
        """Forget cached prefixes. False, and an engine forgets nothing, while it runs requests."""
        return all(await self.call_all("reset_prefix_cache"))

    async def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer: it was made with skip_tokenizer_init=True")
        return self.tokenizer

    async def list_loras(self) -> set[int]:
        """vLLM's; there are none."""
        return set()

    async def is_sleeping(self) -> bool:
        """vLLM's; it never does."""
        return False

    def shutdown(self) -> None:
        """End the engine, if this process owns it. Requests that still run fail with EngineDeadError."""
        if not self._client.closed:
            self._client.close()


AsyncLLMEngine = AsyncLLM  # vLLM's name
