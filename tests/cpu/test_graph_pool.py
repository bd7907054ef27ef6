"""Captures and the memory they take, on a device made of numbers. What a real one does is for tests/gpu."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvasir.worker.graphs import pool as graph_pool
from kvasir.worker.graphs.pool import MIB, GraphMemory, GraphPool

GRAPH = 5 * MIB  # what a graph takes of the driver, by itself


class Outputs:
    """What a graph holds of its pool, as long as somebody holds it."""

    def __init__(self, device: Device, size: int) -> None:
        self.device, self.size = device, size
        device.graphs_live += size
        device.allocated += size

    def __del__(self) -> None:
        self.device.graphs_live -= self.size
        self.device.allocated -= self.size
        self.device.left += GRAPH


class Device:
    """Two pools, one of them of graphs, as torch keeps them: what is freed stays in its pool."""

    def __init__(self, left: int) -> None:
        self.left = left * MIB  # by the driver
        self.kept = 0  # of the default pool, used by nobody
        self.graphs = self.graphs_live = self.peak = self.allocated = 0
        self.pools = 0
        self.events: list[str] = []
        self.capturing = False

    def step(self, need: int, outputs: int) -> Any:
        """Runs a step that takes so many MiB, of which some are still held afterwards if it is captured."""

        def run() -> Outputs | None:
            self.events.append("captured" if self.capturing else "run")
            size = need * MIB
            if self.capturing:
                more = max(0, size - (self.graphs - self.graphs_live))
                if more > self.left:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                self.graphs, self.left = self.graphs + more, self.left - more
                return Outputs(self, outputs * MIB)
            else:
                more = max(0, size - self.kept)
                self.kept, self.left = self.kept + more, self.left - more
                self.peak = max(self.peak, self.allocated + size)
            return None

        return run

    def begin(self, **_: Any) -> None:
        self.capturing = True

    def end(self) -> None:
        self.capturing = False
        self.left -= GRAPH

    def new_pool(self) -> tuple[int, int]:
        self.pools += 1
        return (0, self.pools)

    def empty_cache(self) -> None:
        self.events.append("released")
        self.left, self.kept = self.left + self.kept, 0


def on(device: Device, monkeypatch: pytest.MonkeyPatch) -> GraphPool:
    stream = SimpleNamespace(
        wait_stream=lambda other: device.events.append(f"capture waits for {other.name}"), name="capture"
    )
    here = SimpleNamespace(wait_stream=lambda other: device.events.append(f"step waits for {other.name}"), name="step")
    monkeypatch.setattr(graph_pool, "_capture_stream", lambda _: stream)
    fakes = {
        "current_stream": lambda _: here,
        "stream": lambda _: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(capture_begin=device.begin, capture_end=device.end),
        "graph_pool_handle": device.new_pool,
        "mem_get_info": lambda _: (device.left, 0),
        "memory_reserved": lambda _: device.kept + device.graphs + device.allocated - device.graphs_live,
        "memory_allocated": lambda _: device.allocated,
        "max_memory_allocated": lambda _: device.peak,
        "reset_peak_memory_stats": lambda _: setattr(device, "peak", device.allocated),
        "empty_cache": device.empty_cache,
        "synchronize": lambda _: device.events.append("device waited for"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return GraphPool(torch.device("cuda"))


def test_what_graphs_take_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(left=1000)
    pool = on(device, monkeypatch)
    graphs = [pool.capture(device.step(need=100, outputs=10))]
    assert isinstance(graphs[0].outputs, Outputs)
    assert device.events == ["capture waits for step", "run", "captured", "step waits for capture"]
    assert (pool.memory.taken, pool.memory.idle) == (100 * MIB + GRAPH, 90 * MIB)
    graphs.append(pool.capture(device.step(need=50, outputs=5)))  # in what the first one leaves idle
    assert (pool.memory.taken, pool.memory.idle) == (100 * MIB + 2 * GRAPH, 85 * MIB)


def test_the_largest_steps_memory_is_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(left=600)
    pool = on(device, monkeypatch)
    pool.memory.kept_free = 500 * MIB
    with pytest.raises(
        torch.OutOfMemoryError, match=r"^it needs 101 MiB, and of 600 MiB that are free 500 are kept for"
    ):
        pool.capture(device.step(need=101, outputs=10))
    assert device.events == ["capture waits for step", "run", "step waits for capture"]
    assert pool.memory.taken == 0
    pool.release()
    assert device.left == 600 * MIB, "nothing is lost to other steps"
    pool.capture(device.step(need=100, outputs=10))


def test_a_capture_gets_what_torch_holds_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(left=300)
    pool = on(device, monkeypatch)
    device.step(need=290, outputs=0)()  # of which the pool of graphs can use nothing
    pool.capture(device.step(need=200, outputs=10))
    assert device.events[1:] == ["capture waits for step", "run", "released", "captured", "step waits for capture"]


def test_a_capture_that_breaks_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(left=1000)
    pool = on(device, monkeypatch)

    def run() -> None:
        if device.capturing:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        pool.capture(run)
    assert not device.capturing and device.events[-1] == "step waits for capture"


@pytest.mark.parametrize(
    ("need", "free", "fits"), [(100, 100, True), (100, 99, False), (130, 100, True), (131, 100, False)]
)
def test_room(need: int, free: int, fits: bool) -> None:
    idle = 0 if need == 100 else 30
    assert GraphMemory(kept_free=40, idle=idle).has_room(need, free + 40) == fits


def test_what_is_dropped_is_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(left=1000)
    pool = on(device, monkeypatch)
    first, second = (pool.capture(device.step(need=100, outputs=10)) for _ in range(2))
    assert (pool.memory.taken, pool.memory.idle) == (110 * MIB + 2 * GRAPH, 90 * MIB)
    graphs = [first]
    del first
    pool.drop(graphs)
    assert not graphs and device.events[-1] == "device waited for"
    assert (pool.memory.taken, pool.memory.idle) == (110 * MIB + GRAPH, 100 * MIB)
    assert device.pools == 1
    graphs = [second]
    del second
    pool.drop(graphs)
    third = pool.capture(device.step(need=100, outputs=10))
    assert device.pools == 2, "torch refuses to capture into a pool that no graph uses any more"
    assert third.outputs.size == 10 * MIB


def test_what_a_failed_capture_took_is_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as it got: torch gives a pool's memory back only when no graph uses the pool."""
    device = Device(left=1000)
    pool = on(device, monkeypatch)
    first = pool.capture(device.step(need=100, outputs=10))
    step, calls = device.step(need=300, outputs=10), []

    def run() -> None:
        step()
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        pool.capture(run)
    pool.release()
    assert (pool.memory.taken, pool.memory.idle) == (310 * MIB + GRAPH, 300 * MIB)
    assert first.outputs.size == 10 * MIB and device.pools == 1
