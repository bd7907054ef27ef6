"""The captured graphs by their keys: capture, deferral where there is no memory, and eviction. Worker process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from kvasir.log import get_logger
from kvasir.messages import GraphUse
from kvasir.worker.graphs.keys import ForwardGraphKey, HeadGraphKey
from kvasir.worker.graphs.pool import Captured, GraphPool
from kvasir.worker.memory_budget import is_out_of_memory
from kvasir.worker.step_inputs import StepInputs

logger = get_logger(__name__)
T = TypeVar("T")
K = TypeVar("K", ForwardGraphKey, HeadGraphKey)
MAX_GRAPHS = 512  # forwards and heads; each takes some megabytes, and a load that changes brings ever new keys
DEFERRED_STEPS = 1000  # steps of a key that run without a graph after there was no memory to capture one


@dataclass(slots=True)
class ForwardOutputs:
    inputs: StepInputs
    hidden: torch.Tensor


HeadOutputs = tuple[torch.Tensor, tuple[tuple[torch.Tensor, ...], ...]]  # see Sampler.sample


@dataclass(slots=True)
class GraphCache:
    pool: GraphPool
    num_ranks: int = 1  # other ranks capture the same graphs, and would wait for a rank that does not
    use: GraphUse = field(default_factory=GraphUse)  # as of the last capture, or the last that failed
    forwards: dict[ForwardGraphKey, Captured[ForwardOutputs]] = field(default_factory=dict)
    heads: dict[HeadGraphKey, Captured[HeadOutputs]] = field(default_factory=dict)
    deferred: dict[ForwardGraphKey | HeadGraphKey, int] = field(default_factory=dict)  # steps left without a graph

    def is_deferred(self, key: ForwardGraphKey | HeadGraphKey) -> bool:
        """Whether this step must run without a graph; counts it."""
        left = self.deferred.get(key, 0)
        if left:
            self.deferred[key] = left - 1
        return left > 0

    def capture(
        self, graphs: dict[K, Captured[T]], key: K, run: Callable[[], T], prepare: Callable[[], None] = lambda: None
    ) -> bool:
        """Capture a graph; False: there is no memory. A graph keeps what it takes, so the same step may fit without."""
        try:
            prepare()
            graphs[key] = self.pool.capture(run)
            self._count()
            return True
        except RuntimeError as error:
            if not is_out_of_memory(error) or self.num_ranks > 1:
                raise
            reason = str(error).partition("\n")[0]
        self.deferred[key] = DEFERRED_STEPS
        self._count(deferred=1)
        self.pool.release()  # after the error is gone, whose traceback holds tensors
        logger.warning(
            "no memory for a CUDA graph of %s: %s. The next %d such steps are launched kernel by kernel, which takes "
            "longer. To avoid this, lower gpu_memory_utilization or kv_cache_memory_bytes.",
            key, reason, DEFERRED_STEPS,
        )  # fmt: skip
        return False

    def make_room(self, current: ForwardGraphKey) -> None:
        """If there are MAX_GRAPHS, drop the least recently used forward and its heads; or all heads, if there is no
        other forward. The choice depends on the steps alone, so that all ranks drop the same."""
        if len(self.forwards) + len(self.heads) < MAX_GRAPHS:
            return
        others = [key for key in self.forwards if key != current]
        oldest = min(others, key=lambda key: self.forwards[key].last_use, default=None)
        heads = [head for head in self.heads if oldest is None or head.forward == oldest]
        self._count(dropped=self._drop(heads, [] if oldest is None else [oldest]))

    def drop_heads(self, is_stale: Callable[[HeadGraphKey], bool]) -> int:
        """Drop heads that can never be replayed again; returns their number."""
        stale = [head for head in self.heads if is_stale(head)]
        if not stale:
            return 0
        number = self._drop(stale)
        self._count()
        return number

    def _drop(self, heads: list[HeadGraphKey], forwards: Sequence[ForwardGraphKey] = ()) -> int:
        dropped: list[Captured[Any]] = [self.heads.pop(head) for head in heads]
        dropped += [self.forwards.pop(key) for key in forwards]
        number = len(dropped)
        self.pool.drop(dropped)
        return number

    def _count(self, deferred: int = 0, dropped: int = 0) -> None:
        count, size = len(self.forwards) + len(self.heads), self.num_ranks * self.pool.memory.taken  # ranks are alike
        self.use = GraphUse(count, size, self.use.graphs_deferred + deferred, self.use.graphs_dropped + dropped)
