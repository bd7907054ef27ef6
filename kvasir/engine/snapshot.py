"""A picture of the core, made only when somebody asks: who runs and waits, and which block is whose. Core process."""

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

MOST_WAITING = 100  # that are described one by one


def take_snapshot(core: EngineCore, since_step: int = 0) -> Snapshot:
    """`since_step`: steps up to that number are known to whoever asks."""
    rows, cache = core.scheduler.rows, core.scheduler.cache
    held, num_held = _held_blocks(cache, rows)
    return Snapshot(
        time=time.time(),
        stats=core.stats(),
        memory=replace(core.memory, graphs=core.graphs.bytes),
        block_size=cache.block_size,
        block_bytes=core.block_bytes,
        running=[_running(rows, row) for row in rows.order.tolist()],
        waiting=[_picture(request) for request in islice(core.scheduler.waiting, MOST_WAITING)],
        held=held,
        num_held=num_held,
        cached=cache.pool.cached_blocks(),
        steps=steps_for_a_watcher(core, since_step),
    )


def _held_blocks(cache: KVCacheManager, rows: Rows) -> tuple[Int32Array, Int32Array]:
    """Every running row's blocks, those of all groups of layers together."""
    order = rows.order
    columns = np.arange(int(cache.num_blocks[order].max(initial=0)))
    tables = [cache.tables[group * cache.max_rows + order, : len(columns)] for group in range(cache.num_groups)]
    used = columns < cache.num_blocks[order][:, None]
    table = np.concatenate([np.where(used, part, NULL_BLOCK) for part in tables], axis=1)
    return table[table != NULL_BLOCK], (table != NULL_BLOCK).sum(axis=1, dtype=np.int32)


def _running(rows: Rows, row: int) -> RequestPicture:
    request = rows.requests[row]
    assert request is not None, f"row {row} has no tenant"
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


# ----------------------------------------------------------------
# Whether anybody watches the steps. Core process.
#
# Nobody, usually: then a step costs one call of a method that does nothing. Whoever asks for a snapshot turns the log
# on, and it turns itself off when nobody has asked for some seconds.

NUM_STEPS = 600  # that are remembered
PATIENCE = 10.0  # seconds without a question after which nobody is watching


class Unwatched:
    def planned(self, plan: StepPlan) -> None:
        pass

    def steps_since(self, step: int) -> list[StepPicture]:
        return []


class StepLog:
    """Remembers the last steps. `asked` is when somebody last looked."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._steps: deque[StepPicture] = deque(maxlen=NUM_STEPS)
        self._preemptions = core.scheduler.stats.preemptions
        self.asked = time.monotonic()

    def planned(self, plan: StepPlan) -> None:
        if time.monotonic() - self.asked > PATIENCE:
            self._core.watch = Unwatched()
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


def steps_for_a_watcher(core: EngineCore, since: int) -> list[StepPicture]:
    """The steps after number `since`; from now on they are remembered."""
    if not isinstance(core.watch, StepLog):
        core.watch = StepLog(core)
    core.watch.asked = time.monotonic()
    return core.watch.steps_since(since)
