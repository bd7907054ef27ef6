"""The operations of kernels/reference.py, under the same names, as the CPU library computes them: for bfloat16 (logits
may be float32). And the views of tensors that its functions take."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.kernels.cpu.library import (
    ACTIVATIONS,
    MAX_PARTS,
    AdaptersStruct,
    CacheStruct,
    DraftRowsStruct,
    GroupStruct,
    LayerStruct,
    LookupStruct,
    NormStruct,
    RotationStruct,
    RowsStruct,
    SamplingStruct,
    StepStruct,
    StepTokensStruct,
    loaded,
)
from kvasir.kernels.layout import AdapterMatrices, TokenSlots

NONE = NormStruct()
_ONE_BLOCK = 2**31 - 1  # tokens: no sequence has more


def norm_struct(
    gain: torch.Tensor | None, eps: float, bias: torch.Tensor | None = None, *, layer: bool = False
) -> NormStruct:
    """A norm as the library reads it: an RMS norm, or with `layer` a LayerNorm."""
    if gain is None:
        return NONE
    kind = 3 if layer else 2 if gain.dtype == torch.float32 else 1
    wanted = torch.float32 if kind == 2 else torch.bfloat16
    return NormStruct(kind, eps, address(gain, wanted), address(bias, torch.bfloat16))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    rows = x.numel() // x.shape[-1]
    norm = norm_struct(weight, eps)
    loaded().kv_norm(ctypes.byref(norm), _at(x), rows, x.shape[-1], _at(out))
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dim() > residual.dim():
        x = x.sum(0)
    x, residual = x.contiguous(), residual.clone(memory_format=torch.contiguous_format)
    if x.shape != residual.shape or residual.dtype != x.dtype:
        raise TypeError(f"{list(x.shape)} of {x.dtype} cannot be added to {list(residual.shape)} of {residual.dtype}")
    out = torch.empty_like(x)
    norm = norm_struct(weight, eps)
    rows = x.numel() // x.shape[-1]
    loaded().kv_add_norm(ctypes.byref(norm), _at(x), _at(residual), rows, x.shape[-1], _at(out))
    return out, residual


def gated_activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    x = x.contiguous()
    size = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype)
    loaded().kv_gated(_at(x), out.numel() // size, size, ACTIVATIONS[kind], _at(out))
    return out


def adapt(x: torch.Tensor, y: torch.Tensor, matrices: AdapterMatrices, slots: TokenSlots) -> torch.Tensor:
    x, y = x.contiguous(), y.contiguous()
    struct = adapters_of(matrices)
    if y.shape != (len(x), struct.outputs) or x.shape[1] != struct.inputs or len(slots.slots) != len(x):
        raise TypeError(f"{list(x.shape)} and {list(y.shape)} do not fit {struct.outputs} outputs of {struct.inputs}")
    are_there = loaded().kv_adapt(
        ctypes.byref(struct),
        *(_at(x), ctypes.c_int64(x.shape[1]), ctypes.c_void_p(address(slots.slots, torch.int32)), len(x)),
        *(_at(y), ctypes.c_int64(y.shape[1])),
    )
    if not are_there:
        raise IndexError(f"slot {int(slots.slots.max())} of {struct.slots}")
    return y


def adapters_of(matrices: AdapterMatrices) -> AdaptersStruct:
    """A layer's adapters as the library reads them."""
    if len(matrices.parts) > MAX_PARTS:
        raise TypeError(f"the CPU library takes layers of {MAX_PARTS} parts, not {len(matrices.parts)}")
    return AdaptersStruct(
        slots=len(matrices.uses),
        parts=len(matrices.parts),
        rank=matrices.rank,
        inputs=matrices.shrink.shape[2],
        outputs=matrices.expand.shape[2],
        part_outputs=(ctypes.c_int32 * MAX_PARTS)(*matrices.parts),
        shrink=address(matrices.shrink, torch.bfloat16),
        expand=address(matrices.expand, torch.bfloat16),
        gain=address(matrices.gain, torch.float32),
        shift=address(matrices.shift, torch.float32),
        uses=address(matrices.uses, torch.int32),
    )


def rope_store(
    qkv: torch.Tensor,
    heads: int,
    positions: torch.Tensor,
    table: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    q_gain: torch.Tensor | None = None,
    k_gain: torch.Tensor | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """The queries are views of qkv, which is overwritten."""
    if not k_scale == v_scale == 1.0:
        raise TypeError("the CPU library has no cache of 8-bit floats, which need scales")
    qkv, kv_heads = qkv.contiguous(), kv_cache.shape[3]
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    layer = LayerStruct(
        q_norm=norm_struct(q_gain, eps),
        k_norm=norm_struct(k_gain, eps),
        rotation=rotation_of(table, interleaved),
        cache=cache_of(kv_cache),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    step = StepView(_only_slots(slots.long()), positions=positions.contiguous(), tokens=len(qkv))
    loaded().kv_rope_store(ctypes.byref(layer), ctypes.byref(step.struct), _at(qkv))
    return qkv[:, : heads * head_dim].view(len(qkv), heads, head_dim)


def encoder_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start: torch.Tensor,
    query_lens: NDArray[np.int32],
    scale: float,
    reach: None,
    bias: None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Keys and values are read where they are, as a cache in which each sequence is one block."""
    assert reach is None and bias is None, "the library sees all tokens of a sequence, and adds nothing"
    if query.stride(2) != 1 or query.stride(1) != query.shape[2]:
        query = query.contiguous()
    if key.stride() != value.stride() or key.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    token, head, _ = key.stride()
    cache = CacheStruct(
        data=key.data_ptr(),
        block_stride=token,  # a table's one entry is the place of the sequence's first token
        token_stride=token,
        head_stride=head,
        value_offset=(value.data_ptr() - key.data_ptr()) // key.itemsize,
        block_size=_ONE_BLOCK,
    )
    (tokens, heads, head_dim), count = query.shape, len(query_lens)
    starts, lengths = query_start.contiguous(), torch.from_numpy(query_lens)
    rows = torch.arange(count)
    group = GroupStruct(tables=address(starts, torch.int32), table_stride=1)
    step = StepStruct(
        tokens=tokens,
        sequences=count,
        num_groups=1,
        rows=address(rows, torch.int64),
        query_start=address(starts, torch.int32),
        lengths=address(lengths, torch.int32),
        groups=ctypes.addressof(group),
    )
    sizes = {"heads": heads, "kv_heads": key.shape[1], "head_dim": head_dim}
    layer = LayerStruct(cache=cache, **sizes, scale=scale, softcap=softcap or 0.0)
    out = torch.empty(tokens, heads, head_dim, dtype=query.dtype)
    loaded().kv_attention(
        ctypes.byref(layer), ctypes.byref(step), _at(query), ctypes.c_int64(query.stride(0)), _at(out)
    )
    return out


def _only_slots(slots: torch.Tensor) -> SimpleNamespace:
    none, number = torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    return SimpleNamespace(
        slots=slots.contiguous(),
        query_start=none,
        seq_lens=none,
        tables=none.view(0, 1),
        rows=number,
        causal=True,
        other_groups=(),
    )


def step_inputs(
    rows: torch.Tensor,
    num_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    next_token: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, ...]:
    table, table_stride = rows_address(tables, torch.int32)
    state = RowsStruct(
        num_computed=address(num_computed, torch.int32),
        next_token=address(next_token, torch.int32),
        tables=table,
        table_stride=table_stride,
        block_size=block_size,
    )
    asked = address(rows, torch.int64), address(num_tokens, torch.int32), address(token_ids, torch.int32)
    ids, positions, slots = torch.empty(3, len(token_ids), dtype=torch.int64).unbind(0)
    query_start, lengths = torch.empty(2 * len(rows) + 1, dtype=torch.int32).split((len(rows) + 1, len(rows)))
    out = StepTokensStruct(*(each.data_ptr() for each in (ids, positions, slots, query_start, lengths)))
    fits = loaded().kv_step_inputs(
        ctypes.byref(state), *map(ctypes.c_void_p, asked), len(rows), len(token_ids), ctypes.byref(out)
    )
    if not fits:
        raise ValueError(f"{len(token_ids)} token ids were given for sequences of {num_tokens.tolist()} tokens")
    return ids, positions, slots, query_start, lengths


def lookup_drafts(
    history: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    drafts: torch.Tensor,
    counts: torch.Tensor,
    shortest: int,
    longest: int,
    latest: bool,
) -> None:
    text, stride = rows_address(history, torch.int32)
    how = LookupStruct(drafts.shape[1], shortest, longest, latest)
    rows, lengths = rows.contiguous(), lengths.contiguous()
    loaded().kv_lookup_drafts(
        ctypes.c_void_p(text), ctypes.c_int64(stride), ctypes.c_void_p(address(rows, torch.int64)),
        ctypes.c_void_p(address(lengths, torch.int32)), len(rows), ctypes.byref(how),
        ctypes.c_void_p(address(drafts, torch.int32)), ctypes.c_void_p(address(counts, torch.int32)),
    )  # fmt: skip


def accept_drafts(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    lines: torch.Tensor,
    drafts: torch.Tensor,
    counts: torch.Tensor,
    num_computed: torch.Tensor,
    next_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    size = drafts.shape[1]
    own = torch.empty(len(rows), 1 + size, dtype=torch.int32)
    taken = torch.empty(len(rows), dtype=torch.int32)
    state = DraftRowsStruct(*(address(each, torch.int32) for each in (drafts, counts, num_computed, next_token)))
    given = (
        address(tokens, torch.int32), address(rows, torch.int64), address(starts, torch.int32),
        address(lines, torch.int32),
    )  # fmt: skip
    loaded().kv_accept_drafts(*map(ctypes.c_void_p, given), len(rows), size, ctypes.byref(state), _at(own), _at(taken))
    return own, taken


def takes_logits(logits: torch.Tensor) -> bool:
    return logits.dtype in (torch.bfloat16, torch.float32)


def filter_threshold(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    logits, rows = logits.contiguous(), rows.to(torch.int64).contiguous()
    threshold = torch.empty(len(logits), dtype=torch.float32)
    sampling = SamplingStruct(
        rows=rows.data_ptr(),
        temperature=address(temperature, torch.float32),
        min_p=address(min_p, torch.float32),
        top_p=address(top_p, torch.float32),
        top_k=address(top_k, torch.int32),
    )
    loaded().kv_logit_floor(
        _at(logits), logits.dtype == torch.float32, *logits.shape, ctypes.byref(sampling), _at(threshold)
    )
    return threshold


def draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    next_token: torch.Tensor,
    threshold: torch.Tensor | None = None,
) -> torch.Tensor:
    if threshold is not None:
        logits = logits.masked_fill(logits < threshold[:, None], -torch.inf)
    logits, rows = logits.contiguous(), rows.to(torch.int64).contiguous()
    positions = positions.to(torch.int32).contiguous()
    tokens = torch.empty(len(logits), dtype=torch.int32)
    sampling = SamplingStruct(
        rows=rows.data_ptr(),
        temperature=address(temperature, torch.float32),
        seeds=address(seeds, torch.int32),
        next_token=address(next_token, torch.int32),
    )
    loaded().kv_draw(
        _at(logits), logits.dtype == torch.float32, *logits.shape, ctypes.byref(sampling), _at(positions), _at(tokens)
    )
    return tokens


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


# ----------------------------------------------------------------
# A step's layout and a layer's cache as the library reads them. Structures hold addresses: the tensors they point to
# must live as long as the structures are used.


class StepBatch(Protocol):
    """The fields of an AttentionBatch that the library reads."""

    slots: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    tables: torch.Tensor
    rows: torch.Tensor
    causal: bool
    other_groups: tuple[Any, ...]


class StepView:
    """A batch for calls into the library, with token ids and positions where the call needs them."""

    def __init__(
        self,
        batch: StepBatch,
        ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        *,
        tokens: int = 0,
    ) -> None:
        batches: Sequence[StepBatch] = (batch, *batch.other_groups)
        self._kept = [batch.rows, batch.query_start, batch.seq_lens, ids, positions]
        self._kept += [tensor for each in batches for tensor in (each.slots, each.tables)]
        self._groups = (GroupStruct * len(batches))(
            *(
                GroupStruct(address(each.slots, torch.int64), *rows_address(each.tables, torch.int32))
                for each in batches
            )
        )
        self.struct = StepStruct(
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


def cache_of(kv_cache: torch.Tensor) -> CacheStruct:
    """[blocks, 2, block_size, kv_heads, head_dim] of bfloat16, or of int8 with four more bytes for a scale."""
    block, value, token, head, last = kv_cache.stride()
    if last != 1 or kv_cache.dtype not in (torch.bfloat16, torch.int8):
        raise TypeError(
            f"the CPU library needs a cache of bfloat16 or int8, heads dense, not {kv_cache.dtype} {kv_cache.stride()}"
        )
    return CacheStruct(
        data=kv_cache.data_ptr(),
        block_stride=block,
        value_offset=value,
        token_stride=token,
        head_stride=head,
        block_size=kv_cache.shape[2],
        is_int8=kv_cache.dtype == torch.int8,
    )


def rotation_of(table: torch.Tensor | None, interleaved: bool) -> RotationStruct:
    if table is None:
        return RotationStruct(None, 0, 0)
    return RotationStruct(address(table, torch.float32), table.shape[1], interleaved)


def address(tensor: torch.Tensor | None, dtype: torch.dtype) -> int | None:
    """The address of a dense tensor."""
    if tensor is None:
        return None
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise TypeError(
            f"the CPU library needs a dense tensor of {dtype}, not {tensor.dtype} with strides {tensor.stride()}"
        )
    return tensor.data_ptr()


def rows_address(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """The address of a matrix with dense rows, and the distance between rows."""
    if tensor.dtype != dtype or tensor.dim() != 2 or tensor.stride(1) != 1:
        raise TypeError(f"the CPU library needs dense rows of {dtype}, not {tensor.dtype}, strides {tensor.stride()}")
    return tensor.data_ptr(), tensor.stride(0)
