"""Captures CUDA graphs into one memory pool, and accounts for the memory that they take. Worker process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch


@dataclass(slots=True)
class GraphMemory:
    """Memory of the graphs, in bytes. A failed capture would leave its memory in the graphs' pool, lost to other steps,
    so `has_room` is asked beforehand."""

    kept_free: int = 0  # for the largest step, which is launched kernel by kernel
    taken: int = 0  # by all graphs, measured
    idle: int = 0  # of `taken`, what the next graph can use: graphs run one at a time

    def growth(self, need: int) -> int:
        """Bytes that another graph takes beyond the idle ones, if its step needs `need` while it runs."""
        return max(need - self.idle, 0)

    def has_room(self, need: int, free: int) -> bool:
        """`free` is the device's free memory without the idle part of the pool."""
        return self.growth(need) <= free - self.kept_free


T = TypeVar("T")
MIB = 1 << 20
SEGMENTS = 64 * MIB  # torch takes memory in segments, of which a graph may use a part


@dataclass(slots=True)
class Captured(Generic[T]):
    graph: torch.cuda.CUDAGraph
    outputs: T  # lies in the graph's memory: valid until the next replay of any graph of the pool
    last_use: int = 0  # number of the replay, as the owner counts


class GraphPool:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = GraphMemory()
        self._live = 0
        self._pool: Any = None
        self._before: tuple[int, int, int] | None = None  # figures before a capture that is not accounted for yet

    def capture(self, run: Callable[[], T]) -> Captured[T]:
        """Run once, which compiles kernels and shows how much memory they need, then record."""
        here, stream = torch.cuda.current_stream(self.device), _capture_stream(self.device)
        stream.wait_stream(here)
        try:
            with torch.cuda.stream(stream):
                self._make_room(self._run(run))
                captured = self._record(run)
        finally:
            here.wait_stream(stream)  # also if there is no graph: the step goes on and reads the same rows
        self._live += 1
        return captured

    def drop(self, graphs: list[Captured[Any]]) -> None:
        """Free graphs; later ones use their memory. Waits for the device, which may be running one of them. The list is
        emptied, because a reference to a graph keeps its memory."""
        torch.cuda.synchronize(self.device)
        self._before = self._figures()
        self._live -= len(graphs)
        graphs.clear()
        self._account()

    def release(self) -> None:
        """Return the unused memory of a failed capture to the device, except what the pool keeps. Call it when nothing
        refers to that capture's tensors any more."""
        self._account()
        torch.cuda.empty_cache()

    def _run(self, run: Callable[[], object]) -> int:
        """Peak of the bytes that it took."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        return torch.cuda.max_memory_allocated(self.device) - before

    def _make_room(self, need: int) -> None:
        left, reserved, allocated = self._figures()
        free = left + reserved - allocated - self.memory.idle
        if left < self.memory.growth(need) + SEGMENTS:
            torch.cuda.empty_cache()  # during a capture torch returns none of its cached memory
        if not self.memory.has_room(need, free):
            raise torch.OutOfMemoryError(
                f"it needs {need // MIB} MiB, and of {free // MIB} MiB that are free "
                f"{self.memory.kept_free // MIB} are kept for the largest step"
            )

    def _record(self, run: Callable[[], T]) -> Captured[T]:
        if self._live == 0:  # a pool whose graphs are all gone cannot be used again
            self._pool = torch.cuda.graph_pool_handle()
            self.memory.taken = self.memory.idle = 0
        self._before = self._figures()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            outputs = run()
        except BaseException:
            with suppress(RuntimeError):  # the capture is broken; if it stayed open, every later one would fail
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
        """Bytes that the driver has free, that torch reserved, and that are allocated."""
        free = torch.cuda.mem_get_info(self.device)[0]
        return free, torch.cuda.memory_reserved(self.device), torch.cuda.memory_allocated(self.device)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for the whole process: the math library keeps a workspace for every stream it ever saw."""
    return torch.cuda.Stream(device)
