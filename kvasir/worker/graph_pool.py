"""Captures CUDA graphs into one memory pool. Import this where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


@dataclass(slots=True)
class Captured(Generic[T]):
    graph: torch.cuda.CUDAGraph
    outputs: T  # lies in the graph's memory: valid until the next replay of any graph of the pool


class GraphPool:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captures = 0
        self._pool: Any = None

    def capture(self, run: Callable[[], T]) -> Captured[T]:
        """Run once, so that kernels are compiled, then record."""
        here, stream = torch.cuda.current_stream(self.device), _capture_stream(self.device)
        stream.wait_stream(here)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            run()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            except BaseException:
                with suppress(RuntimeError):  # the capture is broken; left open, it would refuse all that comes after
                    graph.capture_end()
                raise
            graph.capture_end()
        here.wait_stream(stream)
        self.captures += 1
        return Captured(graph, outputs)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the life of the process: the math library keeps a workspace for every stream it ever saw."""
    return torch.cuda.Stream(device)
