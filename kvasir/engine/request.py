"""A request as the core sees it: token ids, limits and its state. Core process; no text."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvasir.engine.cache.tier import SwappedBlocks
from kvasir.engine.guides import TokenGuide, make_guide
from kvasir.messages import EngineRequest, Int32Array


@dataclass(slots=True, eq=False)
class Request:
    """A request from its arrival to its end, running or waiting."""

    spec: EngineRequest
    token_ids: Int32Array  # all known tokens; out of date while the request runs, when its row has them
    row: int | None = None
    chain: list[bytes] = field(default_factory=list)  # hashes of its full blocks, see engine/cache/prefix.py
    num_cached_tokens: int | None = None  # prefix cache hit at the first admission
    num_preemptions: int = 0
    arrival: float = 0.0  # by the scheduler's clock
    started: float = 0.0  # time of the first admission
    first_token: float | None = None  # seconds from the arrival; only kept for requests that do not stream
    seq: int = 0  # number of requests that came before; a fork has its parent's
    num_counted: int = 0  # number of tokens that its tenant was charged for, see engine/queue.py
    swapped: SwappedBlocks | None = None  # set from preemption until it runs again
    guide: TokenGuide | None = None
    num_guided: int = 0  # number of output tokens that the guide has seen

    @classmethod
    def new(cls, spec: EngineRequest, arrival: float = 0.0, seq: int = 0) -> Request:
        guide = None if spec.guide is None else make_guide(*spec.guide)
        tokens = np.ascontiguousarray(spec.prompt_token_ids, np.int32)
        return cls(spec, tokens, arrival=arrival, seq=seq, guide=guide)

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
