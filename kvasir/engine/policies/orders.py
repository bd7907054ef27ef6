"""Orders of the queue: by arrival, by priority, by deadline, and by turns of weighted tenants. Core process."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.policies.base import Context, Policy, RankedPolicy, RequestHeap, TokenCountingPolicy
from kvasir.engine.request import Request

_NUM_CHECKED = 8  # next requests that are checked in every step; a step seldom admits more
_MAX_IDLE_TENANTS = 1024  # tenants without requests that are remembered


class FirstComeFirstServed(Policy):
    """Admits requests in order of arrival and preempts the latest one, so no request starves and the oldest is never
    preempted."""

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(context)
        self._waiting: OrderedDict[int, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def add(self, request: Request) -> None:
        self._waiting[request.key] = request

    def put_back(self, request: Request) -> None:
        self._waiting[request.key] = request
        self._waiting.move_to_end(request.key, last=False)

    def peek(self) -> Request:
        return next(iter(self._waiting.values()))

    def remove(self, request: Request) -> None:
        del self._waiting[request.key]

    def select_to_preempt(self, running: list[Request]) -> Request:
        return running[-1]


class Priority(Policy):
    """Admits the request with the lowest value, and requests of equal value in order of arrival. It preempts in the
    reverse order. Without aging, enough requests of lower values starve a request.

    With aging (`aging_seconds` A, `aging_best` b), the value of a request falls by one for every A seconds since its
    arrival, down to b. Values of b or lower do not change. So a request of value p > b waits only for requests of
    values below b, and for those of value q >= b that arrived less than (p - q) * A seconds after it. No request
    starves as long as requests of values below b leave room.
    """

    # Requests that age reach b in the order of value * A + arrival, which is constant. Requests that have reached b,
    # or do not age, are ordered by value and arrival and go before all that still age.

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(context)
        self._period = self.context.aging_seconds
        self._best = self.context.aging_best if self._period else float("inf")
        self._aging = RequestHeap(self._settles_at)
        self._settled = RequestHeap(lambda request: (min(request.spec.terms.priority, self._best), request.arrival))

    def __len__(self) -> int:
        return len(self._aging) + len(self._settled)

    def __iter__(self) -> Iterator[Request]:
        now = self.context.clock()
        return iter(sorted([*self._aging, *self._settled], key=lambda request: self._rank(request, now)))

    def add(self, request: Request) -> None:
        ages = request.spec.terms.priority > self._best
        (self._aging if ages else self._settled).add(request)

    def peek(self) -> Request:
        now = self.context.clock()
        while len(self._aging) and self._settles_at(self._aging.peek()) <= now:
            settled = self._aging.peek()
            self._aging.remove(settled)
            self._settled.add(settled)
        return self._settled.peek() if len(self._settled) else self._aging.peek()

    def remove(self, request: Request) -> None:
        (self._settled if request in self._settled else self._aging).remove(request)

    def select_to_preempt(self, running: list[Request]) -> Request:
        now = self.context.clock()
        return max(running, key=lambda request: self._rank(request, now))

    def _settles_at(self, request: Request) -> float:
        """Time at which the request's value reaches `aging_best`."""
        return request.arrival + (request.spec.terms.priority - self._best) * self._period

    def _rank(self, request: Request, now: float) -> tuple[float, float, int, int]:
        value: float = request.spec.terms.priority
        if value > self._best:
            value = self._best + max(0.0, self._settles_at(request) - now) / self._period
        return value, request.arrival, request.seq, request.key


class EarliestDeadlineFirst(RankedPolicy):
    """Admits the request with the earliest deadline and preempts the one with the latest. A request without a deadline
    is ordered as if its deadline were `default_deadline` seconds after its arrival, but it is not ended then.

    No request starves: requests that arrive after a request's deadline (or default deadline) are ordered behind it.

    A waiting request is ended early, so that others can use its time, in two cases:
    - It certainly misses its deadline: it would even in the fastest recent steps, with the fewest tokens that it may
      generate, and with cached tokens not recomputed. This is checked on arrival and when it is one of the next.
    - It probably misses its deadline: it is one of the next, it had to wait and others wait too, it may generate more
      tokens than there is time for, and fewer than `least_chance` of the recent requests were as fast as it would have
      to be. Without this rule an overloaded engine would only run requests that are about to time out.
    No request is ended early before enough steps and requests were measured.
    """

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(context)
        self._new: deque[Request] = deque()  # not checked yet
        self._arrival_step: dict[int, int] = {}  # by key

    def rank(self, request: Request) -> tuple[float, float]:
        deadline = request.spec.terms.deadline
        return request.arrival + self.context.default_deadline if deadline is None else deadline, request.arrival

    def add(self, request: Request) -> None:
        super().add(request)
        self._new.append(request)
        self._arrival_step[request.key] = self.context.service_rate.num_steps

    def remove(self, request: Request) -> None:
        super().remove(request)
        del self._arrival_step[request.key]

    def find_unreachable(self) -> tuple[Request, str] | None:
        while self._new:
            request = self._new.popleft()
            if request in self._waiting and (reason := self._late_reason(request, False)) is not None:
                return request, reason
        for request in self._waiting.first(_NUM_CHECKED):
            had_to_wait = len(self) > 1 and self.context.service_rate.num_steps > self._arrival_step[request.key] + 1
            if (reason := self._late_reason(request, had_to_wait)) is not None:
                return request, reason
        return None

    def _late_reason(self, request: Request, had_to_wait: bool) -> str | None:
        """Return why the request will miss its deadline; None if it may meet it."""
        spec, rate = request.spec, self.context.service_rate
        if spec.terms.deadline is None or spec.awaited:  # a beam ends with its search, not by itself
            return None
        left = spec.terms.deadline - self.context.clock()
        generated = len(request.token_ids) - request.num_prompt_tokens
        if rate.usual_seconds(len(request.token_ids), spec.max_tokens - generated) <= left:
            return None
        to_compute = self.context.tokens_to_compute(request)
        needed = rate.least_seconds(to_compute, max(1, spec.min_tokens - generated))
        if needed > left:
            return f"its deadline is {max(left, 0.0):.3g} s away and it needs at least {needed:.3g} s"
        chance = rate.chance(left) if had_to_wait else 1.0
        if chance < self.context.least_chance and rate.usual_seconds(to_compute, spec.max_tokens - generated) > left:
            return f"its deadline is {left:.3g} s away, and only {chance:.0%} of recent requests were that fast"
        return None


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
