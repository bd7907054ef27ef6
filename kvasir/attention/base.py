"""The attention interface: the batch that a backend gets, what a backend must do, and the backends by name.

The step's own keys and values are already in the paged cache when a backend is called (see kernels.rope_store).
A backend never sees requests. Worker process; the platform decides which backend `auto` stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir import platforms
from kvasir.errors import ConfigError
from kvasir.kernels.layout import SharedPrefixes, Tiles
from kvasir.platforms import attention_packages

UNBOUNDED = 1 << 30  # the bound of a sequence's length in a graph that serves any length


@dataclass(slots=True)
class AttentionBatch:
    """The layout of one step. Tensors are on the device; numpy arrays are host bounds for grids and shapes.

    Sequences stand in the plan's order: `num_decodes` with one query token each, then the longer chunks. Worker code
    builds batches only in worker/step_inputs.py.
    """

    slots: torch.Tensor  # [tokens] int64: block * block_size + offset, where each token's K/V goes
    query_start: torch.Tensor  # [sequences + 1] int32
    seq_lens: torch.Tensor  # [sequences] int32, true lengths after this step
    tables: torch.Tensor  # [rows, max_blocks] int32: the block tables of all rows ...
    rows: torch.Tensor  # [sequences] int64: ... and the row of each sequence
    num_decodes: int
    query_lens: NDArray[np.int32]  # [sequences], exact; in graphs of encoders upper bounds
    seq_bounds: NDArray[np.int32]  # [sequences], upper bounds of seq_lens; exact for chunks without drafts
    block_size: int
    causal: bool = True
    # Groups of decodes that begin with the same blocks, where reading those once is faster; None: there are none.
    shared: SharedPrefixes | None = None
    own_bound: int | None = None  # upper bound of a decode's tokens outside its shared prefix; None: see seq_bounds
    # [sequences] int32: decodes by length, the longest first, where starting with those is faster; None: as they stand.
    order: torch.Tensor | None = None
    # Set where only the device knows which sequences are decodes; num_decodes and query_lens then have no meaning.
    tiles: Tiles | None = None
    # The same step for the other groups of layers, which have their own blocks.
    other_groups: tuple[AttentionBatch, ...] = ()
    # Values that a backend computes in the first layer of a step and uses again in the others.
    step_cache: dict[Hashable, Any] = field(default_factory=dict)

    def of_group(self, group: int) -> AttentionBatch:
        return self.other_groups[group - 1] if group else self

    def last_tokens(self) -> LastTokens:
        """The batch of each sequence's last token alone."""
        count = len(self.query_lens)
        tokens = self.query_start[1:].long() - 1
        batch = replace(
            self,
            slots=self.slots[tokens],
            query_start=torch.arange(count + 1, dtype=torch.int32, device=tokens.device),
            num_decodes=count,
            query_lens=np.ones(count, np.int32),
            other_groups=tuple(other.last_tokens().batch for other in self.other_groups),
            own_bound=None,  # it was a bound of decodes, and now chunks are decodes too
            order=None,
            tiles=None,
            step_cache={},
        )
        return LastTokens(tokens, batch)

    def block_tables(self) -> torch.Tensor:
        """[sequences, blocks]: each sequence's own table, wide enough for the longest."""
        if "block tables" not in self.step_cache:
            width = -(-int(self.seq_bounds.max()) // self.block_size)
            self.step_cache["block tables"] = self.tables[:, :width].index_select(0, self.rows)
        tables: torch.Tensor = self.step_cache["block tables"]
        return tables


@dataclass(slots=True)
class LastTokens:
    """A step reduced to each sequence's last token."""

    tokens: torch.Tensor  # [sequences] int64: which of the step's tokens they are
    batch: AttentionBatch

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The lines of those tokens in x [tokens, ...]."""
        return x[self.tokens]


class AttentionBackend(Protocol):
    """Paged attention of one layer. `kv_cache` is [blocks, 2, block_size, kv_heads, head_dim], any strides."""

    # Whether its steps may become CUDA graphs: its launches depend only on a batch's shapes and bounds, and it handles
    # `tiles`.
    capturable: bool

    def forward(
        self,
        query: torch.Tensor,  # [tokens, heads, head_dim]
        kv_cache: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,  # keys older than this many tokens are not seen; None: all are
        softcap: float | None = None,  # scores s become softcap * tanh(s / softcap) before any is hidden
        sinks: torch.Tensor | None = None,  # [heads] float32: a further score of each head's softmax, without a value
    ) -> torch.Tensor:  # [tokens, heads, head_dim]
        ...

    def forward_latent(
        self,
        query: torch.Tensor,  # [tokens, heads, plain_dim + rotary_dim]
        kv_cache: torch.Tensor,  # [blocks, block_size, latent_dim + rotary_dim]; see layers/latent_attention.py
        up: torch.Tensor,  # [heads, plain_dim + value_dim, latent_dim]
        batch: AttentionBatch,
        *,
        scale: float,
        unit: float = 1.0,  # a cache of 8-bit floats holds values divided by this
    ) -> torch.Tensor:  # [tokens, heads, value_dim]
        ...


def _torch(device: torch.device) -> AttentionBackend:
    from kvasir.attention.torch import TorchAttention

    return TorchAttention()


def _triton(device: torch.device) -> AttentionBackend:
    from kvasir.attention.triton import TritonAttention

    return TritonAttention()


def _cpu(device: torch.device) -> AttentionBackend:
    from kvasir.attention.cpu import CpuAttention

    return CpuAttention()


def _flash_attn(device: torch.device) -> AttentionBackend:
    from kvasir.attention.flash_attn import FlashAttention

    return FlashAttention(attention_packages.require("flash_attn", platforms.select(str(device))))


def _flashinfer(device: torch.device) -> AttentionBackend:
    from kvasir.attention.flashinfer import FlashInferAttention

    return FlashInferAttention(device)


# Imported on use: a backend may need a library that is not installed.
_BACKENDS: dict[str, Callable[[torch.device], AttentionBackend]] = {
    "torch": _torch,
    "triton": _triton,
    "cpu": _cpu,
    "flash_attn": _flash_attn,
    "flashinfer": _flashinfer,
}


def select(name: str, device: torch.device) -> AttentionBackend:
    """Return the backend of this name for one device."""
    if name not in _BACKENDS:
        raise ConfigError(f"attention_backend={name!r} is not known; there is {', '.join(_BACKENDS)}.")
    return _BACKENDS[name](device)
