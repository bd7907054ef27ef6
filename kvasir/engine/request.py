"""A request as the core sees it: token ids, limits and its state. Core process; no text."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvasir.engine.cache.tier import SwappedBlocks
from kvasir.engine.guides import TokenGuide
from kvasir.messages import EngineRequest, Int32Array


@dataclass(slots=True, eq=False)
class Request:
    """A request from its arrival to its end, running or waiting."""

    spec: EngineRequest
    token_ids: Int32Array  # all known tokens; out of date while the request runs, when its row has them
    row: int | None = None
    chain: list[bytes] = field(default_factory=list)  # hashes of its full blocks, see engine/cache/block_pool.py
    num_cached_tokens: int | None = None  # prefix cache hit at the first admission
    num_preemptions: int = 0
    arrival: float = 0.0  # by the scheduler's clock
    started: float = 0.0  # time of the first admission
    first_token: float | None = None  # seconds from the arrival; only kept for requests that do not stream
    seq: int = 0  # number of requests that came before; a fork has its parent's
    num_counted: int = 0  # number of tokens that its tenant was charged for, see engine/queue.py
    swapped: SwappedBlocks | None = None  # set from preemption until it runs again
    guide: TokenGuide | None = None  # it has seen all known output tokens
    unsent: list[int] = field(default_factory=list)  # output tokens known before the first step; no output has them yet
    resource_slot: int = -1  # slot of its resource; -1: it needs none, or waits for one (engine/resources.py)
    goes_ahead: bool = False  # it joins the queue at the place of a preempted request

    @classmethod
    def new(cls, spec: EngineRequest, arrival: float = 0.0, seq: int = 0, guide: TokenGuide | None = None) -> Request:
        """Make a request that has not run. If its guide knows how the output begins, that is computed with the
        prompt."""
        tokens = np.ascontiguousarray(spec.prompt_token_ids, np.int32)
        first = []
        if guide is not None:  # at least one token is sampled, so that the request ends by a step like others
            first = guide.jump(1, spec.max_tokens - 1, spec.sampling.stop_token_ids, completes=False)
            tokens = np.append(tokens, np.array(first, np.int32))
        return cls(spec, tokens, arrival=arrival, seq=seq, guide=guide, unsent=first)

    @property
    def key(self) -> int:
        return self.spec.key

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt_token_ids)

    @property
    def limit(self) -> int:
        """Number of tokens, prompt and output, at which the request ends."""
        return self.num_prompt_tokens + self.spec.max_tokens

    @property
    def num_computable(self) -> int:
        """Number of tokens whose KV may be computed: the last sampled token's never is."""
        return max(self.num_prompt_tokens, self.limit - 1)
