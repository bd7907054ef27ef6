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
from typing import Any, Self

from kvasir.config.args import EngineArgs
from kvasir.config.engine import EngineConfig
from kvasir.entrypoints.vllm_methods import MissingVllmMethods
from kvasir.errors import ConfigError, EngineDeadError, KvasirError, RequestError
from kvasir.frontend.clients.engine_client import EngineClient
from kvasir.frontend.clients.launch import ExecutorFactory
from kvasir.frontend.clients.stream import Stream
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
            self._client.wait_ready()
        except BaseException:
            self._client.close()
            raise
        self.output_processor = OutputProcessor(self.tokenizer)
        self._client.listener = self
        self._streams: dict[str, Stream] = {}
        self._ids = itertools.count()
        self._resumed: asyncio.Event | None = None  # set while generation is paused

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
        data_parallel_rank: int | None = None,
        lora_request: None = None,
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
            data_parallel_rank=data_parallel_rank,
            lora_request=lora_request,
        )
        try:
            while (output := await stream.next()) is not None:
                yield output
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
        data_parallel_rank: int | None = None,
        lora_request: None = None,
    ) -> Stream:
        """Send a request to the engine and return the stream of its outputs; a request_id of None gets a new one.

        `priority` (lower is scheduled first), `tenant` and its `weight` count for the scheduling policies that use
        them; a request that is not done after `timeout` seconds ends with finish_reason "timeout".
        """
        if lora_request is not None:
            raise RequestError("lora_request is not supported yet; leave it out", "lora_request")
        policy = self.config.scheduler.scheduling_policy
        terms = make_terms(policy, priority=priority, tenant=tenant, weight=weight, timeout=timeout)
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str):
            (prompt,) = await off_loop(len(text), lambda: self.input_processor.prompts.tokenize([prompt]))
        while self._resumed is not None:
            await self._resumed.wait()
        return self._add(prompt, params, request_id, terms, data_parallel_rank)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests. Each stream gets a last output with finish_reason "abort"; unknown ids are ignored."""
        self._abort([request_id] if isinstance(request_id, str) else list(request_id))

    def _add(
        self, prompt: PromptType, params: Params, request_id: str | None, terms: Terms, engine: int | None
    ) -> Stream:
        self._client.bind_event_loop()
        if params is None:
            params = default_sampling_params(self.config)
        elif isinstance(params, BeamSearchParams):
            params = params.to_sampling_params()
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        if name in self.output_processor:
            raise RequestError(f"request id {name!r} is in use by a request that still runs", "request_id")
        request, states = process_all(self.input_processor, name, prompt, params, self._client.keys, time.time(), terms)
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

    # ------------------------------------------------------------ EngineListener

    def on_output(self, output: EngineOutput) -> None:
        outputs, stopped = self.output_processor.process(output, time.time())
        if stopped:
            self._client.abort([(stop.key, stop.num_tokens_kept) for stop in stopped])
        for each in outputs:
            self._put(each)

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
        self._client.check_death()
        self._client.check_alive()
        self._client.check_progress(self.config.scheduler.stall_timeout)

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
        return read_metrics(await self.stats(), own) + self._client.router.metrics()

    async def do_log_stats(self) -> None:
        stats = await self.stats()
        logger.info(
            "%d running and %d waiting requests; %.1f%% of the KV cache in use; %d of %d prompt tokens were cached",
            *(stats.num_running, stats.num_waiting, 100 * stats.num_used_blocks / stats.num_blocks),
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
        """Exists for vLLM's callers; there are no adapters yet."""
        return set()

    async def is_sleeping(self) -> bool:
        """Exists for vLLM's callers; this engine has no sleep mode."""
        return False

    def shutdown(self) -> None:
        """End the engine, if this process owns it. Requests that still run fail with EngineDeadError."""
        self._client.close()


AsyncLLMEngine = AsyncLLM  # vLLM's name
