"""Which of several engines gets a request: the one that will have computed its prompt first. API process.

An engine's load is what its unfinished requests have asked of it, in tokens; a request adds what the engine has not
cached of its prompt. So a cached prefix wins unless its engine is busier by more than the prefix saves.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvasir.messages import EngineRequest

_TOKENS_TO_COME = 64  # what a request is taken to cost beside its prompt
_MOST_BLOCKS = 1 << 16  # remembered of each engine


@dataclass(slots=True)
class _Engine:
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)  # chained hashes, the oldest first
    load: int = 0  # tokens


@dataclass(slots=True)
class RouterStats:
    """Counted since the start; lists have an entry per engine."""

    requests: list[int]
    prefix_tokens: int = 0  # of prompts, thought to be cached where they were sent
    diverted: int = 0  # requests that went elsewhere than to their longest prefix, because of load


class Router:
    def __init__(self, num_engines: int, block_size: int) -> None:
        self._engines = [_Engine() for _ in range(num_engines)]
        self._block_size = block_size
        self._weights: dict[int, tuple[int, int]] = {}  # (engine, tokens) by key
        self.stats = RouterStats([0] * num_engines)

    def choose(self, request: EngineRequest) -> int:
        if len(self._engines) == 1:
            return 0
        return 0

    def sent(self, request: EngineRequest, engine: int) -> None:
        pass

    def ended(self, key: int) -> None:
        pass
