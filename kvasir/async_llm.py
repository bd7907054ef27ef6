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
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from typing import Any, Self

from kvasir.args import EngineArgs
from kvasir.config import EngineConfig
from kvasir.errors import EngineDeadError, KvasirError, RequestError
from kvasir.frontend.beams import BeamState
from kvasir.frontend.engine_launch import Executor
from kvasir.frontend.engines import Engines
from kvasir.frontend.fanout import process_all
from kvasir.frontend.input import InputProcessor, default_sampling_params
from kvasir.frontend.output import OutputProcessor
from kvasir.frontend.streams import Stream
from kvasir.frontend.tokenizer import Tokenizer
from kvasir.frontend.tokenizer_files import load_tokenizer
from kvasir.messages import EngineOutput, EngineRequest, EngineStats, Terms
from kvasir.metrics import Metric, read_metrics
from kvasir.outputs import RequestOutput
from kvasir.prompts import PromptType
from kvasir.sampling_params import BeamSearchParams, SamplingParams
from kvasir.transport import words


class AsyncLLM:
    """Belongs to one event loop at a time: the one it is first used in."""

    def __init__(self, config: EngineConfig, executor: Executor = None, *, engines: Engines | None = None) -> None:
        """`executor` makes what runs in place of the model: 'module:name' or a picklable callable, given the config."""
        self._engines = Engines.start(config, executor) if engines is None else engines
        self.config = self._engines.config
        try:
            model = self.config.model
            self.tokenizer = None if model.skip_tokenizer_init else load_tokenizer(model.tokenizer)
            self.input_processor = InputProcessor(self.config, self.tokenizer)
            self._engines.wait()
        except BaseException:
            self._engines.close()
            raise
        self.output_processor = OutputProcessor(self.tokenizer)
        self._streams: dict[str, Stream] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drains = False  # a look at the sockets is due
        self._closed = False

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        return cls(args.create_engine_config())

    @classmethod
    def attach(cls, address: str) -> Self:
        """A client of the engine that another process owns; `address` is that one's."""
        engines = Engines.attach(address)
        return cls(engines.config, engines=engines)

    @property
    def address(self) -> str:
        """What another process of this user attaches to."""
        return self._engines.directory

    # ------------------------------------------------------------ requests

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come. Closing the generator aborts the request; `timeout` is in seconds from now."""
        now = time.monotonic()
        terms = Terms(now, priority, tenant, weight, None if timeout is None else now + timeout)
        stream = self._add(prompt, sampling_params, request_id, terms)
        try:
            while (output := await stream.next()) is not None:
                yield output
        finally:
            if not stream.finished:
                self._abort([stream.request_id])

    def _add(
        self,
        prompt: PromptType,
        params: SamplingParams | BeamSearchParams | None,
        request_id: str | None,
        terms: Terms,
    ) -> Stream:
        self._attach_loop()
        self._check_alive()
        if params is None:
            params = default_sampling_params(self.config)
        elif isinstance(params, BeamSearchParams):
            params = params.to_sampling_params()
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        if name in self.output_processor:
            raise RequestError(f"request id {name!r} is in use by a request that still runs", "request_id")
        request, states = process_all(self.input_processor, name, prompt, params, self._engines.keys, time.time())
        stream = Stream(name, params.output_kind)
        self._engines.add(_with_terms(request, terms))
        if isinstance(states, BeamState):
            self.output_processor.add_search(states)
        else:
            self.output_processor.add(*states, num_returned=params.n)
        self._streams[name] = stream
        self._look_soon()
        return stream

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their generators give out a last output with finish_reason "abort"."""
        self._abort([request_id] if isinstance(request_id, str) else list(request_id))

    def _abort(self, request_ids: list[str]) -> None:
        keys: list[tuple[int, int | None]] = []
        for some, output in self.output_processor.abort(request_ids, time.time()):
            keys += [(key, None) for key in some]
            self._put(output)
        if keys and self._engines.dead is None and not self._closed:
            self._engines.abort(keys)
            self._look_soon()

    # ------------------------------------------------------------ what the engines say

    def _attach_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            if self._streams or self._answers:
                raise RequestError("this AsyncLLM has requests in another event loop; use it in one at a time")
            self._detach_loop()
        self._loop = loop
        for link in self._engines.links:
            loop.add_reader(link.socket.fileno(), self._look)
            loop.add_reader(link.lifeline.fileno(), self._look_for_death)

    def _detach_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            for link in self._engines.links:
                loop.remove_reader(link.socket.fileno())
                loop.remove_reader(link.lifeline.fileno())

    def _look_soon(self) -> None:
        """A socket that is used tells of arrivals only once: after sending, it must be looked at."""
        if not self._drains and self._loop is not None:
            self._drains = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._drains = False
        if self._closed:
            return
        try:
            for event in self._engines.receive():
                if isinstance(event, EngineOutput):
                    self._take(event)
                elif isinstance(event, words.Refused):
                    self._refuse(event)
                else:
                    self._take_answer(event)
        except Exception as error:
            self._die(EngineDeadError(f"an output could not be read: {type(error).__name__}: {error}"))
            raise

    def _take(self, event: EngineOutput) -> None:
        outputs, stopped = self.output_processor.process(event, time.time())
        if stopped:
            self._engines.abort([(stop.key, stop.num_tokens_kept) for stop in stopped])
            self._look_soon()
        for output in outputs:
            self._put(output)

    def _put(self, output: RequestOutput) -> None:
        stream = self._streams.pop(output.request_id) if output.finished else self._streams[output.request_id]
        stream.put(output)

    def _refuse(self, refused: words.Refused) -> None:
        request_id = self.output_processor.withdraw(refused.key)
        if request_id is not None:
            self._streams.pop(request_id).fail(refused.error)

    def _take_answer(self, answer: words.Answer) -> None:
        waiting = self._answers.pop(answer.number)
        if waiting.done():
            return
        if answer.error is not None:
            waiting.set_exception(answer.error)
        else:
            waiting.set_result(answer.value)

    def _look_for_death(self) -> None:
        error = self._engines.find_death()
        if error is not None:
            self._look()  # what it said before
            self._die(error)

    def _die(self, error: KvasirError) -> None:
        """Answer everybody who waits."""
        self._engines.dead = self._engines.dead or error
        self._detach_loop()
        self.output_processor.abort(self.output_processor.request_ids(), time.time())
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineDeadError(str(error)))
        answers, self._answers = self._answers, {}
        for waiting in answers.values():
            if not waiting.done():
                waiting.set_exception(EngineDeadError(str(error)))

    # ------------------------------------------------------------ around it

    @property
    def is_running(self) -> bool:
        return not self._closed and self.dead_error is None

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def dead_error(self) -> KvasirError | None:
        return self._engines.dead

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineDeadError("this engine was shut down")
        if self._engines.dead is not None:
            raise EngineDeadError(str(self._engines.dead)) from self._engines.dead

    async def check_health(self) -> None:
        """Raise EngineDeadError if an engine has ended, EngineError if one is stuck in a step."""
        self._check_alive()
        if (error := self._engines.find_death()) is not None:
            self._die(error)
            self._check_alive()
        self._engines.check_progress(120.0)

    async def call(self, name: str, *args: Any, engine: int = 0) -> Any:
        """Ask the core of one engine: its method of this name."""
        self._attach_loop()
        self._check_alive()
        waiting = asyncio.get_running_loop().create_future()
        self._answers[self._engines.ask(engine, name, *args)] = waiting
        self._look_soon()
        return await waiting

    async def call_all(self, name: str, *args: Any) -> list[Any]:
        calls = [self.call(name, *args, engine=index) for index in range(len(self._engines.links))]
        return list(await asyncio.gather(*calls))

    async def stats(self) -> EngineStats:
        """Of all engines together."""
        return sum_stats(await self.call_all("stats"))

    async def get_metrics(self) -> list[Metric]:
        return read_metrics(await self.stats(), self.output_processor.metrics.snapshot())

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False, and nothing is forgotten, while requests run."""
        return all(await self.call_all("reset_prefix_cache"))

    async def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer: it was made with skip_tokenizer_init=True")
        return self.tokenizer

    def shutdown(self) -> None:
        """End the engine, if this process owns it. Requests that still run fail with EngineDeadError."""
        if self._closed:
            return
        self._die(EngineDeadError("this engine was shut down"))
        self._closed = True
        self._engines.close()


AsyncLLMEngine = AsyncLLM


def sum_stats(stats: list[EngineStats]) -> EngineStats:
    total = {name: sum(getattr(each, name) for each in stats) for name in EngineStats.__slots__}
    return EngineStats(**total)


def _with_terms(request: EngineRequest, terms: Terms) -> EngineRequest:
    forks = tuple(replace(fork, terms=terms) for fork in request.forks)
    return replace(request, terms=terms, forks=forks)
