"""Router: chooses the engine for a request under data parallelism. API process.

An engine's load is the number of tokens that its unfinished requests still need; a request adds the part of its prompt
that the engine has not cached. A cached prefix wins unless its engine is busier by more tokens than the prefix saves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvasir.frontend.requests.metrics import PREFIX, Counter, Metric
from kvasir.messages import EngineRequest

_TOKENS_PER_OUTPUT = 64  # assumed cost of a request's output
_TOKENS_PER_OTHER_REQUEST = 256  # assumed cost of a request of another client
_MAX_BLOCKS = 1 << 16  # remembered for each engine


@dataclass(slots=True)
class _Engine:
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)  # block hashes, least recently used first
    tokens: int = 0  # needed by unfinished requests of this client

    def num_cached(self, chain: list[int]) -> int:
        """Number of leading blocks that were sent to this engine before."""
        return next((i for i, block in enumerate(chain) if block not in self.blocks), len(chain))

    def remember(self, chain: list[int]) -> None:
        for block in reversed(chain):  # the beginning of a chain is evicted last
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > _MAX_BLOCKS:
            self.blocks.popitem(last=False)


@dataclass(slots=True)
class RouterStats:
    """Counters since the start."""

    requests: list[int]  # sent to each engine
    prefix_tokens: int = 0  # prompt tokens assumed to be cached at the chosen engine
    diverted: int = 0  # requests that went elsewhere because the engine with their longest prefix was busy


class Router:
    """Chooses the engine of each request by load and cached prefixes. Used with two engines or more."""

    def __init__(self, num_engines: int, block_size: int) -> None:
        self.stats = RouterStats([0] * num_engines)
        self._engines = [_Engine() for _ in range(num_engines)]
        self._block_size = block_size
        self._sent: dict[int, tuple[_Engine, int]] = {}  # request key -> its engine and its cost in tokens

    def route(self, request: EngineRequest, requests_of_others: Sequence[int], engine: int | None = None) -> int:
        """Choose and record the engine for a request, unless `engine` names it. The counts are per engine."""
        chain = self._chain(request)
        cached = [each.num_cached(chain) * self._block_size for each in self._engines]
        if engine is None:
            engine = self._cheapest(cached, requests_of_others)
            self.stats.diverted += cached[engine] < max(cached)
        self._record(request, engine, len(request.prompt_token_ids) - cached[engine])
        self._engines[engine].remember(chain)
        self.stats.requests[engine] += 1
        self.stats.prefix_tokens += cached[engine]
        return engine

    def remove(self, key: int) -> None:
        """The request has ended."""
        if key in self._sent:
            engine, tokens = self._sent.pop(key)
            engine.tokens -= tokens

    def metrics(self) -> list[Metric]:
        stats = self.stats
        sent = [(f"{PREFIX}router_requests", count, {"engine": str(i)}) for i, count in enumerate(stats.requests)]
        whole = {"router_prefix_tokens": stats.prefix_tokens, "router_diverted": stats.diverted}
        return [*(Counter(*each) for each in sent), *(Counter(PREFIX + name, value) for name, value in whole.items())]

    def _cheapest(self, cached: list[int], requests_of_others: Sequence[int]) -> int:
        costs = [
            engine.tokens + requests * _TOKENS_PER_OTHER_REQUEST - found
            for engine, requests, found in zip(self._engines, requests_of_others, cached, strict=True)
        ]
        # on a tie, the engine with the fewest requests so far, so that idle engines alternate
        return min(range(len(costs)), key=lambda index: (costs[index], self.stats.requests[index]))

    def _record(self, request: EngineRequest, index: int, missing: int) -> None:
        engine = self._engines[index]
        width = 1 if request.beam is None else request.beam.width
        tokens = {request.key: missing + width * _TOKENS_PER_OUTPUT}
        tokens |= {fork.key: _TOKENS_PER_OUTPUT for fork in request.forks}
        for key, cost in tokens.items():
            self._sent[key] = engine, cost
            engine.tokens += cost

    def _chain(self, request: EngineRequest) -> list[int]:
        """A hash for each full block and everything before it, without the last token, which is always computed."""
        if not request.reads_cache:
            return []
        stride = 4 * self._block_size  # bytes
        full = (len(request.prompt_token_ids) - 1) // self._block_size * stride
        data, parent, chain = request.prompt_token_ids.tobytes(), hash(request.cache_salt), []
        for start in range(0, full, stride):
            parent = hash((parent, data[start : start + stride]))
            chain.append(parent)
        return chain
