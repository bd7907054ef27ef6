"""The engine's loop: schedule, execute, update. Runs in the core process; holds no tensor and no text."""

from __future__ import annotations

from collections import deque

from kvasir.engine.families import Families
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.snapshot import take_snapshot
from kvasir.engine.watch import StepLog, Unwatched
from kvasir.errors import EngineDeadError, EngineError
from kvasir.executor.base import Executor
from kvasir.messages import NO_OUTPUT, EngineOutput, EngineRequest, EngineStats, StepFuture
from kvasir.snapshot import Snapshot


class EngineCore:
    """One model, one scheduler. With `lookahead` 1, step N+1 is planned and launched before N's result is read."""

    def __init__(self, scheduler: Scheduler, executor: Executor, lookahead: int) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.lookahead = lookahead
        self.families = Families(scheduler)
        self.memory = executor.memory()  # now: while a step is in flight, others may not ask the executor
        self.block_bytes = executor.kv_spec().block_bytes
        self.watch: StepLog | Unwatched = Unwatched()
        self.results: deque[StepFuture] = deque()
        self._failure: BaseException | None = None

    def step(self) -> EngineOutput:
        plan = self.scheduler.schedule()
        several = len(self.families) > 0
        if plan is not None:
            self.executor.execute(plan)
            self.results.append(self.executor.sample())
            self.watch.planned(plan)
            if several:
                self.families.planned()
        if self.results and (plan is None or len(self.results) > self.lookahead):
            output = self.scheduler.update(self.results.popleft().result())
            return self.families.update(output) if several else output
        assert plan is not None or not len(self.scheduler), "requests wait, nothing is in flight and nothing can run"
        return NO_OUTPUT

    def run_step(self) -> EngineOutput:
        """`step`, with a failure of the device turned into an EngineError, after which the core stays dead."""
        if self._failure is not None:
            raise EngineDeadError(f"the engine stopped earlier: {self._failure}") from self._failure
        try:
            return self.step()
        except Exception as error:
            self._failure = error
            self.results.clear()
            raise EngineError(f"a step failed: {type(error).__name__}: {error}") from error
        except BaseException:  # somebody wants to stop, in the middle of a step: nothing is known of what it computed
            self.results.clear()
            self.scheduler.start_over()
            raise

    def has_work(self) -> bool:
        return bool(len(self.scheduler) or self.results or len(self.families))

    def add(self, request: EngineRequest) -> None:
        self.families.add(request)

    def abort(self, key: int, num_kept: int | None = None) -> bool:
        return self.families.abort(key) or self.scheduler.abort(key, num_kept)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False while requests run."""
        while self.results and not len(self.scheduler):
            self.scheduler.update(self.results.popleft().result())
        return self.scheduler.cache.pool.reset()

    def stats(self) -> EngineStats:
        scheduler, cache = self.scheduler, self.scheduler.cache
        return EngineStats(
            num_running=len(scheduler.rows),
            num_waiting=len(scheduler.waiting),
            num_blocks=cache.pool.usable,
            num_used_blocks=cache.pool.num_used,
            num_cached_blocks=cache.pool.num_cached,
            steps=scheduler.stats.steps,
            scheduled_tokens=scheduler.stats.scheduled_tokens,
            preemptions=scheduler.stats.preemptions,
            partial_prefills=scheduler.stats.partial_prefills,
            dropped_tokens=scheduler.stats.dropped_tokens,
            prefix_cache_queries=cache.stats.prefix_queries,
            prefix_cache_hits=cache.stats.prefix_hits,
            evictions=cache.pool.evictions,
            copied_blocks=cache.stats.copies,
            shared_blocks=cache.stats.shared,
            freed_blocks=cache.stats.freed,
        )

    def snapshot(self, since_step: int = 0) -> Snapshot:
        """Who runs, who waits and which block is whose, for people who watch."""
        return take_snapshot(self, since_step)

    def close(self) -> None:
        self.results.clear()
        self.executor.close()
