"""The attention interface: what a step tells a backend, and what a backend must do.

The step's own keys and values are in the paged cache already when a backend is asked (see kernels.rope_store).
A backend never sees requests.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.kernels.layout import SharedPrefixes, Tiles


@dataclass(slots=True)
class AttentionBatch:
    """One step's layout. Tensors live on the device; numpy arrays are host bounds for grids and shapes.

    Sequences stand in plan order: `num_decodes` of one query token each, then the longer chunks.
    """

    slots: torch.Tensor  # [tokens] int64: block * block_size + offset, where each token's K/V goes
    query_start: torch.Tensor  # [sequences + 1] int32
    seq_lens: torch.Tensor  # [sequences] int32, true lengths after this step
    tables: torch.Tensor  # [rows, max_blocks] int32: the block tables of all rows ...
    rows: torch.Tensor  # [sequences] int64: ... and which one is whose
    num_decodes: int
    query_lens: NDArray[np.int32]  # [sequences], exact
    seq_bounds: NDArray[np.int32]  # [sequences], upper bounds of seq_lens; exact for chunks
    block_size: int
    causal: bool = True
    # Of sequences of one token, those that begin with the same blocks, where reading these once pays; None: none do.
    shared: SharedPrefixes | None = None
    own_bound: int | None = None  # no sequence of one token has more that it does not share; None: see seq_bounds
    # [sequences] int32: those of one token, the longest first, where it pays to begin with them; None: as they stand.
    order: torch.Tensor | None = None
    # Set where only the device knows which sequences run one token: num_decodes and query_lens then say nothing.
    tiles: Tiles | None = None
    # The step of the other groups of layers, whose blocks are others.
    other_groups: tuple[AttentionBatch, ...] = ()
    # What a backend worked out for this step in one layer and uses again in the others.
    step_cache: dict[Hashable, Any] = field(default_factory=dict)

    def of_group(self, group: int) -> AttentionBatch:
        return self.other_groups[group - 1] if group else self

    def last_tokens(self) -> LastTokens:
        """Each sequence's last token alone."""
        count = len(self.query_lens)
        tokens = self.query_start[1:].long() - 1
        batch = replace(
            self,
            slots=self.slots[tokens],
            query_start=torch.arange(count + 1, dtype=torch.int32, device=tokens.device),
            num_decodes=count,
            query_lens=np.ones(count, np.int32),
            other_groups=tuple(other.last_tokens().batch for other in self.other_groups),
            own_bound=None,  # of chunks it was not told
            order=None,
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
    """What is left of a step where only each sequence's last token is asked for."""

    tokens: torch.Tensor  # [sequences] int64: which of the step's tokens they are
    batch: AttentionBatch

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Of [tokens, ...], the lines of those tokens."""
        return x[self.tokens]


class AttentionBackend(Protocol):
    """Paged attention of one layer. `kv_cache` is [blocks, 2, block_size, kv_heads, head_dim], any strides."""

    # Whether its steps may become CUDA graphs: what it launches depends on nothing but a batch's shapes and bounds, and
    # it knows what to do with `tiles`.
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
    ) -> torch.Tensor:  # [tokens, heads, head_dim]
        ...
