"""From the first moment of an API process to its last: start the engine while probes are answered already, watch it,
drain when told to stop, say why if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvasir.entrypoints.async_llm import AsyncLLM
from kvasir.errors import KvasirError
from kvasir.frontend.requests.input import TokensPrompt
from kvasir.log import get_logger
from kvasir.sampling_params import SamplingParams
from kvasir.server.state import DRAINING, FAILED, READY, STARTING, Phases, ServerState

logger = get_logger(__name__)
T = TypeVar("T")

_LOOK_SECONDS = 0.1  # how often the engine's death is looked for
_FLUSH_LOOKS = 10  # looks between two flushes of the metrics
_LOG_SECONDS = 10.0
_LAST_WORDS_SECONDS = 2.0  # for open requests to be told that the engine has died

Starter = Callable[[Phases], AsyncLLM]  # blocks until the engine serves, entering phases on the way


class Life:
    """`start` makes the engine, in a thread; `stop` makes the web server end. `error` is why, if not because it was
    asked to."""

    def __init__(self, state: ServerState, start: Starter, stop: Callable[[], None]) -> None:
        self.state = state
        self.error: BaseException | None = None
        self._start = start
        self._stop = stop
        self._tasks: set[asyncio.Task[None]] = set()
        self._generated = (time.monotonic(), 0.0)
        self._logged = 0.0

    def begin(self) -> None:
        """Call in the event loop."""
        self._spawn(self._live())

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self) -> None:
        try:
            engine = await _in_daemon_thread(lambda: self._start(self.state.phases))
            self.state.engine_is_here(engine)
            self.state.phases.enter(STARTING[-1])
            self.state.phases.note(engine.startup_seconds)
            await _first_token(engine)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._end_with(error)
            return
        if self.state.phases.now in STARTING:
            self.state.phases.enter(READY)
        await self._watch(engine)

    # ------------------------------------------------------------ while it lives

    async def _watch(self, engine: AsyncLLM) -> None:
        looks = 0
        while not engine.errored:
            await asyncio.sleep(_LOOK_SECONDS)
            looks += 1
            if looks % _FLUSH_LOOKS == 0:
                await self._flush()
        if self.state.phases.now == FAILED:
            return
        assert engine.dead_error is not None
        self.state.phases.fail(f"The engine died: {engine.dead_error}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.state.idle.wait(), _LAST_WORDS_SECONDS)
        self._end_with(engine.dead_error)

    async def _flush(self) -> None:
        metrics = self.state.metrics
        new = metrics.tally.generated
        metrics.flush()
        now, (then, smoothed) = time.monotonic(), self._generated
        rate = 0.5 * smoothed + 0.5 * new / (now - then)  # a few seconds' mean
        self._generated = now, rate if rate > 0.01 else 0.0
        metrics.tokens_per_second.set(self._generated[1])
        if now - self._logged >= _LOG_SECONDS and not self.state.config.disable_log_stats and self.state.runs:
            self._logged = now
            await self._log_stats()

    async def _log_stats(self) -> None:
        stats = await self.state.stats()
        if stats is None:
            return
        facts = {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "tokens_per_second": round(self._generated[1], 1),
            "kv_cache_usage": round(stats.num_used_blocks / max(1, stats.num_blocks), 4),
            "prefix_cache_hit_rate": round(stats.prefix_cache_hits / max(1, stats.prefix_cache_queries), 4),
        }
        logger.info(
            "%d running, %d waiting, %.1f tokens/s, KV cache %.1f%% used, prefix cache hits %.1f%%",
            *(facts["running"], facts["waiting"], facts["tokens_per_second"]),
            *(100 * facts["kv_cache_usage"], 100 * facts["prefix_cache_hit_rate"]),
            extra={"fields": facts},
        )

    # ------------------------------------------------------------ the end

    def drain(self) -> None:
        """Take no new requests, let those that run finish, then end. A second call ends at once."""
        phases = self.state.phases
        if not phases.is_ready:
            self._spawn(self._end_now())
            return
        phases.enter(DRAINING)
        self._spawn(self._drain())

    async def _drain(self) -> None:
        limit = self.state.config.shutdown_timeout
        running = len(self.state.runs)
        logger.info("shutting down: %d requests may finish within %g s; a second signal ends them now", running, limit)
        try:
            await asyncio.wait_for(self.state.idle.wait(), limit)
        except TimeoutError:
            logger.warning("%d requests did not finish in time and are aborted", len(self.state.runs))
        await self._end_now()

    async def _end_now(self) -> None:
        """Requests that still run are told so: the web server waits for them."""
        for run in list(self.state.runs):
            await run.abort()
        self._stop()

    def _end_with(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            self.state.phases.fail(str(error))
        self._stop()


async def _first_token(engine: AsyncLLM) -> None:
    """The model answers."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    async for _ in engine.generate(TokensPrompt(prompt_token_ids=[0]), params):
        pass


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """A thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(value: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        try:
            value, error = work(), None
        except BaseException as raised:
            value, error = None, raised
        try:
            loop.call_soon_threadsafe(finish, value, error)
        except RuntimeError:  # the loop was closed meanwhile
            if isinstance(value, AsyncLLM):
                value.shutdown()

    threading.Thread(target=run, daemon=True, name="engine start").start()
    return await done


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, KvasirError) else f"{type(error).__name__}: {text}"
