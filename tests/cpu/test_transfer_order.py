"""The order of transfers, without a GPU: streams that keep their work and run it in any order that events allow.

Whatever order that is, blocks that leave must be read before the step writes, blocks that arrive must be there when
it reads, and staging buffers and host blocks must not be filled while somebody still takes from them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from kvasir import kernels
from kvasir.kernels import reference
from kvasir.messages import KVSpec
from kvasir.worker import memory as worker_memory
from kvasir.worker.memory import STAGES, KVMemory, PinnedMemory


class Mark:
    """A place in a stream."""

    passed = False


class Stream:
    def __init__(self, *_: Any) -> None:
        self.work: deque[Callable[[], object] | Mark] = deque()  # a mark is waited for

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            self.work.append(event.mark)

    def can_go_on(self) -> bool:
        return bool(self.work) and (not isinstance(self.work[0], Mark) or self.work[0].passed)

    def go_on(self) -> None:
        work = self.work.popleft()
        if not isinstance(work, Mark):
            work()


class Event:
    def __init__(self) -> None:
        self.mark: Mark | None = None

    def record(self, stream: Stream) -> None:
        mark = self.mark = Mark()
        stream.work.append(lambda: setattr(mark, "passed", True))


class Device:
    """Stands for torch.cuda."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.step = self.current = Stream()
        self.streams = [self.step]

    def new_stream(self, *_: Any) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.step

    def run(self, most: int | None = None) -> None:
        """Some of what could run, or all."""
        while most is None or most > 0:
            ready = [stream for stream in self.streams if stream.can_go_on()]
            if not ready:
                return
            ready[int(self.rng.integers(len(ready)))].go_on()
            most = None if most is None else most - 1


class Lazy:
    """A tensor whose copies are made when the stream comes to them."""

    def __init__(self, tensor: torch.Tensor, device: Device) -> None:
        self.tensor, self.device = tensor, device

    def __getitem__(self, part: slice) -> Lazy:
        return Lazy(self.tensor[part], self.device)

    def copy_(self, source: Lazy, non_blocking: bool) -> None:
        assert non_blocking and self.device.current is not self.device.step, "transfers run beside the step"
        self.device.current.work.append(lambda: self.tensor.copy_(source.tensor))


def make(device: Device, monkeypatch: pytest.MonkeyPatch) -> tuple[KVMemory, PinnedMemory, torch.Tensor]:
    monkeypatch.setattr(torch.cuda, "Stream", device.new_stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.step)
    monkeypatch.setattr(torch.cuda, "stream", device.on)
    monkeypatch.setattr(worker_memory, "_pin", lambda blocks: None)

    def copy_blocks(*tensors: torch.Tensor) -> None:
        device.current.work.append(lambda: reference.copy_blocks(*tensors))

    monkeypatch.setattr(kernels, "copy_blocks", copy_blocks)
    memory = KVMemory(KVSpec(num_layers=2, block_size=4, page_bytes=8), 24, torch.device("cpu"))
    host = PinnedMemory(memory, 30)
    blocks = host.blocks
    host.blocks = Lazy(blocks, device)  # type: ignore[assignment]
    for stage in (*host._out, *host._in):
        stage.blocks = Lazy(stage.blocks, device)  # type: ignore[assignment]
    assert len(host._places) == 1, "staging is used many times in one exchange"
    return memory, host, blocks


@pytest.mark.parametrize("seed", range(20))
def test_any_order_that_events_allow_gives_the_same_blocks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    device = Device(rng)
    memory, host, blocks = make(device, monkeypatch)
    pool, mirror = memory.pool.clone(), blocks.clone()
    seen: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    for _ in range(8):
        out, back = (np.sort(rng.choice(30, int(rng.integers(0, 3 * STAGES)), False)).astype(np.int32) for _ in "ab")
        if rng.random() < 0.5:
            back = np.setdiff1d(back, out)
        leaving, arriving = (torch.from_numpy(rng.choice(24, len(side), False)) for side in (out, back))
        host.exchange(out, back, leaving, arriving)
        written = torch.from_numpy(rng.integers(0, 256, pool.shape, np.uint8))
        device.step.work.append(lambda: seen.append(memory.pool.clone()))  # the step reads, then writes
        device.step.work.append(lambda written=written: memory.pool.copy_(written))
        device.run(int(rng.integers(0, 30)))
        mirror[out] = pool[:, leaving].transpose(0, 1)
        pool[:, arriving] = mirror[back].transpose(0, 1)
        wanted.append(pool.clone())
        pool = written.clone()
    device.run()
    assert not any(stream.work for stream in device.streams), "streams wait for each other"
    assert all(torch.equal(got, want) for got, want in zip(seen, wanted, strict=True))
    assert torch.equal(blocks, mirror)


def test_what_arrives_does_not_wait_for_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(np.random.default_rng(0))
    _, host, _ = make(device, monkeypatch)
    never = Mark()
    device.step.work.append(never)  # a step that is still running
    numbers = np.arange(1, STAGES + 1, dtype=np.int32)
    host.exchange(numbers, numbers + 10, torch.from_numpy(numbers), torch.from_numpy(numbers + 10))
    side = device.streams[1]
    before = len(side.work)
    device.run()
    transfers = before - len(side.work)
    assert transfers >= 2 * STAGES and device.step.work[0] is never, "all of it was loaded meanwhile"
