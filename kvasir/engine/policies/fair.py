"""Equal shares of rows and KV blocks for every tenant that has requests. The default policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.policies.base import Context, Policy
from kvasir.engine.request import Request

_MARGIN = 2.0  # how many times its own share another tenant must hold so that blocks are taken from it


@dataclass(slots=True, eq=False)
class TenantShare:
    """The requests of a tenant, and what it holds or has a claim to."""

    name: str
    account: int  # its number in arrays with one entry per tenant
    weight: float = 1.0
    waiting: OrderedDict[int, Request] = field(default_factory=OrderedDict)  # by key, next one first
    num_waiting_tokens: int = 0  # of prompts
    rows: int = 0
    blocks: float = 0.0  # a block that n requests share counts 1/n for each; 0 while blocks are plentiful
    claimed_rows: int = 0  # see FairShare.claim
    claimed_blocks: float = 0.0


class FairShare(Policy):
    """Admits the oldest request of the tenant that holds the least, and preempts the latest request of the tenant that
    holds the most. What a tenant holds is the larger of its shares of all rows and of all KV blocks, divided by its
    weight (dominant resource fairness, Ghodsi et al., 2011); equals go in order of arrival. With a single tenant this
    is first come, first served.

    If the next request finds no row or too few blocks, requests of tenants that hold more are preempted for it, as long
    as each such tenant still holds at least as much afterwards as the tenant that gains. So nobody is preempted back
    and forth, and a tenant that waits gets an equal share whatever others have sent before. Beams are not preempted for
    others, because the rest of their search waits for them.
    """

    def __init__(self, context: Context | None = None) -> None:
        super().__init__(context)
        self.num_rows = self.num_blocks = 1  # of all tenants together; the scheduler sets them
        self._tenants: dict[str, TenantShare] = {}  # those with requests
        self._accounts: list[TenantShare | None] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        for tenant in sorted(self._tenants.values(), key=self._share):
            yield from tenant.waiting.values()

    @property
    def is_contended(self) -> bool:
        """Whether several tenants have requests."""
        return len(self._tenants) > 1

    def add(self, request: Request) -> None:
        tenant = self._enqueue_tenant(request)
        tenant.weight = request.spec.terms.weight
        tenant.waiting[request.key] = request

    def put_back(self, request: Request) -> None:
        waiting = self._enqueue_tenant(request).waiting
        waiting[request.key] = request
        waiting.move_to_end(request.key, last=False)

    def _enqueue_tenant(self, request: Request) -> TenantShare:
        tenant = self._tenant(request)
        tenant.num_waiting_tokens += request.num_prompt_tokens
        self._num_waiting += 1
        return tenant

    def peek(self) -> Request:
        tenants = self._tenants.values()
        if len(tenants) == 1:
            (tenant,) = tenants
            return next(iter(tenant.waiting.values()))
        heads = [(self._share(tenant), next(iter(tenant.waiting.values()))) for tenant in tenants if tenant.waiting]
        return min(heads, key=lambda head: (head[0], head[1].seq, head[1].key))[1]

    def remove(self, request: Request) -> None:
        tenant = self._tenant(request)
        del tenant.waiting[request.key]
        tenant.num_waiting_tokens -= request.num_prompt_tokens
        self._num_waiting -= 1
        self._drop_if_idle(tenant)

    def select_to_preempt(self, running: list[Request]) -> Request:
        if not self.is_contended:
            return running[-1]
        places = range(len(running))
        return running[max(places, key=lambda place: (self._share(self._tenant(running[place])), place))]

    # ------------------------------------------------------------ what tenants hold

    def join(self, request: Request) -> int:
        """Count an admitted request. Returns its tenant's account."""
        tenant = self._tenant(request)
        tenant.rows += 1
        return tenant.account

    def leave(self, request: Request) -> None:
        tenant = self._tenant(request)
        tenant.rows -= 1
        self._drop_if_idle(tenant)

    def set_blocks(self, blocks: NDArray[Any]) -> None:
        """Set the blocks that each account holds. Accounts past the end hold none."""
        for tenant in self._tenants.values():
            tenant.blocks = float(blocks[tenant.account]) if tenant.account < len(blocks) else 0.0

    def _share(self, tenant: TenantShare, rows: int = 0, blocks: float = 0.0) -> float:
        """Share that a tenant holds, or would hold with this many more rows and blocks."""
        rows += tenant.rows + tenant.claimed_rows
        blocks += tenant.blocks + tenant.claimed_blocks
        return max(rows / self.num_rows, blocks / self.num_blocks) / tenant.weight

    def num_waiting_of(self, name: str) -> tuple[int, int]:
        """Number of waiting requests of a tenant, and of their prompt tokens."""
        tenant = self._tenants.get(name)
        return (0, 0) if tenant is None else (len(tenant.waiting), tenant.num_waiting_tokens)

    def num_tenants_with(self, name: str) -> int:
        """Number of tenants that have requests, the named one included."""
        return len(self._tenants) + (name not in self._tenants)

    def account(self, request: Request) -> int:
        return self._tenant(request).account

    def holds_nothing(self, request: Request) -> bool:
        """Whether the tenant of this request has no running request."""
        return self._tenant(request).rows == 0

    # ------------------------------------------------------------ room for the next request

    def select_to_yield(
        self,
        request: Request,
        num_blocks: int,  # that the request needs
        lacks_row: bool,
        missing: float,  # blocks; 0 or less: enough are free
        running: list[Request],
        held: Callable[[Request], float],  # blocks of a running request
    ) -> list[Request]:
        """Return the requests to preempt for a waiting one; none if others would then hold less than its tenant."""
        claimant = self._tenant(request)
        goal = self._share(claimant, 1, num_blocks)
        # Shares of blocks change with every token. Without a margin, tenants would take them from each other in turn.
        least = _MARGIN * self._share(claimant) if missing > 0 else 0.0
        candidates = [
            tenant for tenant in self._tenants.values() if tenant is not claimant and self._share(tenant) > least
        ]
        if not any(tenant.rows > 1 and self._share(tenant) > goal for tenant in candidates):
            return []
        own: dict[str, list[Request]] = {tenant.name: [] for tenant in candidates}
        for each in running:
            if not each.spec.awaited and each.spec.terms.tenant in own:
                own[each.spec.terms.tenant].append(each)
        taken: list[Request] = []
        rows, blocks = dict.fromkeys(own, 0), dict.fromkeys(own, 0.0)
        while (lacks_row and not taken) or missing > 0:
            giver = None
            for tenant in sorted(candidates, key=lambda t: -self._share(t, -rows[t.name], -blocks[t.name])):
                if own[tenant.name]:
                    freed = held(own[tenant.name][-1])
                    if self._share(tenant, -rows[tenant.name] - 1, -blocks[tenant.name] - freed) >= goal:
                        giver = tenant.name
                        break
            if giver is None:
                return []
            taken.append(own[giver].pop())
            rows[giver] += 1
            blocks[giver] += freed
            missing -= freed
        return taken

    def claim(self, request: Request, num_blocks: int) -> None:
        """Take a request out of the queue and count it as admitted, until `drop_claims`."""
        tenant = self._tenant(request)
        tenant.claimed_rows += 1  # first, so that the tenant is not dropped
        tenant.claimed_blocks += num_blocks
        self.remove(request)

    def drop_claims(self, requests: list[Request]) -> None:
        """Put the requests back that `claim` took, in this order."""
        for request in requests[::-1]:
            self.put_back(request)
        for request in requests:
            tenant = self._tenant(request)
            tenant.claimed_rows, tenant.claimed_blocks = 0, 0.0

    def split(self, demand: NDArray[Any], budget: float) -> NDArray[np.float64]:
        """Split a budget over accounts by weight; no account gets more than it asks for, and what one leaves goes to
        the others. Each that asks gets one token at least, as far as the budget goes, or a small weight would get
        none for as long as others ask for all."""
        weights: NDArray[np.float64] = np.array(
            [0.0 if tenant is None else tenant.weight for tenant in self._accounts]
        )[: len(demand)]
        grants: NDArray[np.float64] = np.zeros(len(demand))
        open_ = demand > 0
        while budget > 0.5 and open_.any():
            portion = np.where(open_, weights, 0.0)
            portion *= budget / portion.sum()
            full = open_ & (demand - grants <= portion)
            if not full.any():
                return grants + _whole(portion, budget)
            budget -= float((demand - grants)[full].sum())
            grants[full] = demand[full]
            open_ &= ~full
        return grants

    # ------------------------------------------------------------ tenants

    def _tenant(self, request: Request) -> TenantShare:
        name = request.spec.terms.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            free = (account for account, owner in enumerate(self._accounts) if owner is None)
            account = next(free, len(self._accounts))
            tenant = self._tenants[name] = TenantShare(name, account, request.spec.terms.weight)
            self._accounts[account : account + 1] = [tenant]
        return tenant

    def _drop_if_idle(self, tenant: TenantShare) -> None:
        if not (tenant.waiting or tenant.rows or tenant.claimed_rows):
            del self._tenants[tenant.name]
            self._accounts[tenant.account] = None


def _whole(portion: NDArray[np.float64], budget: float) -> NDArray[np.float64]:
    """Round portions of a budget down, but not to 0: what is missing then is taken from the largest."""
    whole: NDArray[np.float64] = np.floor(portion)
    left = int(budget - whole.sum())
    for place in np.flatnonzero((portion > 0) & (whole == 0)).tolist():
        if left:
            left -= 1
        else:
            largest = int(whole.argmax())
            if whole[largest] <= 1:
                break
            whole[largest] -= 1
        whole[place] = 1
    return whole
