"""The engine's loop: schedule, execute, update. Runs in the core process; holds no tensor and no text."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from kvasir.engine.admission import Admission, QueueLimits
from kvasir.engine.deadlines import Overdue
from kvasir.engine.request_groups import Families
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.snapshot import StepLog, Unwatched, take_snapshot
from kvasir.engine.step_size import StepSize
from kvasir.errors import DeviceMemoryError, EngineDeadError, EngineError
from kvasir.executor.base import Executor
from kvasir.messages import EngineOutput, EngineRequest, EngineStats, GraphUse, Snapshot, StepFuture


class EngineCore:
    """One model, one scheduler. With `lookahead` 1, step N+1 is planned and launched before N's result is read."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, lookahead: int, queue_limits: QueueLimits | None = None
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.lookahead = lookahead
        self.families = Families(scheduler)
        self.admission = Admission(queue_limits or QueueLimits(), scheduler)
        self.overdue = Overdue(scheduler, self.families)
        self.step_size = StepSize(scheduler)
        self.memory = executor.memory()  # now: while a step is in flight, others may not ask the executor
        self.block_bytes = executor.kv_spec().block_bytes
        self.watch: StepLog | Unwatched = Unwatched()
        self.graphs = GraphUse()  # as the last result says
        self.results: deque[StepFuture] = deque()
        self._failure: BaseException | None = None

    def step(self) -> EngineOutput:
        late = self.overdue.end()
        plan = self.scheduler.schedule()
        several = len(self.families) > 0
        if plan is not None:
            try:
                self.executor.execute(plan)
                self.results.append(self.executor.sample())
            except DeviceMemoryError:
                if not self.step_size.failed(plan.total_tokens):
                    raise
                self._start_over()
                return replace(NO_OUTPUT, finished=late)
            self.step_size.fitted()
            self.watch.planned(plan)
            if several:
                self.families.planned()
        if self.results and (plan is None or len(self.results) > self.lookahead):
            result = self.results.popleft().result()
            self.graphs = result.graphs or self.graphs
            output = self.scheduler.update(result)
            output = self.families.update(output) if several else output
        else:
            assert plan is not None or not len(self.scheduler), "requests wait, nothing is in flight, nothing can run"
            output = NO_OUTPUT
        return replace(output, finished=late + output.finished) if late else output

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
            self._start_over()
            raise

    def _start_over(self) -> None:
        self.results.clear()
        self.scheduler.start_over()

    def has_work(self) -> bool:
        return bool(len(self.scheduler) or self.results or len(self.families))

    def add(self, request: EngineRequest) -> None:
        self.admission.check(request, self.families.beams.num_waiting)
        self.families.add(request)
        self.overdue.watch(request)

    def abort(self, key: int, num_kept: int | None = None) -> bool:
        return self.families.abort(key) or self.scheduler.abort(key, num_kept)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False while requests run."""
        while self.results and not len(self.scheduler):
            self.scheduler.update(self.results.popleft().result())
        return self.scheduler.cache.reset()

    def stats(self) -> EngineStats:
        scheduler, cache = self.scheduler, self.scheduler.cache
        return EngineStats(
            num_running=len(scheduler.rows),
            num_waiting=len(scheduler.waiting) + self.families.beams.num_waiting,
            num_blocks=cache.pool.usable,
            num_used_blocks=cache.pool.num_used,
            num_cached_blocks=cache.pool.num_cached,
            steps=scheduler.stats.steps,
            scheduled_tokens=scheduler.stats.scheduled_tokens,
            step_sizes=list(scheduler.stats.step_sizes),
            preemptions=scheduler.stats.preemptions,
            partial_prefills=scheduler.stats.partial_prefills,
            dropped_tokens=scheduler.stats.dropped_tokens,
            prefix_cache_queries=cache.stats.prefix_queries,
            prefix_cache_hits=cache.stats.prefix_hits,
            evictions=cache.pool.evictions,
            copied_blocks=cache.stats.copies,
            shared_blocks=cache.stats.shared,
            freed_blocks=cache.stats.freed,
            num_waiting_tokens=scheduler.waiting.num_prompt_tokens,
            refused_requests=self.admission.num_refused,
            held_back=scheduler.stats.held_back,
            timeouts_waiting=scheduler.stats.ended_waiting,
            timeouts_running=scheduler.stats.ended_running,
            timeouts_foreseen=self.overdue.num_given_up,
            recomputed_tokens=cache.stats.recomputed,
            host_blocks=cache.tier.num_blocks,
            host_used_blocks=cache.tier.num_used,
            host_cached_blocks=cache.tier.num_cached,
            swapped_preemptions=cache.tier.stats.parked,
            swapped_out_blocks=cache.tier.stats.swapped_out,
            swapped_in_blocks=cache.tier.stats.swapped_in,
            offloaded_blocks=cache.tier.stats.offloaded,
            restored_blocks=cache.tier.stats.restored,
            host_evictions=cache.tier.stats.evictions,
            host_cache_hits=cache.stats.tier_hits,
            num_graphs=self.graphs.count,
            graph_bytes=self.graphs.bytes,
            graphs_deferred=self.graphs.deferred,
            graphs_dropped=self.graphs.dropped,
        )

    def snapshot(self, since_step: int = 0) -> Snapshot:
        """Who runs, who waits and which block is whose, for people who watch."""
        return take_snapshot(self, since_step)

    def close(self) -> None:
        self.results.clear()
        self.executor.close()


NO_OUTPUT = EngineOutput(np.zeros(0, np.int64), np.zeros((0, 1), np.int32), np.zeros(0, np.int32))
