"""The operations of kernels/reference.py by the CPU library, for bfloat16 (logits may be float32). Same names, same
meaning."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import torch

from kvasir.kernels.cpu.step import StepView, address, cache_of, rotation_of, rows_address
from kvasir.platforms.cpu_library import loaded
from kvasir.platforms.cpu_structs import ACTIVATIONS, Layer, Norm, Rows, Sampling, StepTokens

NONE = Norm()


def norm_struct(
    gain: torch.Tensor | None, eps: float, bias: torch.Tensor | None = None, *, layer: bool = False
) -> Norm:
    """A norm for the library; `layer`: of mean and variance."""
    if gain is None:
        return NONE
    kind = 3 if layer else 2 if gain.dtype == torch.float32 else 1
    wanted = torch.float32 if kind == 2 else torch.bfloat16
    return Norm(kind, eps, address(gain, wanted), address(bias, torch.bfloat16))


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
        raise TypeError(
            f"{list(x.shape)} of {x.dtype} is not to be added to {list(residual.shape)} of {residual.dtype}"
        )
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
    """The queries are views of qkv, which is changed."""
    if not k_scale == v_scale == 1.0:
        raise TypeError("a cache of 8-bit floats, which has scales, is not the library's")
    qkv, kv_heads = qkv.contiguous(), kv_cache.shape[3]
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    layer = Layer(
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
    state = Rows(
        num_computed=address(num_computed, torch.int32),
        next_token=address(next_token, torch.int32),
        tables=table,
        table_stride=table_stride,
        block_size=block_size,
    )
    asked = address(rows, torch.int64), address(num_tokens, torch.int32), address(token_ids, torch.int32)
    ids, positions, slots = torch.empty(3, len(token_ids), dtype=torch.int64).unbind(0)
    query_start, lengths = torch.empty(2 * len(rows) + 1, dtype=torch.int32).split((len(rows) + 1, len(rows)))
    out = StepTokens(*(each.data_ptr() for each in (ids, positions, slots, query_start, lengths)))
    fits = loaded().kv_step_inputs(
        ctypes.byref(state), *map(ctypes.c_void_p, asked), len(rows), len(token_ids), ctypes.byref(out)
    )
    if not fits:
        raise ValueError(
            f"{len(token_ids)} token ids, and the sequences' tokens are not as many: {num_tokens.tolist()}"
        )
    return ids, positions, slots, query_start, lengths


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
    sampling = Sampling(
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
    sampling = Sampling(
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
