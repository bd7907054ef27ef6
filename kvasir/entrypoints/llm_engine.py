"""LLMEngine: the caller adds requests, drives the steps and gets outputs. LLM is built on it. Caller's process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from functools import cached_property
from itertools import count
from types import TracebackType
from typing import Self

from kvasir.config import startup
from kvasir.config.args import EngineArgs
from kvasir.config.engine import EngineConfig
from kvasir.config.resolve import resolve
from kvasir.entrypoints import MissingVllmMethods
from kvasir.errors import EngineDeadError, EngineError, KvasirError, RequestError
from kvasir.frontend.clients.sync_clients import InprocClient, ProcessClient, SyncClient
from kvasir.frontend.requests.choices import BeamState
from kvasir.frontend.requests.input import InputProcessor, make_terms, process_all
from kvasir.frontend.requests.metrics import Metric, read_metrics
from kvasir.frontend.requests.output import BrokenRequest, OutputProcessor
from kvasir.frontend.requests.pooling import PoolingParams
from kvasir.frontend.requests.prompts import PromptType
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.frontend.text.tokenizer_files import tokenizer_of
from kvasir.lora.host import AdapterCatalog, LoRARequest
from kvasir.outputs import RequestOutput
from kvasir.sampling_params import SamplingParams


class LLMEngine(MissingVllmMethods):
    def __init__(self, config: EngineConfig, client: SyncClient | None = None) -> None:
        self.config = config
        several = config.parallel.data_parallel_size > 1  # then each engine is a process
        # Before the engine, so that a wrong tokenizer is reported before the weights are loaded.
        with startup.phase(startup.TOKENIZER):
            self.tokenizer = tokenizer_of(config.model)
        self.input_processor = InputProcessor(config, self.tokenizer, several if client is None else client.remote)
        self.output_processor = OutputProcessor(self.tokenizer)
        self._keys = count()
        self._broken: deque[BrokenRequest] = deque()  # not raised to the caller yet, as below
        self._refused: deque[tuple[int, KvasirError]] = deque()  # not raised to the caller yet
        self._client: SyncClient | None = client or (ProcessClient if several else InprocClient)(config)
        try:
            self._client.wait_ready()
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """The engine runs in this process; with data parallelism each copy of the model runs in its own."""
        if engine_args.data_parallel_size == 1:
            return cls(resolve(engine_args))
        client = ProcessClient(engine_args.create_engine_config())  # each process resolves the settings
        try:
            return cls(client.config, client)
        except BaseException:
            client.close()
            raise

    @cached_property
    def adapters(self) -> AdapterCatalog:
        return AdapterCatalog(self.config, self.client.call("resource_targets"))

    @property
    def client(self) -> SyncClient:
        if self._client is None:
            raise EngineDeadError("this engine was closed")
        return self._client

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        timeout: float | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Validate and queue a request. A wrong request raises RequestError and changes nothing.

        `priority` (lower is scheduled first), `tenant` and its `weight` count for the scheduling policies that use
        them; a request that is not done `timeout` seconds after its arrival ends with finish_reason "timeout".
        """
        if request_id in self.output_processor:
            raise RequestError(f"request id {request_id!r} is in use by a request that still runs", "request_id")
        arrived = time.time() if arrival_time is None else arrival_time
        policy = self.config.scheduler.scheduling_policy
        terms = make_terms(
            policy, arrival_time=arrived, priority=priority, tenant=tenant, weight=weight, timeout=timeout
        )
        adapter = None if lora_request is None else self.adapters.find(lora_request)
        request, states = process_all(
            self.input_processor, request_id, prompt, params, self._keys, arrived, terms, adapter
        )
        self.client.add(request)
        if isinstance(states, BeamState):
            self.output_processor.add_search(states)
        else:
            self.output_processor.add(*states, num_returned=1 if isinstance(params, PoolingParams) else params.n)

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns new outputs of streaming requests, and last outputs of requests that ended.

        If the core is in another process, this also raises its refusal of a request that was added before; the error's
        `request_id` names the request, and all others continue.
        """
        self._raise_refused()
        if not self.client.has_work():
            return []
        try:
            output = self.client.step()
        except EngineError:
            self.abort_request(self.output_processor.request_ids())  # they will get no further output
            raise
        outputs, stopped = self.output_processor.process(output, time.time())
        for stop in stopped:
            self.client.abort(stop.key, stop.num_tokens_kept)
        for broken in self.output_processor.take_broken():
            for key in broken.keys:
                self.client.abort(key)
            self._broken.append(broken)
        return outputs

    def _raise_refused(self) -> None:
        """Raise the next error of a single request: an output that could not be handled, or the refusal of a core in
        another process, which arrives after `add_request` has returned."""
        if self._broken:
            broken = self._broken.popleft()
            broken.error.request_id = broken.request_id
            broken.error.add_note(f"The request is {broken.request_id!r}.")
            raise broken.error
        self._refused += self.client.take_refused()
        while self._refused:
            key, error = self._refused.popleft()
            error.request_id = self.output_processor.withdraw(key)
            if error.request_id is not None:  # None if it was aborted meanwhile
                error.add_note(f"The request is {error.request_id!r}.")
                raise error

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """End requests. Returns their last outputs; ids that are not running are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        aborted = self.output_processor.abort(ids, time.time())
        for keys, _ in aborted:
            for key in keys:
                self.client.abort(key)
        return [output for _, output in aborted]

    def has_unfinished_requests(self) -> bool:
        return len(self.output_processor) > 0

    def get_num_unfinished_requests(self) -> int:
        return len(self.output_processor)

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer, because it was made with skip_tokenizer_init=True")
        return self.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache. While requests run it is kept, and this returns False."""
        return self.client.reset_prefix_cache()

    def get_metrics(self) -> list[Metric]:
        return read_metrics(self.client.stats(), self.output_processor.metrics.snapshot())

    def close(self) -> None:
        """Free the device memory. Unfinished requests are dropped."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
