"""A snapshot of the core for the engine view: running and waiting requests and their blocks. Core process.

It is made only on request. Asking also turns on a log of steps, which turns itself off when no one asks any more.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from kvasir.engine.cache.manager import KVCacheManager
from kvasir.engine.request import Request
from kvasir.engine.rows import Rows
from kvasir.engine.stats import RequestSnapshot, Snapshot, StepSnapshot
from kvasir.messages import NULL_BLOCK, Int32Array, StepPlan, StepResult

if TYPE_CHECKING:
    from kvasir.engine.core import EngineCore

MOST_WAITING = 100  # waiting requests that are described one by one
NUM_STEPS = 600  # steps that the log keeps
LOG_SECONDS = 10.0  # without a question, after which the log is turned off


def take_snapshot(core: EngineCore, since_step: int = 0) -> Snapshot:
    """The state of the core now, and the steps after number `since_step` as far as they were logged."""
    rows, cache = core.scheduler.rows, core.scheduler.cache
    held, num_held = _held_blocks(cache, rows)
    return Snapshot(
        time=time.time(),
        stats=core.stats(),
        memory=replace(core.memory, graphs=core.graphs.use.graph_bytes),
        block_size=cache.block_size,
        block_bytes=core.block_bytes,
        running=[_running(rows, row) for row in rows.order.tolist()],
        waiting=[_picture(request) for request in islice(core.scheduler.waiting, MOST_WAITING)],
        held=held,
        num_held=num_held,
        cached=cache.pool.cached_blocks(),
        steps=_logged_steps(core, since_step),
    )


def _held_blocks(cache: KVCacheManager, rows: Rows) -> tuple[Int32Array, Int32Array]:
    """The blocks of every running row, in all KV groups."""
    order = rows.order
    if not cache.num_groups:  # the model has no cache
        return np.zeros(0, np.int32), np.zeros(len(order), np.int32)
    columns = np.arange(int(cache.num_blocks[order].max(initial=0)))
    tables = [cache.tables[group * cache.max_rows + order, : len(columns)] for group in range(cache.num_groups)]
    used = columns < cache.num_blocks[order][:, None]
    table = np.concatenate([np.where(used, part, NULL_BLOCK) for part in tables], axis=1)
    return table[table != NULL_BLOCK], (table != NULL_BLOCK).sum(axis=1, dtype=np.int32)


def _running(rows: Rows, row: int) -> RequestSnapshot:
    request = rows.requests[row]
    assert request is not None, f"row {row} has no request"
    return _picture(request, int(rows.num_computed[row]), int(rows.num_known[row]))


def _picture(request: Request, num_computed: int = 0, num_known: int | None = None) -> RequestSnapshot:
    known = len(request.token_ids) if num_known is None else num_known
    arrival = request.spec.terms.arrival
    return RequestSnapshot(
        key=request.key,
        num_prompt=request.num_prompt_tokens,
        num_computed=num_computed,
        num_output=known - request.num_prompt_tokens,
        max_output=request.spec.max_tokens,
        num_cached=request.num_cached_tokens or 0,
        num_preemptions=request.num_preemptions,
        waited=time.monotonic() - arrival if arrival else 0.0,
    )


class StepLog:
    """Records the last steps, as an observer of the core."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._steps: deque[StepSnapshot] = deque(maxlen=NUM_STEPS)
        self._preemptions = core.scheduler.stats.preemptions
        self.last_asked = time.monotonic()

    def planned(self, plan: StepPlan) -> None:
        if time.monotonic() - self.last_asked > LOG_SECONDS:
            self._core.observers = [observer for observer in self._core.observers if observer is not self]
            return
        scheduler = self._core.scheduler
        total = scheduler.stats.preemptions
        self._steps.append(
            StepSnapshot(
                step=plan.step,
                time=time.time(),
                prompt_tokens=plan.total_tokens - plan.num_decodes,
                decode_tokens=plan.num_decodes,
                sampled=int(plan.samples.sum()),
                num_running=len(scheduler.rows),
                num_waiting=len(scheduler.waiting),
                preemptions=total - self._preemptions,
            )
        )
        self._preemptions = total

    def finished(self, result: StepResult) -> None:
        pass

    def restarted(self) -> None:
        pass

    def steps_since(self, step: int) -> list[StepSnapshot]:
        return [picture for picture in self._steps if picture.step > step]


def _logged_steps(core: EngineCore, since: int) -> list[StepSnapshot]:
    """The logged steps after number `since`. Turns the log on if it is off."""
    log = next((observer for observer in core.observers if isinstance(observer, StepLog)), None)
    if log is None:
        log = StepLog(core)
        core.observers = [*core.observers, log]
    log.last_asked = time.monotonic()
    return log.steps_since(since)
