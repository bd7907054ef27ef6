"""The scheduler: which requests run in the next step, and with how many tokens. Core process; no torch, text or model.

There are no separate prefill and decode phases. A request has known tokens and computed tokens, and a step splits one
token budget over the differences. Chunked prefill, prefix cache hits and resuming after preemption follow from that.
The arithmetic runs on arrays; Python objects are touched only when a request is admitted, ends or is preempted.

`schedule` may run ahead of `update`: it plans with upper bounds, which `update` corrects. The result of a step says how
many tokens each row got: none, one, or one plus the accepted drafts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.cache.manager import IntArray, KVCacheManager, Prefix
from kvasir.engine.cache.prefix_groups import PrefixGroupTracker
from kvasir.engine.cache.tier import NO_COPIES, SwappedBlocks
from kvasir.engine.guides import Guides
from kvasir.engine.policies import Context, Policy
from kvasir.engine.queue import Queue
from kvasir.engine.request import Request
from kvasir.engine.resources import ResourceSlots
from kvasir.engine.rows import Rows
from kvasir.engine.stats import STEP_SIZES, SchedulerStats
from kvasir.engine.step_budget import StepBudget
from kvasir.engine.tenant_shares import TenantShares
from kvasir.errors import RequestError
from kvasir.messages import (
    MIN_GROUP_ROWS,
    EngineOutput,
    EngineRequest,
    Finished,
    FinishReason,
    Int32Array,
    NewRow,
    Part,
    PrefixGroups,
    SampleInputs,
    Started,
    StepPlan,
    StepResult,
    select_parts,
)


@dataclass(slots=True)
class _InFlight:
    """A planned step whose result has not been read yet."""

    rows: IntArray
    epochs: Int32Array
    samples: NDArray[np.bool_]  # rows that sample, or end because they sample nothing
    drafts: Int32Array  # drafted tokens that each row verifies; empty if no row ever had any
    waits: bool  # its sampling waits for the host


@dataclass(slots=True)
class MemberResults:
    """Results of steps for members of request groups, such as beams. Their keys are negative and private to the core,
    so they are collected here and never in an EngineOutput."""

    keys: list[int] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)  # their lines are indices of `keys`
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Limits:
    """The budgets of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # most tokens that one request gets per step; 0: no limit
    watermark: float = 0.0  # share of the blocks that must stay free when a request is admitted beside others
    num_lookahead_tokens: int = 0  # tokens after a step's own for which blocks are prepared: a drafter computes them


class Scheduler:
    """Plans steps and takes in their results. It owns the queue, the rows and the KV cache manager."""

    def __init__(
        self, limits: Limits, cache: KVCacheManager, policy: Policy, max_model_len: int, num_resources: int = 0
    ) -> None:
        self.limits = limits
        self.resources = ResourceSlots(num_resources)
        self.cache = cache
        self.waiting = Queue(policy)
        self.context: Context = policy.context
        self.context.tokens_to_compute = self._tokens_to_compute
        self.rows = Rows(limits.max_num_seqs, max_model_len)
        self.stats = SchedulerStats()
        self.guides = Guides()
        self._requests: dict[int, Request] = {}
        self._new_rows: list[NewRow] = []
        self._started: list[Started] = []  # starts that no output has reported yet
        self._members = MemberResults()
        self._no_token_yet: set[int] = set()  # rows of requests that do not stream and have no output token yet
        self._in_flight: deque[_InFlight] = deque()
        self._prefix_groups = PrefixGroupTracker(limits.max_num_seqs)
        self.step_budget: StepBudget | None = None  # None: steps have up to max_num_batched_tokens
        self._uncached = 1.0  # share of the prompt tokens of recent requests that were not in the cache
        self.reserve = int(limits.watermark * cache.pool.usable)  # blocks
        self._arrivals = count()
        self._all_shares = None if self.waiting.sharing is None else TenantShares(self, self.waiting.sharing)

    @property
    def shares(self) -> TenantShares | None:
        """The shares of tenants; None unless several have requests and the policy shares."""
        sharing = self.waiting.sharing
        return self._all_shares if sharing is not None and sharing.is_contended else None

    # ------------------------------------------------------------ add, fork and end requests

    def __len__(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    def __contains__(self, key: int) -> bool:
        return key in self._requests

    def add(self, spec: EngineRequest, ahead: bool = False) -> None:
        """Queue a request; with `ahead`, at the place of a preempted one."""
        request = self._new(spec)
        needed = self.cache.blocks_for(request.num_computable)
        if needed > self.cache.pool.usable:
            raise RequestError(
                f"this request may grow to {request.limit} tokens, which need {needed} KV blocks of "
                f"{self.cache.block_size} tokens, but the cache has {self.cache.pool.usable}; "
                f"shorten the prompt, lower max_tokens, or give the engine more KV cache memory"
            )
        request.goes_ahead = ahead
        if spec.resource is None or self.resources.claim(request):
            self._enqueue(request)
        self._requests[spec.key] = request

    def _enqueue(self, request: Request) -> None:
        if request.goes_ahead:
            self.waiting.put_back(request)
        else:
            self.waiting.add(request)

    def fork(self, parent_key: int, spec: EngineRequest) -> None:
        """Add a request whose prompt, except for its last token, is a prefix of the parent's tokens. It shares the
        parent's blocks if the parent runs."""
        parent = self._requests.get(parent_key)
        row = None if parent is None else parent.row
        if row is None or not self.rows.num_free:
            self.add(spec, ahead=True)  # its parent has been admitted before
            return
        request = self._new(spec, parent)
        computed = int(self.rows.num_computed[row] - self.rows.num_unsettled[row])
        shared = min(len(request.token_ids) - 1, computed)
        known = self.rows.known_tokens(row)[:shared]
        assert np.array_equal(known, request.token_ids[:shared]), "a fork's prompt must begin with its parent's tokens"
        if not self.cache.can_fork(row, shared):
            self.add(spec, ahead=True)
            return
        if spec.resource is not None:
            self.resources.attach(request)
        child = self._assign_row(request, shared)
        self.cache.fork(row, child, shared)
        self.rows.append([child])
        self._requests[spec.key] = request

    def _new(self, spec: EngineRequest, parent: Request | None = None) -> Request:
        assert spec.key >= 0 or spec.external_tokens, "a member of a group gets its tokens from the group"
        guide = None if spec.guide is None else self.guides.make(*spec.guide)
        if parent is not None:
            return Request.new(spec, parent.arrival, parent.seq, guide)
        return Request.new(spec, spec.terms.arrival or self.context.clock(), next(self._arrivals), guide)

    def append(self, key: int, tokens: Sequence[int]) -> None:
        """Append external tokens. Tokens that steps in flight sample for the request are discarded."""
        request = self._requests[key]
        if request.row is None:
            request.token_ids = np.append(request.token_ids, np.array(tokens, np.int32))
        else:
            self.rows.append_from_host(request.row, tokens)

    def num_computed(self, key: int) -> int:
        """Number of tokens of a request whose KV is computed or planned; 0 unless it runs."""
        request = self._requests.get(key)
        return 0 if request is None or request.row is None else int(self.rows.num_computed[request.row])

    def abort(self, key: int, num_kept: int | None = None) -> bool:
        """End a request without an output. `num_kept`: number of output tokens before a stop string that the caller
        found; the KV of later tokens is not cached."""
        request = self._requests.pop(key, None)
        if request is None:
            return False
        if request.row is None:
            if request.spec.resource is None or not self.resources.waits(request):
                self.waiting.remove(request)
            self._drop_swapped(request)
        else:
            known = int(self.rows.num_known[request.row])
            self._close(request.row, known if num_kept is None else min(known, request.num_prompt_tokens + num_kept))
            self._free_rows([request.row])
        self._release(request)
        return True

    def _release(self, request: Request) -> None:
        if request.spec.resource is not None:
            self.resources.release(request)

    def resource_loaded(self, slot: int, error: str | None) -> list[Finished]:
        """Let the requests run that waited for a load. If it failed, end them and return their Finished messages."""
        ended = []
        for request in self.resources.loaded(slot, error is not None):
            del self._requests[request.key]
            self._drop_swapped(request)
            finished = _finished(request, FinishReason.ERROR, request.token_ids, error)
            if request.key >= 0:
                ended.append(finished)
            else:
                self._members.finished.append(finished)
        return ended

    def end(self, key: int, reason: FinishReason, error: str) -> Finished | None:
        """End a request and return its Finished message; None if there is no such request."""
        assert key >= 0, "a member of a group ends with its group"
        request = self._requests.get(key)
        if request is None:
            return None
        self.count_timeout(request.row is not None)
        if request.num_cached_tokens is not None:
            self.context.service_rate.record_request(self.context.clock(), request.started, is_done=False)
        tokens = request.token_ids if request.row is None else self.rows.known_tokens(request.row)
        finished = _finished(request, reason, tokens, error)
        self.abort(key)
        return finished

    def count_timeout(self, ran: bool) -> None:
        self.stats.timeouts_running += ran
        self.stats.timeouts_waiting += not ran

    # ------------------------------------------------------------ schedule

    def schedule(self) -> StepPlan | None:
        """Plan the next step. None if nothing can run before a result comes in."""
        if self.resources.num_slots:
            for request in self.resources.take_ready():
                self._enqueue(request)
        if len(self.waiting) and (shares := self.shares) is not None:
            shares.make_room()
        preemptions = self.stats.preemptions
        rows, grants, budget = self._continue_running()
        # Admit no request in a step with a preemption unless none runs, or requests would preempt each other in turn.
        may_admit = self.stats.preemptions == preemptions or not len(rows)
        if len(self.waiting) and self.rows.num_free and may_admit:
            self._register_planned(rows, grants, self.rows.fed_by_host(rows))  # so that new ones can hit them
            joined, first_grants = self._admit(budget - int(grants.sum()))
            if joined:
                rows = np.concatenate([rows, np.array(joined, np.int64)])
                grants = np.concatenate([grants, np.array(first_grants, np.int32)])
        if len(rows):
            return self._plan(rows, grants)
        if self._in_flight or not len(self.waiting) or not len(self.rows):
            return None
        # All running requests wait for external tokens, which depend on requests that cannot get blocks. After all are
        # preempted, they can share blocks that each had computed for itself.
        self._preempt_all()
        return self.schedule()

    def _continue_running(self) -> tuple[IntArray, Int32Array, int]:
        """Return the running rows that continue and their numbers of tokens, after preparing their blocks; and the
        budget of the whole step."""
        r = self.rows
        rows = r.order
        want = r.wanted(rows)
        budget = self._token_budget(rows, want)
        grants = self._split_budget(rows, want, budget)
        runs = (grants > 0).nonzero()[0]
        if len(runs) < len(rows):
            rows, grants = rows[runs], grants[runs]
        while not self.cache.prepare(rows, r.num_computed[rows], self._with_lookahead(rows, grants), r.unsettled(rows)):
            preempted = self._preempt()
            keep = rows != preempted
            rows, grants = rows[keep], grants[keep]
        return rows, grants, budget

    def _with_lookahead(self, rows: IntArray, grants: Int32Array) -> Int32Array:
        """Return the tokens of a step, with those that a drafter may compute after it."""
        ahead = self.limits.num_lookahead_tokens
        if not ahead:
            return grants
        room = self.rows.limit[rows] - 1 - self.rows.num_computed[rows]
        planned: Int32Array = np.maximum(np.minimum(grants + ahead, room), grants)
        return planned

    def _token_budget(self, rows: IntArray, want: Int32Array) -> int:
        """Return the token budget of the next step, given what running requests want."""
        most = self.limits.max_num_batched_tokens
        if self.step_budget is None or not self.limits.chunked_prefill:
            return most
        single = self.rows.without_drafts(rows, want) == 1
        decodes = int(want[single].sum())
        prompts = int(want.sum()) - decodes + int(self._uncached * self.waiting.num_prompt_tokens)
        return min(most, max(self.step_budget.tokens(decodes, prompts), decodes)) if prompts else most

    def _split_budget(self, rows: IntArray, want: Int32Array, budget: int) -> Int32Array:
        """Split the token budget over requests, first admitted first. Without chunked prefill, a request gets all the
        tokens that it wants or none."""
        total = int(want.sum())
        if self.rows.any_drafts and total > budget:  # every row that generates gets its token first
            want = self.rows.without_drafts(rows, want)
            total = int(want.sum())
        if self.limits.long_prefill_token_threshold:
            want = np.minimum(want, self.limits.long_prefill_token_threshold)
            total = int(want.sum())
        shares = self.shares
        if total <= budget and (shares is None or not len(self.waiting)):
            return want
        if shares is not None and self.limits.chunked_prefill:
            grants = shares.split_budget(rows, want, budget)
        else:
            grants = np.clip(budget - (np.cumsum(want) - want), 0, want)
        if not self.limits.chunked_prefill:
            grants[grants < want] = 0
        self.stats.partial_prefills += int(((grants < want) & (grants > 0)).sum())
        return grants

    def _preempt(self) -> int:
        """Preempt the request that the policy selects, and return its row."""
        running = [request for row in self.rows.order if (request := self.rows.requests[row]) is not None]
        assert len(running) > 1, "a single request does not fit the cache: `add` should have refused it"
        self.waiting.count(self.rows, self.rows.order)
        if (shares := self.shares) is not None:
            shares.count_blocks()
        return self.preempt(self.waiting.select_to_preempt(running))

    def preempt(self, request: Request) -> int:
        """Take a request's row and blocks, and queue it again."""
        row = request.row
        assert row is not None, "only a running request can be preempted"
        request.token_ids = self.rows.known_tokens(row).copy()
        request.chain, request.swapped = self._swap_out(request, row)
        request.num_preemptions += 1
        self._free_rows([row])
        self.waiting.put_back(request)
        self.stats.preemptions += 1
        return row

    def limit_steps(self, num_tokens: int) -> None:
        """Limit later steps to this many tokens."""
        self.limits = replace(self.limits, max_num_batched_tokens=num_tokens)

    def start_over(self) -> None:
        """Drop steps in flight and all cached blocks. Running requests are preempted and will be recomputed."""
        self._preempt_all()
        self._in_flight.clear()
        self.cache.take_changes()  # these are for rows that are free now
        is_reset = self.cache.reset()
        assert is_reset, "a block is in use although no row is"

    def _preempt_all(self) -> None:
        for row in self.rows.order.tolist()[::-1]:
            request = self.rows.requests[row]
            assert request is not None, f"row {row} has no request"
            self.preempt(request)

    def _admit(self, budget: int) -> tuple[list[int], list[int]]:
        """Admit waiting requests while tokens, rows and blocks last."""
        joined: list[int] = []
        grants: list[int] = []
        owed = self.blocks_still_needed()
        self.waiting.count(self.rows, self.rows.order)
        while len(self.waiting) and self.rows.num_free and budget > 0:
            request = self.waiting.peek()
            tokens = request.token_ids
            prefix = self.find_prefix(request)
            cached = prefix.num_tokens
            grant = self._first_grant(len(tokens) - cached, budget)
            ahead = min(self.limits.num_lookahead_tokens, request.limit - 1 - len(tokens))
            missing = self.cache.blocks_for(len(tokens) + max(ahead, 0)) - self.cache.blocks_for(cached)
            spare = self.cache.num_free_without(prefix) - missing - owed
            if grant == 0 or spare < 0:
                break  # the whole prompt must fit, or several partly computed prompts could block each other
            if spare < self.reserve and (joined or len(self.rows)) and not request.spec.awaited:
                self.stats.held_back += 1
                break  # running requests would soon run out of blocks, and one would be preempted
            self.waiting.remove(request)
            row = self._assign_row(request, cached)
            self.cache.open(row, prefix, request.chain, request.spec.cache_salt, len(tokens), request.swapped)
            request.swapped = None
            if self.cache.num_groups:
                own = np.array([row])
                planned = self._with_lookahead(own, np.array([grant], np.int32))
                ready = self.cache.prepare(own, np.array([cached], np.int32), planned)
                assert ready, "blocks were counted as free and are not"
                owed += missing - self.cache.num_groups * (int(self.cache.num_blocks[row]) - prefix.num_columns)
                self._register_blocks(row, cached + grant)  # at once, so that the next request can hit them
            joined.append(row)
            grants.append(grant)
            budget -= grant
            self._uncached += (1 - cached / len(tokens) - self._uncached) / 8
        self.rows.append(joined)
        return joined, grants

    def find_prefix(self, request: Request) -> Prefix:
        if not request.spec.reads_cache:
            return self.cache.no_prefix()
        return self.cache.find_prefix(request.token_ids, request.chain, request.spec.cache_salt, request.swapped)

    def _tokens_to_compute(self, request: Request) -> int:
        return len(request.token_ids) - self.find_prefix(request).num_tokens

    def _first_grant(self, want: int, budget: int) -> int:
        threshold = self.limits.long_prefill_token_threshold or want
        grant = min(want, budget, threshold)
        if grant < want and not self.limits.chunked_prefill:
            return 0
        self.stats.partial_prefills += grant < want
        return grant

    def blocks_still_needed(self) -> int:
        """Number of blocks that running requests still need for tokens that they already have."""
        rows = self.rows.order
        owed = -(-self.rows.num_tokens[rows] // self.cache.block_size) - self.cache.num_blocks[rows]
        return int(np.maximum(owed, 0).sum()) * self.cache.num_groups

    def _assign_row(self, request: Request, num_computed: int) -> int:
        """Give a request a row and describe it to the worker."""
        row = self.rows.take(request, num_computed)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_computed
            request.started = self.context.clock()
            started = self._started if request.key >= 0 else self._members.started
            num_cached = min(num_computed, request.num_prompt_tokens)
            started.append(Started(request.key, request.started - request.arrival, num_cached))
        if request.first_token is None and not request.spec.stream:
            self._no_token_yet.add(row)
        self._describe(request, row, request.token_ids)
        self.waiting.join(self.rows, row)
        return row

    def _describe(self, request: Request, row: int, token_ids: Int32Array) -> None:
        """Let the next plan describe a row to the worker: a new one, or one whose tokens the host has changed."""
        sampling = request.spec.sampling
        tokens = None if sampling.extras is None and self.rows.max_new[row] <= 1 else token_ids
        computed, pooling, embeddings = int(self.rows.num_computed[row]), request.spec.pooling, request.spec.embeddings
        if embeddings is not None and computed >= len(embeddings):
            embeddings = None  # what they give is in the cache
        self._new_rows.append(NewRow(row, computed, sampling, tokens, pooling, embeddings, request.resource_slot))

    def _register_blocks(self, row: int, num_tokens: int) -> None:
        """Add the full blocks of the row's first `num_tokens` to the prefix cache."""
        if self.cache.caching:
            self.cache.commit(row, self.rows.tokens[row, :num_tokens])

    def _close(self, row: int, num_tokens: int) -> list[bytes]:
        """Release the row's blocks and cache those of its first `num_tokens`, as far as they are computed."""
        num_tokens = min(num_tokens, int(self.rows.num_computed[row]))
        return self.cache.close(row, self.rows.tokens[row, :num_tokens])

    def _swap_out(self, request: Request, row: int) -> tuple[list[bytes], SwappedBlocks]:
        """Release the row's blocks until it resumes. The last known token is left out: its logits are needed then."""
        num_tokens = min(len(request.token_ids) - 1, int(self.rows.num_computed[row]))
        return self.cache.swap_out(row, self.rows.tokens[row, :num_tokens], request.spec.reads_cache)

    def _drop_swapped(self, request: Request) -> None:
        """Drop what was swapped out for a request that will not run again."""
        if request.swapped is not None:
            self.cache.drop_swapped(request.swapped)
            request.swapped = None

    def _plan(self, rows: IntArray, grants: Int32Array) -> StepPlan:
        r = self.rows
        num_decodes, total = len(rows), int(grants.sum())
        if total > num_decodes:  # single tokens first, chunks after them
            order = np.argsort(grants > 1, kind="stable")
            rows, grants = rows[order], grants[order]
            num_decodes = int(np.count_nonzero(grants == 1))
        fed = r.fed_by_host(rows)
        token_ids = r.input_tokens(rows, grants, fed, total)
        self._register_planned(rows, grants, fed)
        prompt_tokens = r.prompt_tokens(rows[fed], grants[fed]) if len(fed) else 0
        lengths, samples, drafts, ahead = r.advance(rows, grants)
        table_index, table_block, copies = self.cache.take_changes()
        tier = self.cache.tier
        to_host, from_host = tier.take_copies() if tier.num_blocks else (NO_COPIES, NO_COPIES)
        new_rows, self._new_rows = self._new_rows, []
        reached = samples
        if r.any_without_sampling:
            samples = samples & r.samples[rows]
        waits = r.any_guided and bool(np.count_nonzero(samples & r.restricted[rows]))
        self._in_flight.append(_InFlight(rows, r.epoch[rows], reached, drafts, waits))
        if r.any_guided:
            self.guides.stats.guided_passes += int(np.count_nonzero(samples & r.guided[rows]))
        self.stats.steps += 1
        self.stats.scheduled_tokens += total
        step_tokens = prompt_tokens + int(np.count_nonzero(samples))
        self.stats.step_tokens += step_tokens
        self.stats.step_sizes[bisect_left(STEP_SIZES, step_tokens)] += 1
        return StepPlan(
            rows=rows.astype(np.int32),
            num_tokens=grants,
            samples=samples,
            token_ids=token_ids,
            bounds=lengths,
            num_decodes=num_decodes,
            new_rows=new_rows,
            table_index=table_index,
            table_block=table_block,
            copies=copies,
            to_host=to_host,
            from_host=from_host,
            wants_logprobs=bool(np.count_nonzero(samples & r.logprobs[rows])),
            waits_for_host=waits,
            shared=self._shared_prefixes(rows[:num_decodes]),
            drafts=drafts if len(drafts) and drafts.any() else None,
            ahead=ahead if len(ahead) and ahead.any() else None,
            step=self.stats.steps,
        )

    def _shared_prefixes(self, rows: IntArray) -> PrefixGroups | None:
        """Return the prefix groups among these rows; None if there are none."""
        if len(rows) < MIN_GROUP_ROWS:
            return None
        r, state = self.rows, (self.rows.version, self.cache.stats.copied_blocks)
        self._prefix_groups.update(
            state, lambda: self.cache.find_prefix_groups(r.order, r.num_computed), self.cache.block_size
        )
        return self._prefix_groups.groups_of(rows)

    def _register_planned(self, rows: IntArray, grants: Int32Array, fed: IntArray) -> None:
        """Add blocks to the prefix cache that this step fills with tokens known to the host."""
        for i in fed.tolist():
            row = int(rows[i])
            planned = int(self.rows.num_computed[row] + grants[i])
            self._register_blocks(row, min(planned, int(self.rows.fed_from[row])))  # the host knows no drafts

    def sample_inputs(self) -> SampleInputs:
        """Return the masks and tokens of guided requests for the step planned last. `update` must have taken in all
        earlier results."""
        step, r = self._in_flight[-1], self.rows
        current = r.epoch[step.rows] == step.epochs
        guided = []
        lines = np.flatnonzero(step.samples & current & r.restricted[step.rows])
        for line, row in zip(lines.tolist(), step.rows[lines].tolist(), strict=True):
            request = r.requests[row]
            assert request is not None and request.guide is not None, f"line {line} has no guide"
            guided.append((line, request.guide))
        return self.guides.sample_inputs(guided, np.flatnonzero(step.samples & ~current).tolist())

    # ------------------------------------------------------------ update

    def update(self, result: StepResult) -> EngineOutput:
        """Take in the result of the oldest step in flight: append tokens, finish requests, fill the output."""
        r = self.rows
        step = self._in_flight.popleft()
        if result.failures:
            result.counts[list(result.failures)] = 0
        valid = r.epoch[step.rows] == step.epochs  # guides may end this below, but only for later results
        current = step.samples & valid
        lines = current.nonzero()[0]
        if len(lines) < np.count_nonzero(step.samples):
            self.stats.dropped_tokens += int(result.counts[step.samples & ~current].sum())
        rows, tokens = step.rows[lines], result.token_ids[lines]
        counts = result.counts[lines]
        if len(step.drafts):
            r.settle(rows, step.drafts[lines], counts)
        if result.drafts is not None and not self._in_flight:
            r.num_drafts[rows] = np.minimum(r.num_drafts[rows], result.drafts[lines])
        if r.any_external:
            counts = np.where(r.max_new[rows] > 0, counts, 0)  # external rows get theirs by `append`
        reasons, counts = r.extend(rows, tokens, counts)
        failures = dict(result.failures or {})
        if r.any_guided:
            counts = self._follow_guides(result, lines, rows, counts, reasons, failures)
        self.stats.generated_tokens += int(counts.sum())
        if r.any_without_sampling:
            done = ~r.samples[rows] & (~np.isin(lines, list(result.failures)) if result.failures else True)
            reasons[done] = int(FinishReason.STOP)
        if self._no_token_yet:
            self._record_first_tokens()
        streamed = r.stream[rows].nonzero()[0]
        output = self._output(step, result, valid, lines[streamed], counts[streamed])
        ended = reasons.nonzero()[0]
        if len(ended):
            self._finish(rows[ended].tolist(), reasons[ended].tolist(), output)
        for line, said in failures.items():
            if valid[line]:
                self._finish([int(step.rows[line])], [FinishReason.ERROR], output, said)
        return output

    def _follow_guides(
        self,
        result: StepResult,
        lines: IntArray,
        rows: IntArray,
        counts: Int32Array,
        reasons: Int32Array,
        failures: dict[int, str],
    ) -> Int32Array:
        """Show new tokens to guides, and add the tokens that must follow to the result. Returns the lines' numbers of
        tokens; ends and failures are added to `reasons` and `failures`."""
        waits = bool(self._in_flight) and self._in_flight[0].waits
        more, failed, changed = self.guides.follow(self.rows, rows, result.token_ids[lines], counts, reasons, waits)
        failures |= {int(lines[i]): why for i, why in failed.items()}
        for row in changed:
            request = self.rows.requests[row]
            assert request is not None, f"row {row} has no request"
            self._describe(request, row, self.rows.known_tokens(row).copy())
        if not more:
            return counts
        counts = counts.copy()
        width = max(map(len, more.values()))
        result.token_ids = np.pad(result.token_ids, ((0, 0), (0, max(0, width - result.token_ids.shape[1]))))
        for i, tokens in more.items():
            result.token_ids[lines[i], : len(tokens)] = tokens
            counts[i] = len(tokens)
        return counts

    def _output(
        self, step: _InFlight, result: StepResult, valid: NDArray[np.bool_], lines: IntArray, counts: Int32Array
    ) -> EngineOutput:
        """Return the output of a step: tokens of `lines`, and all parts of `valid` lines, whose requests still hold
        their rows."""
        if result.parts:
            named = np.zeros(len(valid), np.bool_)
            named[np.concatenate([part.index for part in result.parts.values()])] = True
            named[lines] = False
            others = (named & valid).nonzero()[0]
            lines, counts = np.concatenate([lines, others]), np.append(counts, np.zeros(len(others), np.int32))
        if self.rows.any_external:
            private = self.rows.key[step.rows[lines]] < 0
            if private.any():
                members, lines, counts = lines[private], lines[~private], counts[~private]
                self._members.keys = self.rows.key[step.rows[members]].tolist()
                self._members.parts = select_parts(result.parts, members, len(step.rows))
        started, self._started = self._started, []
        return EngineOutput(
            keys=self.rows.key[step.rows[lines]],
            token_ids=result.token_ids[lines],
            counts=counts,
            parts=select_parts(result.parts, lines, len(step.rows)) if result.parts else {},
            started=started,
        )

    def take_member_results(self) -> MemberResults | None:
        """Return what the last `update` found for members of groups; None if there was nothing."""
        found = self._members
        if not (found.keys or found.started or found.finished):
            return None
        self._members = MemberResults()
        return found

    def _record_first_tokens(self) -> None:
        """Keep the time of the first token for requests that do not stream; their Finished message has it."""
        now = self.context.clock()
        for row in list(self._no_token_yet):
            request = self.rows.requests[row]
            assert request is not None, f"row {row} has no request"
            if self.rows.num_known[row] > request.num_prompt_tokens and not request.unsent:
                request.first_token = now - request.arrival
                self._no_token_yet.discard(row)

    def _finish(self, rows: list[int], reasons: list[int], output: EngineOutput, error: str | None = None) -> None:
        r, now = self.rows, self.context.clock()
        for row, reason in zip(rows, reasons, strict=True):
            request = r.requests[row]
            assert request is not None, f"row {row} has no request"
            self.context.service_rate.record_request(now, request.started, is_done=True)
            tokens = r.known_tokens(row)
            finished = output.finished if request.key >= 0 else self._members.finished
            finished.append(_finished(request, FinishReason(reason), tokens, error))
            if error is not None:
                self.cache.forget(row)  # the next request with this prompt must not find what was wrong with it
            self._close(row, len(tokens) if error is None else 0)
            del self._requests[request.key]
            self._release(request)
        self._free_rows(rows)

    def _free_rows(self, rows: list[int]) -> None:
        self.waiting.leave(self.rows, rows)
        self._no_token_yet.difference_update(rows)
        self.rows.leave(rows)
        if self._new_rows:  # a fork may leave before it was scheduled
            self._new_rows = [new for new in self._new_rows if new.row not in rows]


def _finished(request: Request, reason: FinishReason, tokens: Int32Array, error: str | None = None) -> Finished:
    """Return the Finished message of a request. `tokens` are all its known tokens with the prompt."""
    by_token = reason == FinishReason.STOP and not (request.guide is not None and request.guide.is_complete)
    return Finished(
        key=request.key,
        reason=reason,
        stop_token_id=int(tokens[-1]) if by_token else None,
        token_ids=None if request.spec.stream else tokens[request.num_prompt_tokens :].copy(),
        error=error,
        first_token=request.first_token,
    )
