"""The lifecycle of an API process: it starts the engine while probes are answered, watches it, drains on a signal, and
reports why the engine died."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvasir.engine.stats import EngineStats
from kvasir.entrypoints.async_llm import AsyncLLM
from kvasir.errors import EngineDeadError, KvasirError
from kvasir.frontend.requests.prompts import TokensPrompt
from kvasir.log import get_logger
from kvasir.sampling_params import SamplingParams
from kvasir.server.state import DRAINING, FAILED, READY, STARTING, ServerPhase, ServerState

logger = get_logger(__name__)
T = TypeVar("T")

_WATCH_SECONDS = 0.1  # between two checks that the engine lives
_CHECKS_PER_FLUSH = 10  # the metrics are flushed at every tenth check
_LOG_SECONDS = 10.0
_PEER_SECONDS = 5.0  # after which an API process that shows nothing is not ready
_FAIL_SECONDS = 2.0  # for open requests to be answered after the engine has died

Starter = Callable[[ServerPhase], AsyncLLM]  # blocks until the engine serves; enters phases on the way


class ServerLifecycle:
    """`start` makes the engine, in a thread; `stop` ends the web server. `error`: why the server ended, unless it was
    asked to."""

    def __init__(self, state: ServerState, start: Starter, stop: Callable[[], None]) -> None:
        self.state = state
        self.error: BaseException | None = None
        self._start = start
        self._stop = stop
        self._tasks: set[asyncio.Task[None]] = set()
        self._rate = TokenRate(time.monotonic())
        self._logged = 0.0

    def begin(self) -> None:
        """Start the engine in the background. Called in the event loop."""
        self._spawn(self._start_and_watch())

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_and_watch(self) -> None:
        try:
            engine = await _in_daemon_thread(lambda: self._start(self.state.phase))
            self.state.set_engine(engine)
            self.state.phase.enter(STARTING[-1])
            self.state.phase.add_engine_seconds(engine.startup_seconds)
            await self.state.adapters.start(engine)
            await _first_token(engine)
            gc.collect()
            gc.freeze()  # these objects live as long as the process: a collection of them would halt all streams
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._end_with(error)
            return
        if self.state.phase.now in STARTING:
            self.state.phase.enter(READY)
        self._show()
        self._spawn(self.state.adapters.watch())
        await self._watch(engine)

    # ------------------------------------------------------------ while the engine runs

    async def _watch(self, engine: AsyncLLM) -> None:
        checks = 0
        while not engine.errored:
            await asyncio.sleep(_WATCH_SECONDS)
            checks += 1
            if checks % _CHECKS_PER_FLUSH == 0:
                with contextlib.suppress(EngineDeadError):  # the next check finds it
                    engine.ping()
                self.state.body_memory.note_peak(engine.text_pool.take_peak())
                self._show()
                await self._flush()
        if self.state.phase.now == FAILED:
            return
        assert engine.dead_error is not None
        self.state.phase.fail(f"The engine died: {engine.dead_error}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.state.idle.wait(), _FAIL_SECONDS)
        self._end_with(engine.dead_error)

    def _show(self) -> None:
        if self.state.peers is not None:
            self.state.peers.show(self.state.phase.is_ready)

    async def _flush(self) -> None:
        metrics = self.state.metrics
        metrics.flush()
        stats = await self.state.stats()
        if stats is None:
            return
        now = time.monotonic()
        self._rate.update(now, stats.generated_tokens)
        metrics.tokens_per_second.set(self._rate.value)
        if now - self._logged >= _LOG_SECONDS and not self.state.config.disable_log_stats and self.state.requests:
            self._logged = now
            self._log_stats(stats)

    def _log_stats(self, stats: EngineStats) -> None:
        facts = {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "tokens_per_second": round(self._rate.value, 1),
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
        """Refuse new requests, let running ones finish, then end. A second call ends at once."""
        phase = self.state.phase
        if not phase.is_ready:
            self._spawn(self._end_now())
            return
        phase.enter(DRAINING)
        self._show()
        self._spawn(self._drain())

    async def _drain(self) -> None:
        limit = self.state.config.shutdown_timeout
        running = len(self.state.requests)
        logger.info("shutting down: %d requests may finish within %g s; a second signal ends them now", running, limit)
        try:
            await asyncio.wait_for(self.state.idle.wait(), limit)
        except TimeoutError:
            logger.warning("%d requests did not finish in time and are aborted", len(self.state.requests))
        await self._end_now()

    async def _end_now(self) -> None:
        """Abort the requests that still run: the web server waits until they are answered."""
        for request in list(self.state.requests):
            await request.abort()
        self._stop()

    def _end_with(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            self.state.phase.fail(str(error))
        self._stop()


class TokenRate:
    """Tokens per second, smoothed over a few seconds, from a counter that is read now and then."""

    def __init__(self, now: float) -> None:
        self.value = 0.0
        self._last = (now, 0)

    def update(self, now: float, count: int) -> None:
        then, before = self._last
        new = max(0, count - before)  # another API process that has just started may have reset the counter
        rate = 0.5 * self.value + 0.5 * new / (now - then)
        self.value = rate if rate > 0.01 else 0.0
        self._last = now, count


class Peers:
    """The API processes of one server. Each shows that it is ready by a file that it touches every second."""

    def __init__(self, directory: str, number: int) -> None:
        self.number = number
        self._directory = Path(directory)
        self._own = self._directory / f"ready-{os.getpid()}"

    def show(self, ready: bool) -> None:
        if ready:
            self._own.touch()
        else:
            self._own.unlink(missing_ok=True)

    def num_ready(self) -> int:
        since, found = time.time() - _PEER_SECONDS, 0
        for file in self._directory.glob("ready-*"):
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                found += file.stat().st_mtime >= since
        return found


async def _first_token(engine: AsyncLLM) -> None:
    """Generate one token, or embed one, which shows that the model works."""
    if engine.config.model.poolers:
        async for _ in engine.encode(TokensPrompt(prompt_token_ids=[0])):
            pass
        await engine.call_all("start_counting")
        return
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    async for _ in engine.generate(TokensPrompt(prompt_token_ids=[0]), params):
        pass
    await engine.call_all("start_counting")  # nobody asked for this token


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread that does not keep the process from ending."""
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
