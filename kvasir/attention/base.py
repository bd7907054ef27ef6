"""The attention interface: what a step tells a backend, and what a backend must do.

A backend stores the step's keys and values into the paged cache, then attends. It never sees requests.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(slots=True)
class AttentionBatch:
    """One step's layout. Tensors live on the device; numpy arrays are host bounds for grids and shapes.

    Rows stand in plan order: `num_decodes` rows of one query token each, then the longer chunks.
    """

    slots: torch.Tensor  # [tokens] int64: block * block_size + offset, where each token's K/V goes
    query_start: torch.Tensor  # [rows + 1] int32
    seq_lens: torch.Tensor  # [rows] int32, true lengths after this step
    block_tables: torch.Tensor  # [rows, max_blocks] int32; past a row's last block any valid block id may stand
    num_decodes: int
    query_lens: NDArray[np.int32]  # [rows], exact
    seq_bounds: NDArray[np.int32]  # [rows], upper bounds of seq_lens; exact for chunks
    block_size: int
    causal: bool = True
    # What a backend has worked out of the fields above, kept for the step's other layers.
    notes: dict[Hashable, Any] = field(default_factory=dict)


class AttentionBackend(Protocol):
    """Paged attention of one layer. `kv_cache` is [blocks, 2, block_size, kv_heads, head_dim], any strides."""

    def forward(
        self,
        query: torch.Tensor,  # [tokens, heads, head_dim]
        key: torch.Tensor,  # [tokens, kv_heads, head_dim]
        value: torch.Tensor,  # [tokens, kv_heads, head_dim]
        kv_cache: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,  # keys older than this many tokens are not seen; None: all are
    ) -> torch.Tensor:  # [tokens, heads, head_dim]
        ...
