"""The waiting requests: their order, by a policy, the limits of the queue, and deadlines. Core process.

The queue does what every policy needs: it puts requests that others wait for (beams of one search) first, counts
waiting prompt tokens, and reports to token-counting policies how many tokens were computed for running requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.policies import FairShare, Policy, TokenCountingPolicy
from kvasir.engine.request import Request
from kvasir.engine.rows import Rows
from kvasir.errors import OverloadedError
from kvasir.messages import EngineRequest, Finished, FinishReason

if TYPE_CHECKING:
    from kvasir.engine.request_groups import RequestGroups
    from kvasir.engine.scheduler import Scheduler


class Queue:
    """Waiting requests. Requests that were preempted wait here, too."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._counting = policy if isinstance(policy, TokenCountingPolicy) else None
        self.sharing = policy if isinstance(policy, FairShare) else None
        self.ends_early = type(policy).find_unreachable is not Policy.find_unreachable  # before their deadline
        self.num_prompt_tokens = 0  # sum over all waiting requests
        self._awaited: dict[int, Request] = {}  # requests that others wait for; they are admitted first

    def __len__(self) -> int:
        return len(self._awaited) + len(self.policy)

    def __iter__(self) -> Iterator[Request]:
        """Waiting requests in the order of admission, as far as the policy knows it."""
        return chain(self._awaited.values(), self.policy)

    def add(self, request: Request) -> None:
        self.num_prompt_tokens += request.num_prompt_tokens
        self.policy.add(request)

    def put_back(self, request: Request) -> None:
        """Queue a preempted request, or a fork of one that runs."""
        self.num_prompt_tokens += request.num_prompt_tokens
        if request.spec.awaited:
            self._awaited[request.key] = request
        else:
            self.policy.put_back(request)

    def peek(self) -> Request:
        return next(iter(self._awaited.values())) if self._awaited else self.policy.peek()

    def remove(self, request: Request) -> None:
        self.num_prompt_tokens -= request.num_prompt_tokens
        if self._awaited.pop(request.key, None) is None:
            self.policy.remove(request)

    def select_to_preempt(self, running: list[Request]) -> Request:
        return self.policy.select_to_preempt(running)

    def find_unreachable(self) -> tuple[Request, str] | None:
        return self.policy.find_unreachable() if len(self.policy) else None

    # ------------------------------------------------------------ counts for the policy

    def join(self, rows: Rows, row: int) -> None:
        """Report an admitted request and its known tokens, before the policy chooses the next request."""
        request = rows.requests[row]
        assert request is not None, f"row {row} has no request"
        if self.sharing is not None:
            rows.account[row] = self.sharing.join(request)
        if self._counting is None:
            return
        known = int(rows.num_known[row])
        counted = max(int(rows.num_computed[row]), request.num_counted)
        rows.num_counted[row] = max(known, counted)
        rows.account[row] = self._counting.account(request)
        self._counting.join(request, max(0, known - counted))

    def count(self, rows: Rows, which: NDArray[np.int64]) -> None:
        """Report the tokens that were computed for these rows since the last call."""
        if self._counting is not None and len(which):
            new = np.maximum(rows.num_computed[which] - rows.num_counted[which], 0)
            rows.num_counted[which] += new
            self._counting.count(np.bincount(rows.account[which], weights=new).astype(np.float64))

    def leave(self, rows: Rows, which: list[int]) -> None:
        """Report requests that leave their rows, and their last tokens."""
        if self.sharing is not None:
            for row in which:
                request = rows.requests[row]
                assert request is not None, f"row {row} has no request"
                self.sharing.leave(request)
        if self._counting is None:
            return
        self.count(rows, np.array(which, np.int64))
        for row in which:
            request = rows.requests[row]
            assert request is not None, f"row {row} has no request"
            request.num_counted = int(rows.num_counted[row])
            self._counting.leave(request)


# ------------------------------------------------------------ limits

_MIN_RETRY, _MAX_RETRY = 1.0, 60.0  # seconds after which a client should try again


@dataclass(slots=True, frozen=True)
class QueueLimits:
    """Upper bounds of the queue; 0 means none."""

    max_requests: int = 0  # requests that wait while all rows are taken
    max_tokens: int = 0  # prompt tokens of waiting requests


class Admission:
    """Checks every new request against the queue's limits."""

    def __init__(self, limits: QueueLimits, scheduler: Scheduler) -> None:
        self.limits = limits
        self.num_refused = 0
        self._scheduler = scheduler

    def check(self, request: EngineRequest, num_others: int) -> None:
        """Refuse a request for which the queue has no room. `num_others` requests wait outside the scheduler."""
        queue, limits = self._scheduler.waiting, self.limits
        if not (limits.max_requests or limits.max_tokens):
            return
        waiting = len(queue) + num_others
        tokens = queue.num_prompt_tokens + len(request.prompt_token_ids)
        many = limits.max_requests and waiting >= limits.max_requests + self._scheduler.rows.num_free
        long = limits.max_tokens and waiting and tokens > limits.max_tokens
        if not (many or long) or self._has_share(request):
            return
        if many:
            self._refuse(f"{waiting} requests wait, and max_queued_requests={limits.max_requests}", waiting)
        else:
            self._refuse(
                f"with this one, prompts of {tokens} tokens would wait, and max_queued_tokens={limits.max_tokens}",
                waiting,
            )

    def _has_share(self, request: EngineRequest) -> bool:
        """Whether the request's tenant has less in a full queue than its equal part of the limits. If so, others cannot
        keep it out."""
        sharing, limits, tenant = self._scheduler.waiting.sharing, self.limits, request.terms.tenant
        if sharing is None:
            return False
        tenants = sharing.num_tenants_with(tenant)
        if tenants == 1:
            return False
        num_requests, num_tokens = sharing.num_waiting_of(tenant)
        has_place = not limits.max_requests or num_requests < limits.max_requests / tenants
        num_tokens += len(request.prompt_token_ids)
        return has_place and (not limits.max_tokens or not num_requests or num_tokens <= limits.max_tokens / tenants)

    def _refuse(self, what: str, waiting: int) -> None:
        self.num_refused += 1
        seconds = self._retry_after(waiting)
        raise OverloadedError(f"the queue is full: {what}; try again in {seconds:.0f} s", seconds)

    def _retry_after(self, waiting: int) -> float:
        """Whole seconds until half of the waiting requests are served, at the current rate."""
        context = self._scheduler.context
        rate = context.service_rate.ends_per_second(context.clock())
        return float(math.ceil(min(max(waiting / 2 / rate, _MIN_RETRY), _MAX_RETRY))) if rate else _MIN_RETRY


# ------------------------------------------------------------ deadlines

_MAX_STALE = 256  # entries of requests that have ended which may stay in the heap


class DeadlineMonitor:
    """Ends requests whose deadline has passed, running or waiting, and those that cannot meet it if the policy says so.

    It costs one look at the clock per step, however many requests there are.
    """

    def __init__(self, scheduler: Scheduler, groups: RequestGroups) -> None:
        self._scheduler = scheduler
        self._groups = groups
        self._heap: list[tuple[float, int, float, bool]] = []  # deadline, key, arrival, whether tokens are streamed
        self.num_foreseen = 0  # requests ended before their deadline

    def add(self, request: EngineRequest) -> None:
        """Note the deadlines of a request and of its forks."""
        for each in (request, *request.forks):
            if each.terms.deadline is not None:
                heappush(self._heap, (each.terms.deadline, each.key, each.terms.arrival, each.stream))
        if len(self._heap) > 2 * (len(self._scheduler) + len(self._groups.keys)) + _MAX_STALE:
            self._heap = [entry for entry in self._heap if entry[1] in self._scheduler or entry[1] in self._groups.keys]
            heapify(self._heap)

    def expire(self) -> list[Finished]:
        """End the requests that are out of time, and return their Finished messages."""
        ended: list[Finished] = []
        now = self._scheduler.context.clock()
        while self._heap and self._heap[0][0] <= now:
            deadline, key, arrival, stream = heappop(self._heap)
            where = "while it ran" if self._is_running(key) else "while it waited"
            allowed = round(deadline - arrival, 6)  # to the microsecond: a large clock reading blurs what is below
            limit = f"of {allowed:.10g} s " if arrival else ""
            ended += self._end(key, stream, f"its deadline {limit}passed {where}")
        if self._scheduler.waiting.ends_early:
            while (late := self._scheduler.waiting.find_unreachable()) is not None:
                request, why = late
                owner = self._groups.owner(request.spec)
                assert owner is not None, "a search ends together with its beams"
                ended += self._end(owner.key, owner.stream, why)
                self.num_foreseen += 1
        return ended

    def _is_running(self, key: int) -> bool:
        return self._scheduler.num_computed(key) > 0 or self._groups.beams.is_running(key)

    def _end(self, key: int, stream: bool, why: str) -> list[Finished]:
        """End one request. Empty if it has ended before."""
        runs = self._is_running(key)
        if self._groups.abort(key):
            self._scheduler.count_timeout(runs)
            tokens = None if stream else np.zeros(0, np.int32)
            return [Finished(key, FinishReason.TIMEOUT, None, tokens, why)]
        found = self._scheduler.end(key, FinishReason.TIMEOUT, why)
        return [] if found is None else [found]
