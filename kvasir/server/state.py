"""What one API process knows: its settings, the engine once it is there, who asks and what runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from kvasir.entrypoints.async_llm import AsyncLLM
from kvasir.errors import EngineDeadError
from kvasir.frontend.requests.metrics import sum_stats
from kvasir.log import get_logger
from kvasir.messages import EngineStats
from kvasir.sampling_params import SamplingParams
from kvasir.server.api_keys import RateLimits, load_keys
from kvasir.server.config import ServerConfig
from kvasir.server.device import Probe, probe_for
from kvasir.server.errors import ApiError, unknown_model
from kvasir.server.metrics import Metrics
from kvasir.server.request_log import NO_TRACER, Tracer
from kvasir.server.response_store import ResponseStore

if TYPE_CHECKING:
    from kvasir.server.api_request import Run

_STATS_SECONDS = 2.0  # that a question to the engine may take before the last answer is used


class ServerState:
    """Made before the engine, which `engine_is_here` brings."""

    def __init__(self, config: ServerConfig, model: str, num_processes: int = 1) -> None:
        self.config = config
        self.num_processes = num_processes
        self.model_names = config.served_model_name or [model]
        self.created = int(time.time())
        self.keys = load_keys(config)
        self.limits = RateLimits(num_processes)
        self.metrics = Metrics(self.model_names[0])
        self.phases = Phases(
            lambda phase, took: self.metrics.startup.labels(**self.metrics.labels, phase=phase).set(took)
        )
        self.tracer: Tracer = NO_TRACER
        self.runs: set[Run] = set()
        self.idle = asyncio.Event()  # nothing runs
        self.idle.set()
        self.defaults: SamplingParams | None = None  # of requests that say nothing: the model's generation config
        self.responses = ResponseStore(config.max_stored_responses)
        self._stats: list[EngineStats] = []  # the last that were heard
        self.probe_device: Probe = list  # until it is known where the engine runs
        self._engine: AsyncLLM | None = None

    # ------------------------------------------------------------ the engine

    @property
    def engine(self) -> AsyncLLM:
        """The engine, or a 503 that says why there is none to ask."""
        if self._engine is None or not self.phases.is_ready:
            raise self._unavailable()
        return self._engine

    @property
    def engine_or_none(self) -> AsyncLLM | None:
        """As soon as it exists, ready or not."""
        return self._engine

    def engine_is_here(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self.probe_device = probe_for(engine.config.device.device)

    def _unavailable(self) -> ApiError:
        if self._engine is not None and self._engine.errored:
            return ApiError(503, f"The engine died: {self._engine.dead_error}", "engine", code="engine_dead")
        if self.phases.now == FAILED:
            return ApiError(503, self.phases.reason, "engine", code="engine_dead")
        if self.phases.now == DRAINING:
            return ApiError(503, "The server is shutting down.", "draining", code="draining", retry_after=5)
        message = f"The server is starting: {self.phases.now}."
        return ApiError(503, message, "starting", code="starting", retry_after=2)

    async def engine_stats(self) -> list[EngineStats]:
        """Every engine's figures; if one does not answer in time, the last ones."""
        engine = self._engine
        if engine is not None and engine.is_running:
            with suppress(TimeoutError, EngineDeadError):
                self._stats = await asyncio.wait_for(engine.call_all("stats"), _STATS_SECONDS)
        return self._stats

    async def stats(self) -> EngineStats | None:
        """Of all engines together."""
        found = await self.engine_stats()
        return sum_stats(found) if found else None

    # ------------------------------------------------------------ requests

    def check_model(self, name: str | None) -> str:
        """The name that replies use; a 404 for a model that is not served."""
        if name is not None and name not in self.model_names:
            raise unknown_model(name, self.model_names)
        return self.model_names[0] if name is None else name

    @property
    def keeps_responses(self) -> bool:
        """Whether /v1/responses stores. Of several processes none knows what the others keep."""
        return self.num_processes == 1 and self.config.max_stored_responses > 0

    @property
    def why_nothing_is_kept(self) -> str:
        if self.num_processes > 1:
            return f"this server has {self.num_processes} API processes (--api-server-count), which share nothing."
        return "this server keeps none (--max-stored-responses 0)."

    def began(self, run: Run) -> None:
        self.runs.add(run)
        self.metrics.num_live += 1
        self.idle.clear()

    def ended(self, run: Run) -> None:
        self.runs.discard(run)
        self.metrics.num_live -= 1
        if not self.runs:
            self.idle.set()


def state_of(connection: HTTPConnection) -> ServerState:
    found: ServerState = connection.app.state.server
    return found


async def _state(connection: HTTPConnection) -> ServerState:
    return state_of(connection)  # a coroutine, because FastAPI runs plain functions in threads


State = Annotated[ServerState, Depends(_state)]


# ----------------------------------------------------------------
# Where the server is in its life, and how long each part of the start took.

logger = get_logger(__name__)

STARTING = ("settings", "model", "first token")  # in order; then it is ready
READY, DRAINING, FAILED = "ready", "draining", "failed"


class Phases:
    def __init__(self, report: Callable[[str, float], None] = lambda phase, seconds: None) -> None:
        self.now = STARTING[0]
        self.seconds: dict[str, float] = {}
        self.reason = ""  # why it failed
        self._report = report
        self._since = self._start = time.monotonic()

    def enter(self, phase: str) -> None:
        """The phase so far is done."""
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

    def note(self, parts: Mapping[str, float]) -> None:
        """What the engine's process says of its own start, which is within ours."""
        for name, took in parts.items():
            self.seconds[f"engine: {name}"] = took
            self._report(f"engine: {name}", took)
        if parts:
            words = (f"{name} {took:.2f} s" for name, took in parts.items())
            logger.info("start-up of the engine: %s", ", ".join(words))

    def fail(self, reason: str) -> None:
        self.now, self.reason = FAILED, reason

    @property
    def is_ready(self) -> bool:
        return self.now == READY
