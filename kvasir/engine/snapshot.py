"""A picture of the core, made only when somebody asks: who runs and waits, and which block is whose. Core process."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from kvasir.engine.cache.manager import KVCacheManager
from kvasir.engine.request import Request
from kvasir.engine.rows import Rows
from kvasir.engine.watch import steps_for_a_watcher
from kvasir.messages import NULL_BLOCK, Int32Array
from kvasir.snapshot import RequestPicture, Snapshot

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
