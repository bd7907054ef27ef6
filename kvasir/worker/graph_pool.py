"""Captures CUDA graphs into one memory pool. Import this where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch

from kvasir.worker.graph_memory import GraphMemory

T = TypeVar("T")
MIB = 1 << 20
SEGMENTS = 64 * MIB  # torch takes memory in pieces, some of which a graph uses in part


@dataclass(slots=True)
class Captured(Generic[T]):
    graph: torch.cuda.CUDAGraph
    outputs: T  # lies in the graph's memory: valid until the next replay of any graph of the pool
    last_use: int = 0  # as its owner counts


class GraphPool:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = GraphMemory()
        self._live = 0
        self._pool: Any = None
        self._before: tuple[int, int, int] | None = None  # figures from before a capture that is not accounted for

    def capture(self, run: Callable[[], T]) -> Captured[T]:
        """Run once, so that kernels are compiled and it is known what they need, then record."""
        here, stream = torch.cuda.current_stream(self.device), _capture_stream(self.device)
        stream.wait_stream(here)
        try:
            with torch.cuda.stream(stream):
                self._make_room(self._run(run))
                captured = self._record(run)
        finally:
            here.wait_stream(stream)  # also without a graph: the step that goes on reads the same rows
        self._live += 1
        return captured

    def drop(self, graphs: list[Captured[Any]]) -> None:
        """Their memory is the next ones'. Waits for the device, which may be running one of them. The list is emptied:
        whoever holds a graph holds its memory."""
        torch.cuda.synchronize(self.device)
        self._before = self._figures()
        self._live -= len(graphs)
        graphs.clear()
        self._account()

    def release(self) -> None:
        """What a failed capture leaves unused goes back to the device, but for what its pool holds for the next one.
        To be called when nobody holds anything of that capture any more."""
        self._account()
        torch.cuda.empty_cache()

    def _run(self, run: Callable[[], object]) -> int:
        """The bytes that it took at the most."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        return torch.cuda.max_memory_allocated(self.device) - before

    def _make_room(self, need: int) -> None:
        left, reserved, allocated = self._figures()
        free = left + reserved - allocated - self.memory.idle
        if left < self.memory.growth(need) + SEGMENTS:
            torch.cuda.empty_cache()  # within a capture torch gives back nothing of what it holds
        if not self.memory.has_room(need, free):
            raise torch.OutOfMemoryError(
                f"it needs {need // MIB} MiB, and of {free // MIB} MiB that are free "
                f"{self.memory.kept_free // MIB} are kept for the largest step"
            )

    def _record(self, run: Callable[[], T]) -> Captured[T]:
        if self._live == 0:  # a pool that was used, and is no more, cannot be used again
            self._pool = torch.cuda.graph_pool_handle()
            self.memory.taken = self.memory.idle = 0
        self._before = self._figures()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            outputs = run()
        except BaseException:
            with suppress(RuntimeError):  # the capture is broken; left open, it would refuse all that comes after
                graph.capture_end()
            raise
        graph.capture_end()
        self._account()
        return Captured(graph, outputs)

    def _account(self) -> None:
        if self._before is None:
            return
        left, reserved, allocated = (now - then for now, then in zip(self._figures(), self._before, strict=True))
        self.memory.taken = max(0, self.memory.taken - left)
        self.memory.idle += reserved - allocated
        self._before = None

    def _figures(self) -> tuple[int, int, int]:
        """What the driver has left, what torch took of it, and what of that is in use."""
        free = torch.cuda.mem_get_info(self.device)[0]
        return free, torch.cuda.memory_reserved(self.device), torch.cuda.memory_allocated(self.device)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the life of the process: the math library keeps a workspace for every stream it ever saw."""
    return torch.cuda.Stream(device)
