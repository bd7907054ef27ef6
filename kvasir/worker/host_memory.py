"""Blocks in host memory, and the copies between there and the device that a plan asks for. Worker process.

On the host a block is one piece, all layers together. On a CUDA device it is gathered from (or dealt to) the layers'
pools by one kernel through a staging buffer, so that however many pages there are, a copy is one transfer for every
run of neighbouring host blocks. Transfers run on a stream of their own beside the step: what leaves is safe as soon as
it is in staging, so the step may write over it at once; what arrives starts before the step's turn comes and is waited
for, by the device, where the step begins. Nothing here makes the host wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from kvasir import kernels
from kvasir.errors import ConfigError
from kvasir.messages import Int32Array
from kvasir.worker.kv_memory import KVMemory

STAGES = 4  # staging buffers in each direction
STAGE_BYTES = 64 << 20
PORTABLE = 1  # cudaHostRegisterPortable: pinned whichever device is the current one
GIB = 1 << 30


class HostMemory(Protocol):
    num_blocks: int

    def exchange(self, out: Int32Array, back: Int32Array, leaving: torch.Tensor, arriving: torch.Tensor) -> None:
        """Copy blocks `leaving` the device to the host's `out`, then those of `back` to `arriving`. Host blocks
        ascend; the device's numbers are on the device."""

    def close(self) -> None:
        """Give the memory back."""


class NoHostMemory:
    num_blocks = 0

    def exchange(self, out: Int32Array, back: Int32Array, leaving: torch.Tensor, arriving: torch.Tensor) -> None:
        raise AssertionError("a plan copies to host memory that was never taken")

    def close(self) -> None:
        pass


def make_host_memory(memory: KVMemory, num_blocks: int) -> HostMemory:
    if not num_blocks:
        return NoHostMemory()
    return PinnedMemory(memory, num_blocks) if memory.pool.is_cuda else PlainMemory(memory, num_blocks)


def staging_bytes(pool_bytes: int, block_bytes: int) -> int:
    """What the staging buffers take of the device's memory."""
    return 2 * STAGES * _blocks_per_stage(pool_bytes, block_bytes) * block_bytes


def _blocks_per_stage(pool_bytes: int, block_bytes: int) -> int:
    return max(1, min(STAGE_BYTES, pool_bytes // 256) // block_bytes)


def _host_blocks(memory: KVMemory, num_blocks: int) -> torch.Tensor:
    """[blocks, layers, page_bytes], all zero; the system gives the memory when it is first used."""
    spec = memory.spec
    needed = num_blocks * spec.block_bytes
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > total:
        raise ConfigError(
            f"swap_space and kv_offloading_size ask for {needed / GIB:.1f} GiB of host memory on each device, and the "
            f"machine has {total / GIB:.1f} GiB; lower them."
        )
    return torch.from_numpy(np.zeros((num_blocks, spec.num_layers, spec.page_bytes), np.uint8))


class PlainMemory:
    """For devices that copy in order: the host waits where it must."""

    def __init__(self, memory: KVMemory, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks = _host_blocks(memory, num_blocks)
        self._pool = memory.pool.transpose(0, 1)  # [blocks, layers, page_bytes]

    def exchange(self, out: Int32Array, back: Int32Array, leaving: torch.Tensor, arriving: torch.Tensor) -> None:
        if len(out):
            self.blocks[out] = self._pool[leaving.long()].cpu()
        if len(back):
            self._pool[arriving.long()] = self.blocks[back].to(self._pool.device)

    def close(self) -> None:
        self.blocks = self.blocks[:0]


class Stage:
    """A staging buffer and when it may be used: `filled` by whoever fills it, `empty` by whoever takes it out."""

    def __init__(self, num_blocks: int, like: torch.Tensor) -> None:
        layers, _, page_bytes = like.shape
        self.blocks = torch.empty(num_blocks, layers, page_bytes, dtype=like.dtype, device=like.device)
        self.pages = self.blocks.transpose(0, 1)  # as pools are seen
        self.filled = torch.cuda.Event()
        self.empty = torch.cuda.Event()


class PinnedMemory:
    def __init__(self, memory: KVMemory, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = memory.pool
        self.blocks = _host_blocks(memory, num_blocks)
        _pin(self.blocks)
        per_stage = _blocks_per_stage(self._pool.nbytes, memory.spec.block_bytes)
        self._places = torch.arange(per_stage, dtype=torch.int32, device=self._pool.device)
        self._out = [Stage(per_stage, self._pool) for _ in range(STAGES)]
        self._in = [Stage(per_stage, self._pool) for _ in range(STAGES)]
        self._stream = torch.cuda.Stream(self._pool.device)
        self._step = torch.cuda.current_stream(self._pool.device)

    def exchange(self, out: Int32Array, back: Int32Array, leaving: torch.Tensor, arriving: torch.Tensor) -> None:
        self._step = torch.cuda.current_stream(self._pool.device)
        # What arrives need not wait for what leaves, unless it leaves in this very step.
        early = 0 if np.isin(back, out).any() else STAGES
        chunks = list(self._chunks(len(back)))
        for turn, chunk in enumerate(chunks[:early]):
            self._load(self._in[turn], back[chunk])
        for turn, chunk in enumerate(self._chunks(len(out))):
            self._send(self._out[turn % STAGES], leaving[chunk], out[chunk])
        for turn, chunk in enumerate(chunks):
            stage = self._in[turn % STAGES]
            if turn >= early:
                self._load(stage, back[chunk])
            self._deal(stage, arriving[chunk])

    def _chunks(self, count: int) -> Iterator[slice]:
        size = len(self._places)
        return (slice(start, min(count, start + size)) for start in range(0, count, size))

    def _send(self, stage: Stage, blocks: torch.Tensor, host_blocks: Int32Array) -> None:
        """Gather in the step's order, then transfer beside it."""
        self._step.wait_event(stage.empty)
        kernels.copy_blocks(self._pool, stage.pages, blocks, self._places[: len(blocks)])
        stage.filled.record(self._step)
        self._stream.wait_event(stage.filled)
        with torch.cuda.stream(self._stream):
            for at, first, count in runs(host_blocks):
                self.blocks[first : first + count].copy_(stage.blocks[at : at + count], non_blocking=True)
        stage.empty.record(self._stream)

    def _load(self, stage: Stage, host_blocks: Int32Array) -> None:
        """Transfer beside whatever step runs now."""
        self._stream.wait_event(stage.empty)
        with torch.cuda.stream(self._stream):
            for at, first, count in runs(host_blocks):
                stage.blocks[at : at + count].copy_(self.blocks[first : first + count], non_blocking=True)
        stage.filled.record(self._stream)

    def _deal(self, stage: Stage, blocks: torch.Tensor) -> None:
        """Put what was loaded in its place, once the device has come to this step."""
        self._step.wait_event(stage.filled)
        kernels.copy_blocks(stage.pages, self._pool, self._places[: len(blocks)], blocks)
        stage.empty.record(self._step)

    def close(self) -> None:
        torch.cuda.synchronize(self._pool.device)
        if len(self.blocks):
            torch.cuda.cudart().cudaHostUnregister(self.blocks.data_ptr())
        self.blocks = self.blocks[:0]
        self._out, self._in = [], []


def runs(numbers: Int32Array) -> Iterator[tuple[int, int, int]]:
    """Ascending numbers as (where a run begins, its first number, its length)."""
    if len(numbers):
        starts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
        for start, end in pairwise(starts):
            yield start, int(numbers[start]), end - start


def _pin(blocks: torch.Tensor) -> None:
    """Lock the memory as it is: torch's own pinned memory is rounded up to a power of two, which may double it."""
    said = torch.cuda.cudart().cudaHostRegister(blocks.data_ptr(), blocks.nbytes, PORTABLE)
    if int(said) != 0:
        raise ConfigError(
            f"{blocks.nbytes / GIB:.1f} GiB of host memory cannot be pinned (CUDA error {int(said)}); "
            f"lower swap_space or kv_offloading_size."
        )
