"""The state of one API process: its settings, its phase, the engine once it runs, and the requests in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends
from starlette.requests import HTTPConnection

from kvasir.entrypoints.async_llm import AsyncLLM
from kvasir.errors import EngineDeadError
from kvasir.frontend.requests.input import default_sampling_params
from kvasir.frontend.requests.metrics import sum_stats
from kvasir.log import get_logger
from kvasir.messages import EngineStats
from kvasir.sampling_params import SamplingParams
from kvasir.server.api_keys import RateLimits, load_keys
from kvasir.server.config import ServerConfig
from kvasir.server.device import Probe, probe_for
from kvasir.server.errors import ApiError, unknown_model
from kvasir.server.metrics import Metrics
from kvasir.server.response_store import ResponseStore
from kvasir.server.tracing import Tracer

if TYPE_CHECKING:
    from kvasir.server.api_request import ApiRequest

logger = get_logger(__name__)

STARTING = ("settings", "model", "first token")  # in order; then the server is ready
READY, DRAINING, FAILED = "ready", "draining", "failed"
_STATS_SECONDS = 2.0  # an engine that does not answer a call in this time is shown by its last figures


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
        self.limits = RateLimits(num_processes)
        self.metrics = Metrics(self.model_names[0])
        self.phase = ServerPhase(
            lambda phase, took: self.metrics.startup.labels(**self.metrics.labels, phase=phase).set(took)
        )
        self.tracer: Tracer | None = None  # set if spans are sent
        self.requests: set[ApiRequest] = set()  # in flight
        self.idle = asyncio.Event()  # set while there are none
        self.idle.set()
        self.responses = ResponseStore(config.max_stored_responses)
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
        self.probe_device = probe_for(engine.config.device.device)

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
        if engine is not None and engine.is_running:
            with suppress(TimeoutError, EngineDeadError):
                self._stats = await asyncio.wait_for(engine.call_all("stats"), _STATS_SECONDS)
        return self._stats

    async def stats(self) -> EngineStats | None:
        """The figures of all engines together."""
        found = await self.engine_stats()
        return sum_stats(found) if found else None

    # ------------------------------------------------------------ defaults of requests

    @cached_property
    def default_params(self) -> SamplingParams:
        """The model's generation config over our defaults."""
        return default_sampling_params(self.engine.config)

    def default_max_tokens(self, otherwise: int | None) -> int | None:
        """The limit of a request that names none: the generation config's, or else `otherwise`."""
        configured: Any = self.engine.config.model.generation.get("max_new_tokens")
        return self.default_params.max_tokens if configured is not None else otherwise

    def check_model(self, name: str | None) -> str:
        """The name that replies use; a 404 for a model that is not served."""
        if name is not None and name not in self.model_names:
            raise unknown_model(name, self.model_names)
        return self.model_names[0] if name is None else name

    @property
    def stores_responses(self) -> bool:
        """Whether /v1/responses stores. API processes share no memory, so several of them store nothing."""
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
