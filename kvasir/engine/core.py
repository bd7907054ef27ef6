"""The engine's loop: schedule, execute, update. Core process; holds no tensor and no text."""

from __future__ import annotations

from collections import deque
from dataclasses import fields, replace

import numpy as np

from kvasir.engine.cache.manager import CacheStats
from kvasir.engine.guides import GuideStats, PendingGuides
from kvasir.engine.observers import ExpertCounter, GraphCounter, StepObserver, StepTimer
from kvasir.engine.queue import Admission, DeadlineMonitor, QueueLimits
from kvasir.engine.request_groups import RequestGroups
from kvasir.engine.resources import ResourceStats
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.snapshot import take_snapshot
from kvasir.engine.stats import EngineStats, SchedulerStats, Snapshot
from kvasir.engine.step_budget import StepPacing, StepSize
from kvasir.errors import DeviceMemoryError, EngineDeadError, EngineError, RequestError
from kvasir.executor import Executor
from kvasir.log import get_logger
from kvasir.messages import (
    AdapterTargets,
    EngineOutput,
    EngineRequest,
    Finished,
    FinishReason,
    SampleInputs,
    StepFuture,
    StepPlan,
)

logger = get_logger(__name__)

_IDLE_SECONDS = 0.02  # of a wait for guides while there is nothing else to do
_LOAD_SECONDS = 0.005  # to wait for a load when no request can run
NO_OUTPUT = EngineOutput.empty()  # shared: the outputs of steps are read, never changed


class EngineCore:
    """One model, one scheduler. With `lookahead` 1, step N+1 is planned and launched before N's result is read."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, lookahead: int, queue_limits: QueueLimits | None = None
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.lookahead = lookahead
        self.groups = RequestGroups(scheduler)
        self.pending = PendingGuides(scheduler.guides)
        self.admission = Admission(queue_limits or QueueLimits(), scheduler)
        self.deadlines = DeadlineMonitor(scheduler, self.groups)
        self.step_size = StepSize(scheduler)
        self.graphs, self.experts = GraphCounter(), ExpertCounter()
        self.observers: list[StepObserver] = [StepTimer(scheduler), self.graphs, self.experts]
        self.pacing: StepPacing | None = None  # of a device whose step times are known
        if lookahead and scheduler.step_budget is not None:
            self.pacing = StepPacing(scheduler.step_budget, scheduler.context.clock)
            self.observers.append(self.pacing)
        self.memory = executor.memory()  # asked now: no other call may reach the executor while a step is in flight
        self.block_bytes = executor.kv_spec().block_bytes
        self.targets = executor.adapter_targets() if scheduler.resources.num_slots else None
        self.results: deque[StepFuture] = deque()
        self._failure: BaseException | None = None

    def step(self) -> EngineOutput:
        """Plan and launch a step, then take in the oldest result if one is due."""
        ended = self.deadlines.expire()
        if self.pending.requests:
            ended += self._queue_prepared()
        if self.scheduler.resources.num_slots and self.scheduler.resources.is_busy:
            ended += self._load_resources()
        plan = self.scheduler.schedule()
        fits = plan is None or self._execute(plan)
        output = self._update() if fits and self._is_result_due(plan) else NO_OUTPUT
        if plan is not None and fits and plan.waits_for_host:
            assert not self.results, "guided requests run at most one step ahead"
            fits = self._sample(plan, self.scheduler.sample_inputs())
            output = self._update() if fits and not self.lookahead else output
        return replace(output, finished=ended + output.finished) if ended else output

    def _load_resources(self) -> list[Finished]:
        """Start the loads that requests wait for, take in those that are done, and return the requests that ended
        because a load failed. Waits a moment if nothing else can be done."""
        scheduler = self.scheduler
        for slot, resource in scheduler.resources.take_loads():
            self.executor.load(slot, resource)
        is_idle = not (self.results or len(scheduler.rows) or len(scheduler.waiting))
        ended: list[Finished] = []
        for slot, error in self.executor.finished_loads(_LOAD_SECONDS if is_idle else 0.0):
            for failed in scheduler.resource_loaded(slot, error):
                ended += [failed, *self.groups.end_forks(failed)]
        members = None if self.results else scheduler.take_member_results()
        if members is not None:
            ended += self.groups.update(EngineOutput.empty(), members).finished
        for slot, resource in scheduler.resources.take_loads():  # a load that failed has made room
            self.executor.load(slot, resource)
        return ended

    def _execute(self, plan: StepPlan) -> bool:
        """Launch a step; without the sampling of one that waits for the host. False if it does not fit the memory."""
        for observer in self.observers:
            observer.planned(plan)
        try:
            self.executor.execute(plan)
        except DeviceMemoryError as error:
            return self._retry_smaller(plan, error)
        if self.groups.keys:
            self.groups.start_forks()
        return plan.waits_for_host or self._sample(plan)

    def _sample(self, plan: StepPlan, inputs: SampleInputs | None = None) -> bool:
        try:
            self.results.append(self.executor.sample(inputs))
        except DeviceMemoryError as error:
            return self._retry_smaller(plan, error)
        if not self.step_size.is_normal:
            self.step_size.fitted()
        return True

    def _is_result_due(self, plan: StepPlan | None) -> bool:
        if plan is None:
            resources = self.scheduler.resources
            waits = self.results or not len(self.scheduler) or (resources.num_slots and resources.is_busy)
            assert waits, "requests wait, nothing is in flight, nothing can run"
            return bool(self.results)
        return len(self.results) + plan.waits_for_host > self.lookahead and bool(self.results)

    def _update(self) -> EngineOutput:
        result = self.results.popleft().result()
        for observer in self.observers:
            observer.finished(result)
        output = self.scheduler.update(result)
        members = self.scheduler.take_member_results()
        return output if members is None else self.groups.update(output, members)

    def _retry_smaller(self, plan: StepPlan, error: DeviceMemoryError) -> bool:
        """Recompute all running requests in smaller steps after one did not fit the device's memory."""
        if not self.step_size.failed(plan.total_tokens):
            raise error
        self._start_over()
        return False

    def _start_over(self) -> None:
        self.results.clear()
        self.scheduler.start_over()
        for observer in self.observers:
            observer.restarted()

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
        except BaseException:  # an interrupt in the middle of a step: nothing is known about what it computed
            self._start_over()
            raise

    def seconds_to_wait(self) -> float:
        """Seconds that planning the next step can wait, so that requests which arrive meanwhile are part of it."""
        if self.pacing is None or len(self.scheduler.waiting) or not self.scheduler.rows.num_free:
            return 0.0
        return self.pacing.seconds()

    def has_work(self) -> bool:
        return bool(len(self.scheduler) or self.results or self.groups.keys or self.pending.requests)

    def add(self, request: EngineRequest) -> None:
        resources = self.scheduler.resources
        waiting = len(self.groups.beams.waiting) + len(self.pending.requests)
        self.admission.check(request, waiting + (len(resources) if resources.num_slots else 0))
        if request.guide is None or not self.pending.hold(request):
            self._queue(request)

    def _queue_prepared(self) -> list[Finished]:
        """Queue requests whose guides are prepared. Returns the ends of those that cannot run."""
        ended: list[Finished] = []
        is_idle = not (len(self.scheduler) or self.results)
        for request, error in self.pending.take_ready(_IDLE_SECONDS if is_idle else 0.0):
            try:
                if error is not None:
                    raise RequestError(error)
                self._queue(request)
            except Exception as refused:  # a request that cannot be queued must not end the others
                if not isinstance(refused, RequestError):
                    logger.exception("The request with key %d could not be queued", request.key)
                for each in (request, *request.forks):
                    self.abort(each.key)
                    tokens = None if each.stream else np.zeros(0, np.int32)
                    ended.append(Finished(each.key, FinishReason.ERROR, None, tokens, str(refused)))
        return ended

    def _queue(self, request: EngineRequest) -> None:
        if request.forks or request.beam is not None:
            self.groups.add(request)
        else:
            self.scheduler.add(request)
        self.deadlines.add(request)

    def abort(self, key: int, num_kept: int | None = None) -> bool:
        return self.groups.abort(key) or self.scheduler.abort(key, num_kept) or self.pending.abort(key)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False while requests run."""
        while self.results and not len(self.scheduler):
            self._update()
        return self.scheduler.cache.reset()

    def resource_targets(self) -> AdapterTargets | None:
        """Return what resources such as adapters must fit; None if the engine takes none."""
        return self.targets

    def start_counting(self) -> None:
        """Forget what was counted so far. A server calls this after the warm-up token."""
        self.scheduler.stats, self.scheduler.cache.stats = SchedulerStats(), CacheStats()
        self.scheduler.resources.stats = ResourceStats()
        self.scheduler.guides.stats = GuideStats()
        self.experts.total = None

    def stats(self) -> EngineStats:
        """Gauges, and the counters of all parts of the core, which have the names of EngineStats."""
        scheduler, cache = self.scheduler, self.scheduler.cache
        counted = (
            scheduler.stats,
            scheduler.guides.stats,
            cache.stats,
            cache.pool.times,
            cache.tier.stats,
            self.graphs.use,
            scheduler.resources.stats,
        )
        return EngineStats(
            num_running=len(scheduler.rows),
            num_waiting=len(scheduler.waiting)
            + len(scheduler.resources)
            + len(self.groups.beams.waiting)
            + len(self.pending.requests),
            resource_slots=scheduler.resources.num_slots,
            resource_slots_used=scheduler.resources.num_used,
            num_waiting_tokens=scheduler.waiting.num_prompt_tokens,
            num_blocks=cache.pool.usable if cache.num_groups else 0,  # without a cache, a pool still has one
            num_used_blocks=cache.pool.num_used,
            num_cached_blocks=cache.pool.num_cached,
            evictions=cache.pool.evictions,
            sliding_window=cache.sliding_window,
            host_blocks=cache.tier.num_blocks,
            host_used_blocks=cache.tier.num_used,
            host_cached_blocks=cache.tier.num_cached,
            refused_requests=self.admission.num_refused,
            timeouts_foreseen=self.deadlines.num_foreseen,
            expert_tokens=self.experts.tokens(),
            **{field.name: getattr(part, field.name) for part in counted for field in fields(part)},
        )

    def snapshot(self, since_step: int = 0) -> Snapshot:
        """Running and waiting requests and their blocks, for the engine view."""
        return take_snapshot(self, since_step)

    def close(self) -> None:
        self.results.clear()
        self.executor.close()
