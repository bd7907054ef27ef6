"""LLMEngine: requests in, steps driven by the caller, outputs out. What LLM is built on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvasir import startup
from kvasir.config.args import EngineArgs
from kvasir.config.engine import EngineConfig
from kvasir.config.resolve import resolve
from kvasir.entrypoints.vllm_methods import NotYet
from kvasir.errors import EngineDeadError, EngineError, KvasirError, RequestError
from kvasir.frontend.clients.inproc_client import EngineClient, InprocClient
from kvasir.frontend.requests.choices import BeamState
from kvasir.frontend.requests.input import InputProcessor, make_terms, process_all
from kvasir.frontend.requests.metrics import Metric, read_metrics
from kvasir.frontend.requests.output import OutputProcessor
from kvasir.frontend.requests.prompts import PromptType
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.frontend.text.tokenizer_files import tokenizer_of
from kvasir.outputs import RequestOutput
from kvasir.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvasir.frontend.clients.process_client import ProcessClient


class LLMEngine(NotYet):
    def __init__(self, config: EngineConfig, client: EngineClient | None = None) -> None:
        self.config = config
        several = config.parallel.data_parallel_size > 1  # which are processes
        # the tokenizer first: a mistake there should not wait for the weights
        with startup.phase(startup.TOKENIZER):
            self.tokenizer = tokenizer_of(config.model)
        self.input_processor = InputProcessor(config, self.tokenizer, several if client is None else client.remote)
        self.output_processor = OutputProcessor(self.tokenizer)
        self._keys = count()
        self._refused: deque[tuple[int, KvasirError]] = deque()  # which the caller has not been told of
        self._client: EngineClient | None = client or (_processes(config) if several else InprocClient(config))
        try:
            self._client.wait()
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """In this process; several copies of the model are a process each."""
        if engine_args.data_parallel_size == 1:
            return cls(resolve(engine_args))
        client = _processes(engine_args.create_engine_config())  # which settle the settings, each for its devices
        try:
            return cls(client.config, client)
        except BaseException:
            client.close()
            raise

    @property
    def client(self) -> EngineClient:
        if self._client is None:
            raise EngineDeadError("this engine was closed")
        return self._client

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        timeout: float | None = None,
    ) -> None:
        """Validate and queue a request. Anything wrong with it is a RequestError, and nothing has changed.

        `priority` (lower goes first), `tenant` and its `weight` count for the scheduling policies that look at them; a
        request that is not done `timeout` seconds after its arrival ends with finish_reason "timeout".
        """
        if request_id in self.output_processor:
            raise RequestError(f"request id {request_id!r} is in use by a request that still runs", "request_id")
        arrived = time.time() if arrival_time is None else arrival_time
        policy = self.config.scheduler.scheduling_policy
        terms = make_terms(
            policy, arrival_time=arrived, priority=priority, tenant=tenant, weight=weight, timeout=timeout
        )
        request, states = process_all(self.input_processor, request_id, prompt, params, self._keys, arrived, terms)
        self.client.add(request)
        if isinstance(states, BeamState):
            self.output_processor.add_search(states)
        else:
            self.output_processor.add(*states, num_returned=params.n)

    def step(self) -> list[RequestOutput]:
        """Run one step and return what it gave: new text of streaming requests, and requests that ended.

        Where the core is another process it may raise what that has against a request added before: `request_id` of
        the error says which; all others go on.
        """
        self._raise_refused()
        if not self.client.has_work():
            return []
        try:
            output = self.client.step()
        except EngineError:
            self.abort_request(self.output_processor.request_ids())  # nobody will answer them any more
            raise
        outputs, stopped = self.output_processor.process(output, time.time())
        for stop in stopped:
            self.client.abort(stop.key, stop.num_tokens_kept)
        return outputs

    def _raise_refused(self) -> None:
        """In another process the core says only later what it has against a request. One is told at a time."""
        self._refused += self.client.refused()
        while self._refused:
            key, error = self._refused.popleft()
            error.request_id = self.output_processor.withdraw(key)
            if error.request_id is not None:  # or it was aborted meanwhile
                error.add_note(f"This is about request {error.request_id!r}.")
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
            raise RequestError("this engine has no tokenizer: it was made with skip_tokenizer_init=True")
        return self.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False, and nothing is forgotten, while requests run."""
        return self.client.reset_prefix_cache()

    def get_metrics(self) -> list[Metric]:
        return read_metrics(self.client.stats(), self.output_processor.metrics.snapshot())

    def close(self) -> None:
        """Free the device's memory. Requests that still run are dropped."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _processes(config: EngineConfig) -> ProcessClient:
    # Imported here: who runs in one process needs neither ZeroMQ nor msgspec.
    from kvasir.frontend.clients.process_client import ProcessClient

    return ProcessClient(config)
