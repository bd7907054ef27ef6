"""Captures CUDA graphs into one memory pool, and measures the memory that they take. Worker process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
MIB = 1 << 20
SEGMENT = 64 * MIB  # torch takes memory in segments, of which a graph may use a part


@dataclass(slots=True)
class Captured(Generic[T]):
    graph: torch.cuda.CUDAGraph
    outputs: T  # lies in the graph's memory: valid until the next replay of any graph of the pool


class GraphPool:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kept_free = 0  # bytes for the largest step, which is launched kernel by kernel
        self.taken = 0  # bytes by all graphs, measured
        self._pool: Any = None

    def capture(self, run: Callable[[], T]) -> Captured[T]:
        """Record what `run` launches. Its kernels must be compiled, and only the first graph is run beforehand: it is
        the largest, and the math library takes its workspace then."""
        here, stream = torch.cuda.current_stream(self.device), _capture_stream(self.device)
        stream.wait_stream(here)
        try:
            with torch.cuda.stream(stream):
                if self._pool is None:
                    run()
                    self._pool = torch.cuda.graph_pool_handle()
                    torch.cuda.empty_cache()  # a pool of graphs gets nothing of what torch keeps for other steps
                return self._record(run)
        finally:
            here.wait_stream(stream)

    def _record(self, run: Callable[[], T]) -> Captured[T]:
        before = self._check_memory()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            outputs = run()
        except BaseException:
            with suppress(RuntimeError):  # the capture is broken; if it stayed open, every later one would fail
                graph.capture_end()
            raise
        graph.capture_end()
        self.taken += max(0, before - torch.cuda.mem_get_info(self.device)[0])
        return Captured(graph, outputs)

    def _check_memory(self) -> int:
        """The bytes that are free; raises OutOfMemoryError if they are needed for other steps."""
        free = int(torch.cuda.mem_get_info(self.device)[0])
        if free < self.kept_free + SEGMENT:
            raise torch.OutOfMemoryError(
                f"{free // MIB} MiB are free, of which {self.kept_free // MIB} are kept for the largest step"
            )
        return free


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for the whole process: the math library keeps a workspace for every stream it ever saw."""
    return torch.cuda.Stream(device)
