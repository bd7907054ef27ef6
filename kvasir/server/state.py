"""The state of one API process: its settings, its phase, the engine once it runs, and the requests in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends
from starlette.requests import HTTPConnection

from kvasir.engine.stats import EngineStats
from kvasir.entrypoints.async_llm import AsyncLLM
from kvasir.errors import EngineDeadError, RequestError
from kvasir.frontend.requests.input import default_sampling_params
from kvasir.frontend.requests.metrics import sum_stats
from kvasir.log import get_logger
from kvasir.sampling_params import SamplingParams
from kvasir.server.adapters import ServedAdapters
from kvasir.server.answers import AnswerFormats
from kvasir.server.api_keys import load_keys
from kvasir.server.config import ServerConfig
from kvasir.server.engine_metrics import Probe, probe_for
from kvasir.server.errors import ApiError, not_found, unknown_model
from kvasir.server.file_store import FileStore
from kvasir.server.limits import BodyMemory, RateLimits
from kvasir.server.metrics import Metrics
from kvasir.server.response_store import CompletionStore, ResponseStore
from kvasir.server.tracing import Tracer

if TYPE_CHECKING:
    from kvasir.server.api_request import ApiRequest
    from kvasir.server.lifecycle import Peers

logger = get_logger(__name__)

STARTING = ("settings", "model", "first token")  # in order; then the server is ready
_WRONG_RUNNER = {
    "generate": "This model does not generate text: it is a pooling model. Use /v1/embeddings, /score, /rerank, "
    "/classify or /pooling, or a server with another model.",
    "pooling": "This model generates text: it does not embed, classify or score. Use /v1/chat/completions or "
    "/v1/completions, or a server with an embedding model or reranker (or this one with --runner pooling).",
}
READY, DRAINING, FAILED = "ready", "draining", "failed"
_STATS_SECONDS = 2.0  # an engine that does not answer a call in this time is shown by its last figures
_MOST_NAMED = 20  # adapters that an error lists
_CALL_SECONDS = 5.0  # for the engine to answer a call, which it does between two steps


class ServerPhase:
    """The phase a server is in, and the seconds that each phase of its start took."""

    def __init__(self, report: Callable[[str, float], None] = lambda phase, seconds: None) -> None:
        self.now = STARTING[0]
        self.seconds: dict[str, float] = {}
        self.reason = ""  # why it failed
        self._report = report
        self._since = self._start = time.monotonic()

    @property
    def is_ready(self) -> bool:
        return self.now == READY

    def enter(self, phase: str) -> None:
        now = time.monotonic()
        if self.now in STARTING:
            took = self.seconds[self.now] = now - self._since
            self._report(self.now, took)
            logger.info("start-up: %s took %.2f s", self.now, took)
            if phase == READY:
                total = self.seconds["total"] = now - self._start
                self._report("total", total)
                logger.info("ready after %.2f s", total)
        self.now, self._since = phase, now

    def add_engine_seconds(self, parts: Mapping[str, float]) -> None:
        """Add what the engine's process reports of its own start."""
        for name, took in parts.items():
            self.seconds[f"engine: {name}"] = took
            self._report(f"engine: {name}", took)
        if parts:
            logger.info("start-up of the engine: %s", ", ".join(f"{name} {took:.2f} s" for name, took in parts.items()))

    def fail(self, reason: str) -> None:
        self.now, self.reason = FAILED, reason


class ServerState:
    """Exists before the engine, which `set_engine` adds."""

    def __init__(self, config: ServerConfig, model: str, num_processes: int = 1) -> None:
        self.config = config
        self.num_processes = num_processes
        self.model_names = config.served_model_name or [model]
        self.created = int(time.time())
        self.keys = load_keys(config)
        self.adapters = ServedAdapters(config, self.model_names, num_processes)
        self.limits = RateLimits(num_processes)
        self.metrics = Metrics(self.model_names[0])
        self.phase = ServerPhase(
            lambda phase, took: self.metrics.startup.labels(**self.metrics.labels, phase=phase).set(took)
        )
        self.tracer: Tracer | None = None  # set if spans are sent
        self.peers: Peers | None = None  # set if there are several API processes
        self.requests: set[ApiRequest] = set()  # in flight
        self.idle = asyncio.Event()  # set while there are none
        self.idle.set()
        self.responses = ResponseStore(config.max_stored_responses)
        self.completions = CompletionStore(config.max_stored_responses)
        self.num_lookers, self.look_lock = 0, asyncio.Lock()  # clients that wait for a look at the engine
        self.batches: dict[str, asyncio.Task[None]] = {}  # that run in this process, by id
        if config.files_dir is not None:
            _ = self.files  # a folder that cannot be used is an error now
        self.body_memory = BodyMemory(max(config.max_body_memory, config.max_request_bytes))
        self.reply_memory = BodyMemory(config.max_body_memory)
        self.probe_device: Probe = list  # until the engine's device is known
        self._stats: list[EngineStats] = []  # the engines' last answers
        self._engine: AsyncLLM | None = None

    # ------------------------------------------------------------ the engine

    @property
    def engine(self) -> AsyncLLM:
        """The engine, or a 503 that says why it takes no requests."""
        if self._engine is None or not self.phase.is_ready:
            raise self._unavailable()
        return self._engine

    @property
    def engine_or_none(self) -> AsyncLLM | None:
        """The engine as soon as it exists, ready or not."""
        return self._engine

    def set_engine(self, engine: AsyncLLM) -> None:
        self._engine = engine
        if self.config.max_tokenizing_characters is not None:
            engine.text_pool.max_characters = self.config.max_tokenizing_characters
        self.probe_device = probe_for(engine.config.device.device)
        self.formats.log()

    def _unavailable(self) -> ApiError:
        if self._engine is not None and self._engine.errored:
            return ApiError(503, f"The engine died: {self._engine.dead_error}", "engine", code="engine_dead")
        if self.phase.now == FAILED:
            return ApiError(503, self.phase.reason, "engine", code="engine_dead")
        if self.phase.now == DRAINING:
            return ApiError(503, "The server is shutting down.", "draining", code="draining", retry_after=5)
        message = f"The server is starting: {self.phase.now}."
        return ApiError(503, message, "starting", code="starting", retry_after=2)

    async def engine_stats(self) -> list[EngineStats]:
        """Every engine's figures; the last known ones if an engine does not answer in time."""
        engine = self._engine
        if engine is not None and engine.is_running and engine.seconds_unanswered < _STATS_SECONDS:
            with suppress(TimeoutError, EngineDeadError):
                self._stats = await asyncio.wait_for(engine.call_all("stats"), _STATS_SECONDS)
        return self._stats

    async def call(self, name: str, *args: Any, engine: int = 0) -> Any:
        """Call a method of an engine's core; a 503 if the engine hangs."""
        return await self._answered(self.engine.call(name, *args, engine=engine))

    async def call_all(self, name: str, *args: Any) -> list[Any]:
        """Call a method of every engine's core; a 503 if one of them hangs."""
        found: list[Any] = await self._answered(self.engine.call_all(name, *args))
        return found

    async def _answered(self, call: Awaitable[Any]) -> Any:
        waited = self.engine.seconds_unanswered  # by others, for an answer that must come first
        try:
            return await asyncio.wait_for(call, max(0.1, _CALL_SECONDS - waited))
        except TimeoutError:
            message = f"The engine has not answered within {_CALL_SECONDS:g} s: it is stuck, or in a long step."
            raise ApiError(503, message, "engine", code="engine_stalled", retry_after=_CALL_SECONDS) from None

    async def stats(self) -> EngineStats | None:
        """The figures of all engines together."""
        found = await self.engine_stats()
        return sum_stats(found) if found else None

    # ------------------------------------------------------------ defaults of requests

    def time_limit(self, asked: float | None) -> float | None:
        """Seconds that a request may take: its own timeout, or this server's if that is shorter."""
        longest = self.config.request_timeout
        return asked if longest is None else longest if asked is None else min(longest, asked)

    @cached_property
    def default_params(self) -> SamplingParams:
        """The model's generation config over our defaults."""
        return default_sampling_params(self.engine.config)

    @cached_property
    def formats(self) -> AnswerFormats:
        """How the model writes tool calls and reasoning."""
        engine = self._engine
        assert engine is not None, "the formats are the model's"
        return AnswerFormats(self.config, engine.input_processor.tokenizer, engine.config.model.chat_template)

    def default_max_tokens(self, otherwise: int | None) -> int | None:
        """The limit of a request that names none: the generation config's, or else `otherwise`."""
        configured: Any = self.engine.config.model.generation.get("max_new_tokens")
        return self.default_params.max_tokens if configured is not None else otherwise

    @cached_property
    def files(self) -> FileStore:
        if self.config.files_dir is None:
            raise not_found("This server keeps no files: start it with --files-dir DIR.")
        return FileStore(self.config.files_dir, self.config.max_files_bytes)

    def writes_token_ids(self, asked: bool | None) -> bool:
        """Whether log-probabilities show token ids in place of texts. The request decides, or else the setting."""
        return self.config.return_tokens_as_token_ids if asked is None else asked

    def check_model(self, name: str | None, runner: str | None = "generate") -> str:
        """Return the name for replies. A model that is not served is a 404; one that does not run as `runner` (None:
        anything) is a 400."""
        if name is not None and name not in self.model_names and self.adapters.get(name) is None:
            raise unknown_model(name, [*self.model_names, *(each.name for each in self.adapters.all()[:_MOST_NAMED])])
        if runner is not None and (runner == "pooling") != bool(self.engine.config.model.poolers):
            raise RequestError(_WRONG_RUNNER[runner], "model")
        return self.model_names[0] if name is None else name

    @property
    def stores_responses(self) -> bool:
        """Whether responses and chat completions can be stored. API processes share no memory, so several of them
        store nothing."""
        return self.num_processes == 1 and self.config.max_stored_responses > 0

    @property
    def why_nothing_is_stored(self) -> str:
        if self.num_processes > 1:
            return f"this server has {self.num_processes} API processes (--api-server-count), which share nothing."
        return "this server keeps none (--max-stored-responses 0)."

    # ------------------------------------------------------------ requests in flight

    def began(self, request: ApiRequest) -> None:
        self.requests.add(request)
        self.metrics.num_live += 1
        self.idle.clear()

    def ended(self, request: ApiRequest) -> None:
        self.requests.discard(request)
        self.metrics.num_live -= 1
        if not self.requests:
            self.idle.set()


def state_of(connection: HTTPConnection) -> ServerState:
    found: ServerState = connection.app.state.server
    return found


async def _state(connection: HTTPConnection) -> ServerState:
    return state_of(connection)  # a coroutine, because FastAPI runs plain functions in threads


State = Annotated[ServerState, Depends(_state)]
