"""The waiting requests: a policy's order, with what no policy need care about. Core process.

Requests whose tokens are picked from outside (beams) wait for each other: nobody may stand before one that has run
already, whatever the policy. And the policy is told here what running requests were given, if it wants to know.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.policies import Counting, Policy
from kvasir.engine.request import Request
from kvasir.engine.rows import Rows


class Queue:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._counting = policy if isinstance(policy, Counting) else None
        self.gives_up = type(policy).hopeless is not Policy.hopeless  # whether `hopeless` need be asked
        self.num_prompt_tokens = 0  # of all that wait
        self._awaited: dict[int, Request] = {}  # others wait for them; they stand first

    def __len__(self) -> int:
        return len(self._awaited) + len(self.policy)

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be admitted now, as far as the policy can tell."""
        return chain(self._awaited.values(), self.policy)

    def add(self, request: Request) -> None:
        self.num_prompt_tokens += request.num_prompt_tokens
        self.policy.add(request)

    def put_back(self, request: Request) -> None:
        """A request that ran, or is part of one that did, waits again."""
        self.num_prompt_tokens += request.num_prompt_tokens
        if request.spec.picked:
            self._awaited[request.key] = request
        else:
            self.policy.put_back(request)

    def peek(self) -> Request:
        return next(iter(self._awaited.values())) if self._awaited else self.policy.peek()

    def remove(self, request: Request) -> None:
        self.num_prompt_tokens -= request.num_prompt_tokens
        if self._awaited.pop(request.key, None) is None:
            self.policy.remove(request)

    def victim(self, running: list[Request]) -> Request:
        return self.policy.victim(running)

    def hopeless(self) -> tuple[Request, str] | None:
        return self.policy.hopeless() if len(self.policy) else None

    # ------------------------------------------------------------ telling the policy who was given what

    def join(self, rows: Rows, row: int) -> None:
        """A request has a row. What it brings is counted at once, so that the next in line is chosen knowing it."""
        if self._counting is None:
            return
        request = rows.requests[row]
        assert request is not None, f"row {row} has no tenant"
        known = int(rows.num_known[row])
        counted = max(int(rows.num_computed[row]), request.num_counted)
        rows.num_counted[row] = max(known, counted)
        rows.account[row] = self._counting.account(request)
        self._counting.join(request, max(0, known - counted))

    def count(self, rows: Rows, which: NDArray[np.int64]) -> None:
        """Tell the policy what these rows were given since it last heard of them."""
        if self._counting is not None and len(which):
            new = np.maximum(rows.num_computed[which] - rows.num_counted[which], 0)
            rows.num_counted[which] += new
            self._counting.served(np.bincount(rows.account[which], weights=new).astype(np.float64))

    def leave(self, rows: Rows, which: list[int]) -> None:
        """Requests are about to give up their rows."""
        if self._counting is None:
            return
        self.count(rows, np.array(which, np.int64))
        for row in which:
            request = rows.requests[row]
            assert request is not None, f"row {row} has no tenant"
            request.num_counted = int(rows.num_counted[row])
            self._counting.leave(request)
