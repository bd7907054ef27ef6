"""Paged attention by FlashInfer: decodes through one of its wrappers, chunks through the other.

A wrapper gets a step's lengths on the host (`plan`), once for all layers of a kind, and then runs for each of them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.attention.base import AttentionBatch
from kvasir.kernels.layout import upload
from kvasir.platforms.attention_packages import FLASHINFER_PYTHON, load

# For the partial results of split sequences: heads to a key head * multiprocessors * 2 blocks * 128 rows * head_dim * 4
# bytes at most, which for eight heads of 256 on an H200 are 264 MiB. FlashInfer refuses plans that need more.
WORKSPACE_BYTES = 384 << 20


@dataclass(frozen=True, slots=True)
class _Layer:
    """All that a plan depends on besides the step; layers for which it is equal share a plan."""

    scale: float
    window: int | None
    softcap: float | None
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def options(self) -> dict[str, Any]:
        """Arguments of both wrappers. Their window counts the keys before a query, ours also the query."""
        return {
            "window_left": -1 if self.window is None else self.window - 1,
            "logits_soft_cap": self.softcap or 0.0,
            "sm_scale": self.scale,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }


class FlashInferAttention:
    """See AttentionBackend. Queries and cache are of one type, float16 or bfloat16. One object serves all layers."""

    capturable = False  # a plan is made on the host

    def __init__(self, device: torch.device) -> None:
        flashinfer = load(FLASHINFER_PYTHON)
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # Tensor cores take any number of heads to a key head, which the other kernels do not.
        self._decoders = _Wrappers(
            lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        )
        self._prefillers = _Wrappers(lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"))

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks is None, "the settings refuse models with sinks"
        assert batch.causal and batch.tiles is None, "FlashInfer runs causal steps that the host has laid out"
        (tokens, heads, head_dim), kv_heads = query.shape, kv_cache.shape[3]
        layer = _Layer(scale, window, softcap, heads, kv_heads, head_dim, query.dtype)
        out = torch.empty(tokens, heads, head_dim, dtype=query.dtype, device=query.device)
        n = batch.num_decodes  # sequences, and tokens
        if n:
            self._planned(batch, layer, self._plan_decodes).run(query[:n], kv_cache, out=out[:n])
        if n < tokens:
            self._planned(batch, layer, self._plan_chunks).run(query[n:], kv_cache, out=out[n:])
        return out

    def forward_latent(self, *_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("the settings refuse models with latent attention")

    def _planned(self, batch: AttentionBatch, layer: _Layer, plan: Callable[[AttentionBatch, _Layer], _Lent]) -> Any:
        note = (plan.__name__, layer)
        if note not in batch.step_cache:
            batch.step_cache[note] = plan(batch, layer)
        lent: _Lent = batch.step_cache[note]
        return lent.wrapper

    def _plan_decodes(self, batch: AttentionBatch, layer: _Layer) -> _Lent:
        pages = _pages(batch, 0, batch.num_decodes)
        lent = self._decoders.lend()
        lent.wrapper.plan(
            pages.start, pages.indices, pages.last_len, layer.heads, layer.kv_heads, layer.head_dim, batch.block_size,
            **layer.options(),
        )  # fmt: skip
        lent.planned()
        return lent

    def _plan_chunks(self, batch: AttentionBatch, layer: _Layer) -> _Lent:
        n = batch.num_decodes
        pages = _pages(batch, n, len(batch.query_lens))
        lent = self._prefillers.lend()
        lent.wrapper.plan(
            _on_host(_starts(batch.query_lens[n:]), batch), pages.start, pages.indices, pages.last_len, layer.heads,
            layer.kv_heads, layer.head_dim, batch.block_size, causal=True, **layer.options(),
        )  # fmt: skip
        lent.planned()
        return lent


# ---------------------------------------------------------------- pages


@dataclass(slots=True)
class _Pages:
    """The blocks of some of a step's sequences, one sequence after the other."""

    start: torch.Tensor  # [sequences + 1] int32, on the host: where a sequence's blocks begin
    indices: torch.Tensor  # [blocks of all] int32, on the device
    last_len: torch.Tensor  # [sequences] int32, on the host: tokens in the last of them


def _pages(batch: AttentionBatch, begin: int, end: int) -> _Pages:
    """The pages of the sequences from `begin` to `end`, computed once per step.

    This is where `seq_bounds` must be the true lengths, not just bounds: a bound too high would have keys read that
    were never written. They are: every row's number of tokens is known when a step is planned (StepPlan.bounds). Once
    it is not, as with drafts that may be rejected, either `last_len` and the blocks that count must come from
    `seq_lens` on the device, past the wrappers' planning, or such a step be planned when its lengths are known.
    """
    note = ("flashinfer pages", begin)
    if note not in batch.step_cache:
        bounds, block_size, tables = batch.seq_bounds[begin:end], batch.block_size, batch.block_tables()
        counts = -(-bounds // block_size)
        start, width = _starts(counts), tables.shape[1]
        column = np.arange(start[-1], dtype=np.int32) - np.repeat(start[:-1], counts)
        (place,) = upload([np.repeat(np.arange(begin, end, dtype=np.int32), counts) * width + column], tables.device)
        indices = tables.view(-1).index_select(0, place)
        last_len = bounds - (counts - 1) * block_size
        batch.step_cache[note] = _Pages(_on_host(start, batch), indices, _on_host(last_len, batch))
    pages: _Pages = batch.step_cache[note]
    return pages


def _starts(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    start = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=start[1:])
    return start


def _on_host(array: NDArray[np.int32], batch: AttentionBatch) -> torch.Tensor:
    """Pinned host memory: FlashInfer reads these arrays on the host and copies them to the device without waiting."""
    tensor = torch.from_numpy(array.astype(np.int32))
    return tensor.pin_memory() if batch.rows.is_cuda else tensor


# ---------------------------------------------------------------- wrappers


@dataclass(eq=False)
class _Lent:
    """A wrapper that has a step's plan in it."""

    wrapper: Any
    copied: torch.cuda.Event | None  # the plan is on the device; None where the device is the host

    def planned(self) -> None:
        if self.copied is not None:
            self.copied.record(torch.cuda.current_stream(self.wrapper.device))


class _Wrappers:
    """Wrappers to plan with. Each holds one plan, in buffers of its own on the host and on the device.

    A step's layers may need several plans at once, and the host may plan the next step before the device has read this
    one's. So a wrapper is lent to a step until its cache is dropped, and to the next one only when the device has its
    copy of the last plan. If none is ready, a further wrapper is made, so that nothing waits.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._spare: deque[tuple[Any, torch.cuda.Event | None]] = deque()

    def lend(self) -> _Lent:
        wrapper, copied = self._take()
        lent = _Lent(wrapper, copied)
        weakref.finalize(lent, self._spare.append, (wrapper, copied))
        return lent

    def _take(self) -> tuple[Any, torch.cuda.Event | None]:
        """The wrapper that was returned first. Plans reach the device in order: if its plan has not, no other has."""
        if self._spare and (self._spare[0][1] is None or self._spare[0][1].query()):
            return self._spare.popleft()
        wrapper = self._make()
        return wrapper, torch.cuda.Event() if wrapper.device.type == "cuda" else None
