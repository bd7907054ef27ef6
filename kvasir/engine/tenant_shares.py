"""Rows, KV blocks and tokens of a step, shared between tenants. Core process.

The scheduler asks for this only while several tenants have requests. Who holds how much, and who gives way to whom, is
decided by the policy (engine/policies/fair.py), which knows no rows and no blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.policies import FairShare
from kvasir.engine.request import Request
from kvasir.messages import NULL_BLOCK, Int32Array

if TYPE_CHECKING:
    from kvasir.engine.cache.manager import IntArray
    from kvasir.engine.scheduler import Scheduler

_SCARCE = 0.1  # share of the blocks: while more are free, tenants need not share them
_MAX_CLAIMS = 32  # waiting requests for which a step makes room


class TenantShares:
    """The shares of tenants in one scheduler."""

    def __init__(self, scheduler: Scheduler, policy: FairShare) -> None:
        self._scheduler = scheduler
        self._policy = policy
        policy.num_rows = scheduler.limits.max_num_seqs
        policy.num_blocks = max(1, scheduler.cache.pool.usable)

    def make_room(self) -> None:
        """Preempt requests of tenants that hold more than others, for waiting requests of those that hold less."""
        scheduler, policy, cache = self._scheduler, self._policy, self._scheduler.cache
        rows = scheduler.rows
        free_rows = rows.num_free
        free_blocks = cache.pool.num_free - scheduler.blocks_still_needed() - scheduler.reserve
        scarce = free_blocks < _SCARCE * cache.pool.usable
        if free_rows and not scarce:
            return
        held = self.count_blocks() if scarce else self._set_blocks(np.zeros(len(rows.requests)))
        claimed: list[Request] = []
        while len(policy) and len(claimed) < _MAX_CLAIMS:
            request = policy.peek()
            prefix = scheduler.find_prefix(request)
            needed = cache.blocks_for(len(request.token_ids)) - cache.blocks_for(prefix.num_tokens)
            needed += cache.pool.num_free - cache.num_free_without(prefix)  # cached or swapped blocks that it takes
            if not free_rows or free_blocks < needed:
                running = [each for row in rows.order.tolist() if (each := rows.requests[row]) is not None]
                lacks_row, missing = not free_rows, needed - free_blocks
                victims = policy.select_to_yield(
                    request, needed, lacks_row, missing, running, lambda each: float(held[each.row])
                )
                if not victims:
                    break
                free_rows += len(victims)
                free_blocks += int(sum(held[each.row] for each in victims))
                for each in victims:
                    scheduler.preempt(each)
            policy.claim(request, needed)
            claimed.append(request)
            free_rows -= 1
            free_blocks -= needed
        policy.drop_claims(claimed)

    def count_blocks(self) -> NDArray[np.float64]:
        """Tell the policy what tenants hold. Returns the blocks of each row; a block that n rows share counts 1/n for
        each."""
        rows, cache = self._scheduler.rows, self._scheduler.cache
        held = np.zeros(len(rows.requests))
        order = rows.order
        used = np.arange(int(cache.num_blocks[order].max(initial=0))) < cache.num_blocks[order][:, None]
        for group in range(cache.num_groups):
            blocks = cache.tables[group * cache.max_rows + order, : used.shape[1]]
            counts = np.maximum(cache.pool.ref_counts[blocks], 1)
            held[order] += np.where(used & (blocks != NULL_BLOCK), 1.0 / counts, 0.0).sum(axis=1)
        return self._set_blocks(held)

    def _set_blocks(self, held: NDArray[np.float64]) -> NDArray[np.float64]:
        rows = self._scheduler.rows
        self._policy.set_blocks(np.bincount(rows.account[rows.order], weights=held[rows.order]))
        return held

    def split_budget(self, rows: IntArray, want: Int32Array, budget: int) -> Int32Array:
        """Split the token budget over tenants, so that the long prompts of one do not stop the others, and the part of
        each over its requests, single tokens first. A tenant without a running request has a part, too, which is left
        for its next request."""
        scheduler, policy = self._scheduler, self._policy
        accounts = scheduler.rows.account[rows]
        demand = np.bincount(accounts, weights=want)
        if len(policy) and scheduler.rows.num_free and policy.holds_nothing(request := policy.peek()):
            account = policy.account(request)
            demand = np.pad(demand, (0, max(0, account + 1 - len(demand))))
            demand[account] += scheduler.context.tokens_to_compute(request)
        if demand.sum() <= budget:
            return want
        grants = np.zeros_like(want)
        for account, part in enumerate(policy.split(demand, budget).astype(np.int64).tolist()):
            own = np.flatnonzero(accounts == account)
            own = own[np.argsort(want[own] > 1, kind="stable")]
            grants[own] = np.clip(part - (np.cumsum(want[own]) - want[own]), 0, want[own])
        return grants
