"""Weighted round robin over tenants, by tokens and not by requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.policies.base import Context, Counting
from kvasir.engine.policies.fcfs import FirstComeFirstServed
from kvasir.engine.request import Request

_MANY_TENANTS = 1024  # so many are remembered although they have no request


@dataclass(slots=True, eq=False)
class Tenant:
    name: str
    account: int
    weight: float = 1.0
    served: float = 0.0  # tokens / weight: the least goes first
    waiting: FirstComeFirstServed = field(default_factory=FirstComeFirstServed)
    running: int = 0
    in_line: bool = False  # has an entry in the heap


class WeightedRoundRobin(Counting):
    """Next is the oldest request of the tenant that was given the fewest tokens for its weight; who was given most
    gives way. Tokens are those computed, the prompt's (at admission, without what was cached) and the output's (as they
    come); recomputing after a preemption is not counted again. A weight is what the tenant's latest request says.

    While a tenant i waits and is given x tokens, another one j is given at most w_j * (x / w_i + B / w_i + B / w_j),
    where B = max_num_seqs * max_model_len is what a batch may hold: nobody starves, and over a long time the tokens of
    tenants that always wait are as their weights. Time without waiting requests earns nothing: whoever comes back
    starts level with the one whose turn it is.
    """

    # `served` only grows, so a tenant's entry in the heap may be too low, never too high: it is put right on top.

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(context)
        self._tenants: dict[str, Tenant] = {}
        self._accounts: list[Tenant | None] = []
        self._free_accounts: list[int] = []
        self._too_many = _MANY_TENANTS
        self._heap: list[tuple[float, int, Tenant]] = []
        self._numbers = count()
        self._level = 0.0  # `served` of the tenant admitted last, which was the least of those that waited
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        for tenant in sorted(self._tenants.values(), key=lambda tenant: tenant.served):
            yield from tenant.waiting

    def add(self, request: Request) -> None:
        tenant = self._line_up(request)
        tenant.weight = request.spec.terms.weight
        tenant.waiting.add(request)

    def put_back(self, request: Request) -> None:
        self._line_up(request).waiting.put_back(request)

    def _line_up(self, request: Request) -> Tenant:
        tenant = self._tenant(request)
        self._num_waiting += 1
        if not len(tenant.waiting):
            tenant.served = max(tenant.served, self._level)
        if not tenant.in_line:
            heappush(self._heap, (tenant.served, next(self._numbers), tenant))
            tenant.in_line = True
        return tenant

    def peek(self) -> Request:
        while True:
            served, _, tenant = self._heap[0]
            if not len(tenant.waiting):
                heappop(self._heap)
                tenant.in_line = False
            elif served < tenant.served:
                heapreplace(self._heap, (tenant.served, next(self._numbers), tenant))
            else:
                return tenant.waiting.peek()

    def remove(self, request: Request) -> None:
        self._tenants[request.spec.terms.tenant].waiting.remove(request)
        self._num_waiting -= 1

    def victim(self, running: list[Request]) -> Request:
        places = range(len(running))
        return running[max(places, key=lambda place: (self._tenant(running[place]).served, place))]

    # ------------------------------------------------------------ counting

    def account(self, request: Request) -> int:
        return self._tenant(request).account

    def join(self, request: Request, num_tokens: int) -> None:
        tenant = self._tenant(request)
        self._level = max(self._level, min(tenant.served, self._least_waiting()))
        tenant.running += 1
        tenant.served += num_tokens / tenant.weight

    def _least_waiting(self) -> float:
        """A fork joins out of turn: the level is never above that of somebody who waits."""
        return self._tenant(self.peek()).served if self._num_waiting else float("inf")

    def served(self, tokens: NDArray[np.float64]) -> None:
        for account in np.flatnonzero(tokens).tolist():
            tenant = self._accounts[account]
            assert tenant is not None, f"account {account} was given up while somebody ran on it"
            tenant.served += float(tokens[account]) / tenant.weight

    def leave(self, request: Request) -> None:
        self._tenant(request).running -= 1

    def _tenant(self, request: Request) -> Tenant:
        name = request.spec.terms.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= self._too_many:
                self._forget()
            account = self._free_accounts.pop() if self._free_accounts else len(self._accounts)
            tenant = self._tenants[name] = Tenant(name, account, request.spec.terms.weight, self._level)
            self._accounts[account : account + 1] = [tenant]
        return tenant

    def _forget(self) -> None:
        """Drop tenants that have no request, and with them what they were given."""
        for tenant in list(self._tenants.values()):
            if not (len(tenant.waiting) or tenant.running or tenant.in_line):
                del self._tenants[tenant.name]
                self._accounts[tenant.account] = None
                self._free_accounts.append(tenant.account)
        self._too_many = len(self._tenants) + _MANY_TENANTS
