"""The memory of a device: how it is divided, the KV cache, and blocks in host memory. Worker process.

The pool of KV blocks is cut into equal pages, which each layer sees in its own shape. Layer i of every group sees
pool[i]; a block belongs to one group and is the same page of each of its layers. On the host a block is one piece, all
layers together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from kvasir import kernels
from kvasir.errors import ConfigError
from kvasir.messages import Int32Array, KVSpec

GIB = 1 << 30
LARGEST_GRAPH = 1024  # tokens
GRAPH_BYTES = 4 << 20  # measured on an H200: 3.2 MiB for each of 28 layers, 4 for 32
HEAD_BYTES = 8  # of a logit: as the model computes it, and in float32 for the stages


@dataclass(slots=True, frozen=True)
class Profile:
    """Bytes measured by running the largest step once."""

    peak: int  # largest amount that torch held, weights included
    largest_step: int  # the peak without the weights
    outside: int  # memory of the driver, of other processes and of other engines in this one


def kv_share(total: int, utilization: float, profile: Profile, graphs: int) -> int:
    """Bytes of the engine's share that the KV cache may take. Graphs use the part of the device outside that share;
    what they are expected to need beyond it is set aside."""
    ours = int(total * utilization)
    return ours - profile.peak - profile.outside - max(0, graphs - (total - ours))


def expected_graphs(
    num_graphs: int,
    num_lines: int,
    vocab_size: int,
    largest_step: int,
    num_tokens: int,
    graph_tokens: int = LARGEST_GRAPH,
) -> int:
    """An estimate of the bytes that graphs will take: what each keeps of the driver's memory, and the working memory of
    the largest forward pass and the largest head, of `num_lines`, which all share. `num_tokens` is the number of tokens
    of the largest step, of which `largest_step` is the working memory, and `graph_tokens` that of the largest graph."""
    forward = largest_step * min(num_tokens, graph_tokens) // num_tokens
    head = num_lines * vocab_size * HEAD_BYTES
    return num_graphs * GRAPH_BYTES + forward + head


def refuse_more_than_is_free(kv_bytes: int, setting: str, value: int, free: int | None, steps: int) -> None:
    """Raise a ConfigError if a cache of a chosen size leaves less than `steps` bytes (0 where that was not measured).
    The system grants more host memory than there is until it is written to, so it is checked here."""
    if free is None or kv_bytes + steps <= free:
        return
    what = f"{setting}={value} ({kv_bytes / GIB:.1f} GiB)"
    there = f"the {free / GIB:.1f} GiB of memory that are free beside the weights"
    if kv_bytes > free and not steps:
        raise ConfigError(f"{what} is more than {there}; lower it.")
    fits = (free - steps) * value // kv_bytes
    lower = f"lower {setting} to {fits}, or max_num_batched_tokens" if fits > 0 else "lower max_num_batched_tokens"
    raise ConfigError(f"{what} and what the largest step takes ({steps / GIB:.1f} GiB) are more than {there}; {lower}.")


# ---------------------------------------------------------------- out of memory

# Allocations outside torch's allocator fail with other messages: those of graphs (torch.AcceleratorError), of kernel
# code (Triton), of the math library's workspace and of the host. None of these errors has its own type.
_WORDS = re.compile(
    r"\b(CUDA|HIP)\b[^\n]*\bout of memory\b"
    r"|\b(CU|HIP)BLAS(LT)?_STATUS_ALLOC_FAILED\b"
    r"|\bDefaultCPUAllocator: (can't allocate|not enough) memory\b"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory ran out, so that less of it, or a later try, may succeed."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None


class KVMemory:
    def __init__(self, spec: KVSpec, num_blocks: int, device: torch.device) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        try:
            self.pool = _zeros((spec.num_layers, num_blocks, spec.page_bytes), device)
        except (MemoryError, RuntimeError) as error:  # numpy's and torch's
            raise _no_room(spec, num_blocks, device) from error

    def views(self, page_shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        """Each layer's pages as [num_blocks, *page_shape]."""
        return [layer.view(dtype).view(self.num_blocks, *page_shape) for layer in self.pool]

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copy blocks (from, to) in all layers. No block is both."""
        kernels.copy_blocks(self.pool, self.pool, pairs[:, 0], pairs[:, 1])


def _zeros(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Zeroed, because gathers may read slots that were never written and 0 * NaN is NaN. On the CPU numpy's zeros are
    calloc: pages take memory when they are first used."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.uint8))
    return torch.zeros(shape, dtype=torch.uint8, device=device)


def _no_room(spec: KVSpec, num_blocks: int, device: torch.device) -> ConfigError:
    gib = num_blocks * spec.block_bytes / 2**30
    return ConfigError(
        f"The KV cache of {num_blocks} blocks needs {gib:.1f} GiB, which {device} does not have; lower "
        f"kv_cache_memory_bytes (or num_gpu_blocks_override), max_num_seqs or max_model_len."
    )


# ---------------------------------------------------------------- blocks in host memory

STAGES = 4  # staging buffers in each direction
STAGE_BYTES = 64 << 20
PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


class HostMemory(Protocol):
    num_blocks: int

    def exchange(self, out: Int32Array, back: Int32Array, leaving: torch.Tensor, arriving: torch.Tensor) -> None:
        """Copy device blocks `leaving` to host blocks `out`, then host blocks `back` to device blocks `arriving`. Host
        blocks ascend; the numbers of device blocks are on the device."""

    def close(self) -> None:
        """Free the memory."""


class NoHostMemory:
    num_blocks = 0

    def exchange(self, out: Int32Array, back: Int32Array, leaving: torch.Tensor, arriving: torch.Tensor) -> None:
        raise AssertionError("a plan copies to host memory, and none was allocated")

    def close(self) -> None:
        pass


def make_host_memory(memory: KVMemory, num_blocks: int) -> HostMemory:
    if not num_blocks:
        return NoHostMemory()
    return PinnedMemory(memory, num_blocks) if memory.pool.is_cuda else PlainMemory(memory, num_blocks)


def staging_bytes(pool_bytes: int, block_bytes: int) -> int:
    """Device memory that the staging buffers take."""
    return 2 * STAGES * _blocks_per_stage(pool_bytes, block_bytes) * block_bytes


def _blocks_per_stage(pool_bytes: int, block_bytes: int) -> int:
    return max(1, min(STAGE_BYTES, pool_bytes // 256) // block_bytes)


def _host_blocks(memory: KVMemory, num_blocks: int) -> torch.Tensor:
    """[blocks, layers, page_bytes], all zero; the system provides pages when they are first written."""
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
    """Host memory of devices that copy in order; the host waits for each copy."""

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


class StagingBuffer:
    """A staging buffer, with events that say when it was filled and when it was emptied."""

    def __init__(self, num_blocks: int, like: torch.Tensor) -> None:
        layers, _, page_bytes = like.shape
        self.blocks = torch.empty(num_blocks, layers, page_bytes, dtype=like.dtype, device=like.device)
        self.pages = self.blocks.transpose(0, 1)  # as pools are seen
        self.filled = torch.cuda.Event()
        self.empty = torch.cuda.Event()


class PinnedMemory:
    """Host memory of a CUDA device. One kernel gathers blocks from the layers' pools into a staging buffer, or spreads
    them, so that a copy is one transfer per run of neighbouring host blocks. Transfers run on their own stream beside
    the step: the step may overwrite blocks as soon as they are in staging, and the device waits for arriving blocks
    where the step begins. The host never waits.
    """

    def __init__(self, memory: KVMemory, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = memory.pool
        self.blocks = _host_blocks(memory, num_blocks)
        _pin(self.blocks)
        per_stage = _blocks_per_stage(self._pool.nbytes, memory.spec.block_bytes)
        self._places = torch.arange(per_stage, dtype=torch.int32, device=self._pool.device)
        self._out = [StagingBuffer(per_stage, self._pool) for _ in range(STAGES)]
        self._in = [StagingBuffer(per_stage, self._pool) for _ in range(STAGES)]
        self._stream = torch.cuda.Stream(self._pool.device)
        self._step = torch.cuda.current_stream(self._pool.device)

    def exchange(self, out: Int32Array, back: Int32Array, leaving: torch.Tensor, arriving: torch.Tensor) -> None:
        self._step = torch.cuda.current_stream(self._pool.device)
        # Arriving blocks can be loaded first, unless some of them leave the device in this very step.
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
            self._spread(stage, arriving[chunk])

    def _chunks(self, count: int) -> Iterator[slice]:
        size = len(self._places)
        return (slice(start, min(count, start + size)) for start in range(0, count, size))

    def _send(self, stage: StagingBuffer, blocks: torch.Tensor, host_blocks: Int32Array) -> None:
        """Gather blocks on the step's stream, then transfer them on ours."""
        self._step.wait_event(stage.empty)
        kernels.copy_blocks(self._pool, stage.pages, blocks, self._places[: len(blocks)])
        stage.filled.record(self._step)
        self._stream.wait_event(stage.filled)
        with torch.cuda.stream(self._stream):
            for at, first, count in runs(host_blocks):
                self.blocks[first : first + count].copy_(stage.blocks[at : at + count], non_blocking=True)
        stage.empty.record(self._stream)

    def _load(self, stage: StagingBuffer, host_blocks: Int32Array) -> None:
        """Transfer host blocks into staging on our stream."""
        self._stream.wait_event(stage.empty)
        with torch.cuda.stream(self._stream):
            for at, first, count in runs(host_blocks):
                stage.blocks[at : at + count].copy_(self.blocks[first : first + count], non_blocking=True)
        stage.filled.record(self._stream)

    def _spread(self, stage: StagingBuffer, blocks: torch.Tensor) -> None:
        """Spread loaded blocks into the pools, on the step's stream."""
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
    """Runs of consecutive numbers in an ascending array, as (index of the first, first number, length)."""
    if len(numbers):
        starts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
        for start, end in pairwise(starts):
            yield start, int(numbers[start]), end - start


def _pin(blocks: torch.Tensor) -> None:
    """Pin the memory in place: torch rounds its own pinned memory up to a power of two, which may double it."""
    error = torch.cuda.cudart().cudaHostRegister(blocks.data_ptr(), blocks.nbytes, PORTABLE)
    if int(error) != 0:
        raise ConfigError(
            f"{blocks.nbytes / GIB:.1f} GiB of host memory cannot be pinned (CUDA error {int(error)}); "
            f"lower swap_space or kv_offloading_size."
        )
