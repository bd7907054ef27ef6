"""A snapshot of the core for the engine page: running and waiting requests, blocks, recent steps. Core process."""

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
from kvasir.messages import NULL_BLOCK, Int32Array, RequestPicture, Snapshot, StepPicture, StepPlan

if TYPE_CHECKING:
    from kvasir.engine.core import EngineCore

MAX_WAITING = 100  # waiting requests described in a snapshot


def take_snapshot(core: EngineCore, since_step: int = 0) -> Snapshot:
    """Describe the core now. Steps up to number `since_step` are left out of the log."""
    rows, cache = core.scheduler.rows, core.scheduler.cache
    held, num_held = _held_blocks(cache, rows)
    return Snapshot(
        time=time.time(),
        stats=core.stats(),
        memory=replace(core.memory, graphs=core.graphs.bytes),
        block_size=cache.block_size,
        block_bytes=core.block_bytes,
        running=[_running(rows, row) for row in rows.order.tolist()],
        waiting=[_picture(request) for request in islice(core.scheduler.waiting, MAX_WAITING)],
        held=held,
        num_held=num_held,
        cached=cache.pool.cached_blocks(),
        steps=recent_steps(core, since_step),
    )


def _held_blocks(cache: KVCacheManager, rows: Rows) -> tuple[Int32Array, Int32Array]:
    """The blocks of every running row in all KV groups, concatenated, and their number per row."""
    order = rows.order
    columns = np.arange(int(cache.num_blocks[order].max(initial=0)))
    tables = [cache.tables[group * cache.max_rows + order, : len(columns)] for group in range(cache.num_groups)]
    used = columns < cache.num_blocks[order][:, None]
    table = np.concatenate([np.where(used, part, NULL_BLOCK) for part in tables], axis=1)
    return table[table != NULL_BLOCK], (table != NULL_BLOCK).sum(axis=1, dtype=np.int32)


def _running(rows: Rows, row: int) -> RequestPicture:
    request = rows.requests[row]
    assert request is not None, f"row {row} has no request"
    return _picture(request, int(rows.num_computed[row]), int(rows.num_known[row]))


def _picture(request: Request, num_computed: int = 0, num_known: int | None = None) -> RequestPicture:
    known = len(request.token_ids) if num_known is None else num_known
    arrival = request.spec.terms.arrival
    return RequestPicture(
        key=request.key,
        num_prompt=request.num_prompt_tokens,
        num_computed=num_computed,
        num_output=known - request.num_prompt_tokens,
        max_output=request.spec.max_tokens,
        num_cached=request.num_cached_tokens or 0,
        num_preemptions=request.num_preemptions,
        waited=time.monotonic() - arrival if arrival else 0.0,
    )


# ---------------------------------------------------------------- the log of steps
#
# Usually off: then a step costs one call of an empty method. A snapshot turns it on, and it turns itself off when no
# snapshot was taken for some seconds.

MAX_STEPS = 600  # steps the log keeps
IDLE_SECONDS = 10.0  # time without a snapshot after which the log turns itself off


class NullStepLog:
    def record(self, plan: StepPlan) -> None:
        pass

    def steps_since(self, step: int) -> list[StepPicture]:
        return []


class StepLog:
    """Keeps the last steps. `last_read` is the time of the last snapshot."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._steps: deque[StepPicture] = deque(maxlen=MAX_STEPS)
        self._preemptions = core.scheduler.stats.preemptions
        self.last_read = time.monotonic()

    def record(self, plan: StepPlan) -> None:
        if time.monotonic() - self.last_read > IDLE_SECONDS:
            self._core.step_log = NullStepLog()
            return
        scheduler = self._core.scheduler
        total = scheduler.stats.preemptions
        self._steps.append(
            StepPicture(
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

    def steps_since(self, step: int) -> list[StepPicture]:
        return [picture for picture in self._steps if picture.step > step]


def recent_steps(core: EngineCore, since: int) -> list[StepPicture]:
    """The logged steps after number `since`. Turns the log on if it is off."""
    if not isinstance(core.step_log, StepLog):
        core.step_log = StepLog(core)
    core.step_log.last_read = time.monotonic()
    return core.step_log.steps_since(since)
