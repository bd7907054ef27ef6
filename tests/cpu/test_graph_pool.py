"""Captures and the memory they take, on a device made of numbers. What a real one does is for tests/gpu."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvasir.worker import graph_memory
from kvasir.worker.graph_memory import MIB, GraphPool

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
    monkeypatch.setattr(graph_memory, "_capture_stream", lambda _: stream)
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
    events = ["capture waits for step", "run", "released", "captured", "step waits for capture"]
    assert device.events == events and pool.taken == 100 * MIB + GRAPH
    device.events.clear()
    graphs.append(pool.capture(device.step(need=50, outputs=5)))  # in what the first one leaves
    assert pool.taken == 100 * MIB + 2 * GRAPH and device.pools == 1
    assert device.events == ["capture waits for step", "captured", "step waits for capture"], "only the first is run"


def test_the_largest_steps_memory_is_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(left=600)
    pool = on(device, monkeypatch)
    pool.kept_free = 550 * MIB
    with pytest.raises(torch.OutOfMemoryError, match=r"^600 MiB are free, of which 550 are kept for the largest step"):
        pool.capture(device.step(need=10, outputs=10))
    assert pool.taken == 0 and device.events[-1] == "step waits for capture"
    pool.kept_free = 500 * MIB
    pool.capture(device.step(need=10, outputs=10))


def test_a_capture_that_breaks_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(left=1000)
    pool = on(device, monkeypatch)

    def run() -> None:
        if device.capturing:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        pool.capture(run)
    assert not device.capturing and device.events[-1] == "step waits for capture"
