"""A request as the core sees it: token numbers, limits and where it stands. No text."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvasir.engine.cache.tier import Parked
from kvasir.messages import EngineRequest, Int32Array


@dataclass(slots=True, eq=False)
class Request:
    spec: EngineRequest
    token_ids: Int32Array  # everything known; stale while the request holds a row (the row is the truth then)
    row: int | None = None
    chain: list[bytes] = field(default_factory=list)  # names of its full blocks, see engine/cache/prefix.py
    num_cached_tokens: int | None = None  # prefix hit when first admitted
    num_preemptions: int = 0
    arrival: float = 0.0  # when it came, by the scheduler's clock
    started: float = 0.0  # when it was first admitted
    first_token: float | None = None  # seconds from its arrival; of one that streams nobody needs to be told
    seq: int = 0  # how many came before it; a fork has its parent's
    num_counted: int = 0  # tokens up to which its tenant was charged, see engine/queue.py
    parked: Parked | None = None  # since it was preempted, and until it runs again

    @classmethod
    def new(cls, spec: EngineRequest, arrival: float = 0.0, seq: int = 0) -> Request:
        return cls(spec, np.ascontiguousarray(spec.prompt_token_ids, np.int32), arrival=arrival, seq=seq)

    @property
    def key(self) -> int:
        return self.spec.key

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt_token_ids)

    @property
    def limit(self) -> int:
        """Total tokens, prompt and output, at which it ends."""
        return self.num_prompt_tokens + self.spec.max_tokens
