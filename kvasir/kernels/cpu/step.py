"""A step's layout and a layer's cache as the library reads them. Structures hold addresses: whoever makes one keeps the
tensors it points to for as long as it is used."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvasir.platforms.cpu_structs import Cache, Group, Rotation, Step


class Batch(Protocol):
    """What is read of an AttentionBatch."""

    slots: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    tables: torch.Tensor
    rows: torch.Tensor
    causal: bool
    other_groups: tuple[Any, ...]


class StepView:
    """A batch, with ids and positions where they are known, for calls into the library."""

    def __init__(
        self, batch: Batch, ids: torch.Tensor | None = None, positions: torch.Tensor | None = None, *, tokens: int = 0
    ) -> None:
        batches: Sequence[Batch] = (batch, *batch.other_groups)
        self._kept = [batch.rows, batch.query_start, batch.seq_lens, ids, positions]
        self._kept += [tensor for each in batches for tensor in (each.slots, each.tables)]
        self._groups = (Group * len(batches))(
            *(Group(address(each.slots, torch.int64), *rows_address(each.tables, torch.int32)) for each in batches)
        )
        self.struct = Step(
            tokens=tokens or len(batch.slots),
            sequences=len(batch.seq_lens),
            causal=batch.causal,
            num_groups=len(batches),
            ids=address(ids, torch.int64),
            positions=address(positions, torch.int64),
            rows=address(batch.rows, torch.int64),
            query_start=address(batch.query_start, torch.int32),
            lengths=address(batch.seq_lens, torch.int32),
            groups=ctypes.addressof(self._groups),
        )


def cache_of(kv_cache: torch.Tensor) -> Cache:
    """[blocks, 2, block_size, kv_heads, head_dim] of bfloat16, or of int8 with four more bytes for a scale."""
    block, value, token, head, last = kv_cache.stride()
    if last != 1 or kv_cache.dtype not in (torch.bfloat16, torch.int8):
        raise TypeError(
            f"a cache of bfloat16 or int8, heads dense, is wanted, not {kv_cache.dtype} {kv_cache.stride()}"
        )
    return Cache(
        data=kv_cache.data_ptr(),
        block_stride=block,
        value_offset=value,
        token_stride=token,
        head_stride=head,
        block_size=kv_cache.shape[2],
        is_int8=kv_cache.dtype == torch.int8,
    )


def rotation_of(table: torch.Tensor | None, interleaved: bool) -> Rotation:
    if table is None:
        return Rotation(None, 0, 0)
    return Rotation(address(table, torch.float32), table.shape[1], interleaved)


def address(tensor: torch.Tensor | None, dtype: torch.dtype) -> int | None:
    """Where a dense tensor's numbers begin."""
    if tensor is None:
        return None
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise TypeError(f"a dense tensor of {dtype} is wanted, not {tensor.dtype} with strides {tensor.stride()}")
    return tensor.data_ptr()


def rows_address(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """The same for dense rows, and how far they are apart."""
    if tensor.dtype != dtype or tensor.dim() != 2 or tensor.stride(1) != 1:
        raise TypeError(f"dense rows of {dtype} are wanted, not {tensor.dtype} with strides {tensor.stride()}")
    return tensor.data_ptr(), tensor.stride(0)
