"""The waiting requests, ordered by a policy. Core process.

The queue does what every policy needs: it puts requests that others wait for (beams of one search) first, counts
waiting prompt tokens, and reports to token-counting policies how many tokens were computed for running requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.policies import Policy, TokenCountingPolicy
from kvasir.engine.request import Request
from kvasir.engine.rows import Rows


class Queue:
    """Waiting requests. Requests that were preempted wait here, too."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._counting = policy if isinstance(policy, TokenCountingPolicy) else None
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

    # ------------------------------------------------------------ token counts for the policy

    def join(self, rows: Rows, row: int) -> None:
        """Report an admitted request and its known tokens, before the policy chooses the next request."""
        if self._counting is None:
            return
        request = rows.requests[row]
        assert request is not None, f"row {row} has no request"
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
        """Report the last tokens of requests that leave their rows."""
        if self._counting is None:
            return
        self.count(rows, np.array(which, np.int64))
        for row in which:
            request = rows.requests[row]
            assert request is not None, f"row {row} has no request"
            request.num_counted = int(rows.num_counted[row])
            self._counting.leave(request)
