"""Weighted round robin over tenants. Shares are measured in tokens, not in requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.policies.base import Context, TokenCountingPolicy
from kvasir.engine.policies.fcfs import FirstComeFirstServed
from kvasir.engine.request import Request

_MAX_IDLE_TENANTS = 1024  # tenants without requests that are remembered


@dataclass(slots=True, eq=False)
class Tenant:
    name: str
    account: int
    weight: float = 1.0
    served: float = 0.0  # computed tokens / weight; the tenant with the lowest value goes first
    waiting: FirstComeFirstServed = field(default_factory=FirstComeFirstServed)
    running: int = 0  # number of running requests
    in_heap: bool = False


class WeightedRoundRobin(TokenCountingPolicy):
    """Admits the oldest request of the tenant with the fewest tokens per weight and preempts a request of the tenant
    with the most. Prompt tokens are counted at admission, without cached ones, and output tokens as they are sampled;
    tokens recomputed after a preemption are not counted again. A tenant's weight is that of its latest request.

    While tenant i waits and gets x tokens, tenant j gets at most w_j * (x / w_i + B / w_i + B / w_j), where
    B = max_num_seqs * max_model_len is the largest number of tokens in a batch. So no tenant starves, and in the long
    run the tokens of tenants that always wait are proportional to their weights. A tenant gets no credit for time
    without waiting requests: when it returns, it starts level with the tenant that is next.
    """

    # `served` only grows, so a tenant's entry in the heap can be too low but never too high; `peek` corrects it.

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(context)
        self._tenants: dict[str, Tenant] = {}
        self._accounts: list[Tenant | None] = []
        self._free_accounts: list[int] = []
        self._forget_at = _MAX_IDLE_TENANTS
        self._heap: list[tuple[float, int, Tenant]] = []
        self._entry_numbers = count()
        self._level = 0.0  # `served` of the tenant admitted last, the lowest of all waiting ones at that time
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        for tenant in sorted(self._tenants.values(), key=lambda tenant: tenant.served):
            yield from tenant.waiting

    def add(self, request: Request) -> None:
        tenant = self._enqueue_tenant(request)
        tenant.weight = request.spec.terms.weight
        tenant.waiting.add(request)

    def put_back(self, request: Request) -> None:
        self._enqueue_tenant(request).waiting.put_back(request)

    def _enqueue_tenant(self, request: Request) -> Tenant:
        tenant = self._tenant(request)
        self._num_waiting += 1
        if not len(tenant.waiting):
            tenant.served = max(tenant.served, self._level)
        if not tenant.in_heap:
            heappush(self._heap, (tenant.served, next(self._entry_numbers), tenant))
            tenant.in_heap = True
        return tenant

    def peek(self) -> Request:
        while True:
            served, _, tenant = self._heap[0]
            if not len(tenant.waiting):
                heappop(self._heap)
                tenant.in_heap = False
            elif served < tenant.served:
                heapreplace(self._heap, (tenant.served, next(self._entry_numbers), tenant))
            else:
                return tenant.waiting.peek()

    def remove(self, request: Request) -> None:
        self._tenants[request.spec.terms.tenant].waiting.remove(request)
        self._num_waiting -= 1

    def select_to_preempt(self, running: list[Request]) -> Request:
        places = range(len(running))
        return running[max(places, key=lambda place: (self._tenant(running[place]).served, place))]

    # ------------------------------------------------------------ token counts

    def account(self, request: Request) -> int:
        return self._tenant(request).account

    def join(self, request: Request, num_tokens: int) -> None:
        tenant = self._tenant(request)
        self._level = max(self._level, min(tenant.served, self._least_waiting()))
        tenant.running += 1
        tenant.served += num_tokens / tenant.weight

    def _least_waiting(self) -> float:
        """Lowest `served` of the waiting tenants. It bounds the level, since a fork is admitted out of turn."""
        return self._tenant(self.peek()).served if self._num_waiting else float("inf")

    def count(self, tokens: NDArray[np.float64]) -> None:
        for account in np.flatnonzero(tokens).tolist():
            tenant = self._accounts[account]
            assert tenant is not None, f"account {account} was freed while its tenant had running requests"
            tenant.served += float(tokens[account]) / tenant.weight

    def leave(self, request: Request) -> None:
        self._tenant(request).running -= 1

    def _tenant(self, request: Request) -> Tenant:
        name = request.spec.terms.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= self._forget_at:
                self._drop_idle_tenants()
            account = self._free_accounts.pop() if self._free_accounts else len(self._accounts)
            tenant = self._tenants[name] = Tenant(name, account, request.spec.terms.weight, self._level)
            self._accounts[account : account + 1] = [tenant]
        return tenant

    def _drop_idle_tenants(self) -> None:
        """Drop tenants without requests, and their counts."""
        for tenant in list(self._tenants.values()):
            if not (len(tenant.waiting) or tenant.running or tenant.in_heap):
                del self._tenants[tenant.name]
                self._accounts[tenant.account] = None
                self._free_accounts.append(tenant.account)
        self._forget_at = len(self._tenants) + _MAX_IDLE_TENANTS
