"""Which of several engines gets a request: the one that will have computed its prompt first. API process.

An engine's load is what its unfinished requests ask of it, in tokens; a request adds what the engine has not cached of
its prompt. So a cached prefix wins unless its engine is busier by more than the prefix saves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvasir.frontend.requests.metrics import PREFIX, Counter, Metric
from kvasir.messages import EngineRequest

_TOKENS_TO_COME = 64  # what a request is taken to cost beside its prompt
_TOKENS_OF_OTHERS = 256  # what a request of another client is taken to cost in all
_MOST_BLOCKS = 1 << 16  # remembered of each engine


@dataclass(slots=True)
class _Engine:
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)  # chained hashes, the longest unused first
    tokens: int = 0  # that unfinished requests of this client ask of it

    def num_cached(self, chain: list[int]) -> int:
        """Blocks at the beginning that it was sent before."""
        return next((i for i, block in enumerate(chain) if block not in self.blocks), len(chain))

    def remember(self, chain: list[int]) -> None:
        for block in reversed(chain):  # a chain's beginning is forgotten last
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > _MOST_BLOCKS:
            self.blocks.popitem(last=False)


@dataclass(slots=True)
class RouterStats:
    """Counted since the start."""

    requests: list[int]  # sent to each engine
    prefix_tokens: int = 0  # of prompts, thought to be cached where they were sent
    diverted: int = 0  # requests that load kept from the engine with their longest prefix


class Router:
    def __init__(self, num_engines: int, block_size: int) -> None:
        self.stats = RouterStats([0] * num_engines)
        self._engines = [_Engine() for _ in range(num_engines)]
        self._block_size = block_size
        self._sent: dict[int, tuple[_Engine, int]] = {}  # where a request is, and its tokens, by key

    def route(self, request: EngineRequest, of_others: Sequence[int], engine: int | None = None) -> int:
        """The engine for a request, unless it is given; `of_others`: requests that other clients have at each."""
        if len(self._engines) == 1:
            return 0
        chain = self._chain(request)
        cached = [each.num_cached(chain) * self._block_size for each in self._engines]
        if engine is None:
            engine = self._cheapest(cached, of_others)
            self.stats.diverted += cached[engine] < max(cached)
        self._note(request, engine, len(request.prompt_token_ids) - cached[engine])
        self._engines[engine].remember(chain)
        self.stats.requests[engine] += 1
        self.stats.prefix_tokens += cached[engine]
        return engine

    def ended(self, key: int) -> None:
        if key in self._sent:
            engine, tokens = self._sent.pop(key)
            engine.tokens -= tokens

    def metrics(self) -> list[Metric]:
        """None where there is nothing to choose."""
        if len(self._engines) == 1:
            return []
        stats = self.stats
        sent = [(f"{PREFIX}router_requests", count, {"engine": str(i)}) for i, count in enumerate(stats.requests)]
        whole = {"router_prefix_tokens": stats.prefix_tokens, "router_diverted": stats.diverted}
        return [*(Counter(*each) for each in sent), *(Counter(PREFIX + name, value) for name, value in whole.items())]

    def _cheapest(self, cached: list[int], of_others: Sequence[int]) -> int:
        costs = [
            engine.tokens + requests * _TOKENS_OF_OTHERS - found
            for engine, requests, found in zip(self._engines, of_others, cached, strict=True)
        ]
        # among equals the one with the fewest requests so far, so that idle engines take turns
        return min(range(len(costs)), key=lambda index: (costs[index], self.stats.requests[index]))

    def _note(self, request: EngineRequest, index: int, missing: int) -> None:
        engine = self._engines[index]
        width = 1 if request.beam is None else request.beam.width
        tokens = {request.key: missing + width * _TOKENS_TO_COME}
        tokens |= {fork.key: _TOKENS_TO_COME for fork in request.forks}
        for key, cost in tokens.items():
            self._sent[key] = engine, cost
            engine.tokens += cost

    def _chain(self, request: EngineRequest) -> list[int]:
        """A number for each full block and all before it. The last token is computed in any case."""
        if not request.reads_cache:
            return []
        stride = 4 * self._block_size  # bytes
        full = (len(request.prompt_token_ids) - 1) // self._block_size * stride
        data, parent, chain = request.prompt_token_ids.tobytes(), hash(request.cache_salt), []
        for start in range(0, full, stride):
            parent = hash((parent, data[start : start + stride]))
            chain.append(parent)
        return chain
