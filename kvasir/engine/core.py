"""The engine's loop: schedule, execute, update. Core process; holds no tensor and no text."""

from __future__ import annotations

from collections import deque
from dataclasses import fields, replace

from kvasir.engine.deadlines import DeadlineMonitor
from kvasir.engine.observers import GraphCounter, StepObserver, StepTimer
from kvasir.engine.queue import Admission, QueueLimits
from kvasir.engine.request_groups import RequestGroups
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.snapshot import take_snapshot
from kvasir.engine.step_size import StepSize
from kvasir.errors import DeviceMemoryError, EngineDeadError, EngineError
from kvasir.executor.base import Executor
from kvasir.messages import EngineOutput, EngineRequest, EngineStats, SampleInputs, Snapshot, StepFuture, StepPlan

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
        self.admission = Admission(queue_limits or QueueLimits(), scheduler)
        self.deadlines = DeadlineMonitor(scheduler, self.groups)
        self.step_size = StepSize(scheduler)
        self.graphs = GraphCounter()
        self.observers: list[StepObserver] = [StepTimer(scheduler), self.graphs]
        self.memory = executor.memory()  # asked now: no other call may reach the executor while a step is in flight
        self.block_bytes = executor.kv_spec().block_bytes
        self.results: deque[StepFuture] = deque()
        self._failure: BaseException | None = None

    def step(self) -> EngineOutput:
        """Plan and launch a step, then take in the oldest result if one is due."""
        expired = self.deadlines.expire()
        plan = self.scheduler.schedule()
        fits = plan is None or self._execute(plan)
        output = self._update() if fits and self._is_result_due(plan) else NO_OUTPUT
        if plan is not None and fits and plan.waits_for_host:
            assert not self.results, "guided requests run at most one step ahead"
            fits = self._sample(plan, self.scheduler.sample_inputs())
            output = self._update() if fits and not self.lookahead else output
        return replace(output, finished=expired + output.finished) if expired else output

    def _execute(self, plan: StepPlan) -> bool:
        """Launch a step; without the sampling of one that waits for the host. False if it does not fit the memory."""
        for observer in self.observers:
            observer.planned(plan)
        try:
            self.executor.execute(plan)
        except DeviceMemoryError as error:
            return self._retry_smaller(plan, error)
        if len(self.groups):
            self.groups.start_forks()
        return plan.waits_for_host or self._sample(plan)

    def _sample(self, plan: StepPlan, inputs: SampleInputs | None = None) -> bool:
        try:
            self.results.append(self.executor.sample(inputs))
        except DeviceMemoryError as error:
            return self._retry_smaller(plan, error)
        self.step_size.fitted()
        return True

    def _is_result_due(self, plan: StepPlan | None) -> bool:
        if plan is None:
            assert self.results or not len(self.scheduler), "requests wait, nothing is in flight, nothing can run"
            return bool(self.results)
        return len(self.results) + plan.waits_for_host > self.lookahead and bool(self.results)

    def _update(self) -> EngineOutput:
        result = self.results.popleft().result()
        for observer in self.observers:
            observer.finished(result)
        output = self.scheduler.update(result)
        return self.groups.update(output) if len(self.groups) else output

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

    def has_work(self) -> bool:
        return bool(len(self.scheduler) or self.results or len(self.groups))

    def add(self, request: EngineRequest) -> None:
        self.admission.check(request, self.groups.beams.num_waiting)
        self.groups.add(request)
        self.deadlines.add(request)

    def abort(self, key: int, num_kept: int | None = None) -> bool:
        return self.groups.abort(key) or self.scheduler.abort(key, num_kept)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False while requests run."""
        while self.results and not len(self.scheduler):
            self.scheduler.update(self.results.popleft().result())
        return self.scheduler.cache.reset()

    def stats(self) -> EngineStats:
        """Gauges, and the counters of all parts of the core, which have the names of EngineStats."""
        scheduler, cache = self.scheduler, self.scheduler.cache
        counted = (scheduler.stats, cache.stats, cache.tier.stats, self.graphs.use)
        return EngineStats(
            num_running=len(scheduler.rows),
            num_waiting=len(scheduler.waiting) + self.groups.beams.num_waiting,
            num_waiting_tokens=scheduler.waiting.num_prompt_tokens,
            num_blocks=cache.pool.usable,
            num_used_blocks=cache.pool.num_used,
            num_cached_blocks=cache.pool.num_cached,
            evictions=cache.pool.evictions,
            host_blocks=cache.tier.num_blocks,
            host_used_blocks=cache.tier.num_used,
            host_cached_blocks=cache.tier.num_cached,
            refused_requests=self.admission.num_refused,
            timeouts_foreseen=self.deadlines.num_foreseen,
            **{field.name: getattr(part, field.name) for part in counted for field in fields(part)},
        )

    def snapshot(self, since_step: int = 0) -> Snapshot:
        """Running and waiting requests and their blocks, for the engine view."""
        return take_snapshot(self, since_step)

    def close(self) -> None:
        self.results.clear()
        self.executor.close()
