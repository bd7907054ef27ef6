"""Paged attention by FlashAttention, whichever generation is installed: a whole step in one call.

Lengths are read on the device; the host's bounds only size the grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvasir.attention.base import AttentionBatch
from kvasir.platforms.attention_packages import FA2, FA3, FA4_BLACKWELL, FA4_HOPPER, Package, load

# (step, window) -> the arguments of one generation's call
Arguments = Callable[["_Step", int | None], dict[str, Any]]


class FlashAttention:
    """See AttentionBackend. Queries and cache are of one type, float16 or bfloat16."""

    capturable = False  # its calls cannot use `tiles`, nor bounds far above the true lengths

    def __init__(self, package: Package) -> None:
        name, self._arguments = _GENERATIONS[package]
        self._attend: Callable[..., Any] = getattr(load(package), name)

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
        assert batch.causal and batch.tiles is None, "FlashAttention runs causal steps that the host has laid out"
        if "flash_attn" not in batch.step_cache:
            batch.step_cache["flash_attn"] = _Step.of(batch)
        step: _Step = batch.step_cache["flash_attn"]
        keys, values = kv_cache[:, 0], kv_cache[:, 1]  # [blocks, block_size, kv_heads, head_dim], not copied
        found = self._attend(
            query,
            keys,
            values,
            softmax_scale=scale,
            causal=True,
            softcap=softcap or 0.0,
            **self._arguments(step, window),
        )
        # the fourth generation returns sums of weights, too
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out

    def forward_latent(self, *_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("the settings refuse models with latent attention")


@dataclass(slots=True)
class _Step:
    """Arguments that the calls of all layers share."""

    query_start: torch.Tensor  # [sequences + 1] int32
    key_start: torch.Tensor  # [sequences + 1] int32, as if the keys stood in a row
    key_lens: torch.Tensor  # [sequences] int32
    tables: torch.Tensor  # [sequences, blocks] int32
    longest_query: int
    longest_keys: int  # at most

    @classmethod
    def of(cls, batch: AttentionBatch) -> _Step:
        key_start = torch.zeros_like(batch.query_start)
        torch.cumsum(batch.seq_lens, 0, dtype=torch.int32, out=key_start[1:])
        longest = int(batch.query_lens.max()), int(batch.seq_bounds.max())
        return cls(batch.query_start, key_start, batch.seq_lens, batch.block_tables(), *longest)


# ---------------------------------------------------------------- the generations
#
# A query sees itself and `window - 1` keys before it. All three count the keys before it, and nothing comes after.


def _second(step: _Step, window: int | None) -> dict[str, Any]:
    return {
        "cu_seqlens_q": step.query_start,
        "cu_seqlens_k": step.key_start,
        "max_seqlen_q": step.longest_query,
        "max_seqlen_k": step.longest_keys,
        "block_table": step.tables,
        "window_size": (-1, -1) if window is None else (window - 1, 0),
    }


def _third(step: _Step, window: int | None) -> dict[str, Any]:
    return {
        "cache_seqlens": step.key_lens,
        "page_table": step.tables,
        "cu_seqlens_q": step.query_start,
        "max_seqlen_q": step.longest_query,
        "window_size": (-1, -1) if window is None else (window - 1, 0),
    }


def _fourth(step: _Step, window: int | None) -> dict[str, Any]:
    # It reads rows past the end of a last page and multiplies them by 0, so they must be finite: the pool is zeroed.
    return {
        "cu_seqlens_q": step.query_start,
        "max_seqlen_q": step.longest_query,
        "max_seqlen_k": step.longest_keys,
        "seqused_k": step.key_lens,
        "page_table": step.tables,
        "window_size": (None, None) if window is None else (window - 1, 0),
    }


_GENERATIONS: dict[Package, tuple[str, Arguments]] = {
    FA2: ("flash_attn_varlen_func", _second),
    FA3: ("flash_attn_with_kvcache", _third),
    FA4_HOPPER: ("flash_attn_varlen_func", _fourth),
    FA4_BLACKWELL: ("flash_attn_varlen_func", _fourth),
}
