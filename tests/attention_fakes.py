"""FlashAttention's three generations and FlashInfer, in plain torch: their signatures, their checks, their meaning.

Written from the packages' published interfaces (flash-attn 2.8, its hopper folder, flash-attn-4 4.0, flashinfer 0.7),
sharing nothing with our backends: a wrong argument, type, layout or window shows where there is no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

from kvasir.platforms import attention_packages
from kvasir.platforms.cpu import CpuPlatform

HALVES = (torch.float16, torch.bfloat16)


@dataclass
class Calls:
    """What was asked of a package."""

    attends: list[dict[str, Any]] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)
    wrappers: int = 0


def attend(
    query: torch.Tensor,  # [queries, heads, head_dim], the last of the sequence
    keys: torch.Tensor,  # [pages, page_size, kv_heads, head_dim]
    values: torch.Tensor,
    pages: torch.Tensor,
    length: int,
    scale: float,
    before: int | None,  # how many keys before its own a query sees; None: all
    softcap: float,
) -> torch.Tensor:
    """Causal attention of one sequence in float32."""
    rows = torch.arange(length)
    page, offset = pages[rows // keys.shape[1]].long(), rows % keys.shape[1]
    shared = query.shape[1] // keys.shape[2]
    k, v = (x[page, offset].float().repeat_interleave(shared, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(length - len(query), length)[:, None]
    seen = rows <= own
    if before is not None:
        seen &= rows >= own - before
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype)


def attend_all(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: list[int], lengths: list[int], tables: Any, *rest: Any
) -> torch.Tensor:
    parts = zip(starts[:-1], starts[1:], lengths, tables, strict=True)
    return torch.cat([attend(q[begin:end], k, v, table, length, *rest) for begin, end, length, table in parts])


# ---------------------------------------------------------------- FlashAttention


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, sequences: int) -> None:
    """What all three refuse."""
    assert q.dtype in HALVES, "FlashAttention only support fp16 and bf16 data type"
    assert k.dtype == v.dtype == q.dtype, "query, key and value must have the same dtype"
    assert table.dtype == torch.int32 and table.stride(-1) == 1 and table.shape[0] == sequences
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "Input tensor must have contiguous last dimension"
    assert q.ndim == 3 and k.ndim == 4 and k.shape == v.shape and k.shape[3] == q.shape[2]
    assert q.shape[1] % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query"
    assert q.shape[2] <= 256 and q.shape[2] % 8 == 0, "head_size"


def check_lengths(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()


def keys_before(window_size: tuple[int | None, int | None], causal: bool) -> int | None:
    left, right = (None if size is None or size < 0 else size for size in window_size)
    assert causal, "the fakes are causal"
    assert right in (None, 0), "under causal nothing comes after"
    return left


def flash_attn_2(calls: Calls) -> ModuleType:
    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Any = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Any = None,
    ) -> Any:
        calls.attends.append(dict(locals()))
        check_tensors(q, k, v, block_table, len(cu_seqlens_q) - 1)
        check_lengths(cu_seqlens_q, cu_seqlens_k)
        assert len(cu_seqlens_k) == len(cu_seqlens_q)
        assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        queries, lengths = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        assert int(queries.max()) <= max_seqlen_q and int(lengths.max()) <= max_seqlen_k
        before = keys_before(window_size, causal)
        return attend_all(q, k, v, cu_seqlens_q.tolist(), lengths.tolist(), block_table, softmax_scale, before, softcap)

    return module("flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)


def flash_attn_3(calls: Calls) -> ModuleType:
    def flash_attn_with_kvcache(
        q: Any,
        k_cache: Any,
        v_cache: Any,
        k: Any = None,
        v: Any = None,
        qv: Any = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        cache_seqlens: Any = None,
        cache_batch_idx: Any = None,
        cache_leftpad: Any = None,
        page_table: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_k_new: Any = None,
        max_seqlen_q: Any = None,
        rotary_seqlens: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: Any = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Any = None,
        num_splits: int = 0,
        pack_gqa: Any = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:
        calls.attends.append(dict(locals()))
        check_tensors(q, k_cache, v_cache, page_table, len(cu_seqlens_q) - 1)
        check_lengths(cu_seqlens_q, cache_seqlens)
        assert isinstance(max_seqlen_q, int), "max_seqlen_q must be provided if cu_seqlens_q is provided"
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
        return attend_all(
            q, k_cache, v_cache, cu_seqlens_q.tolist(), cache_seqlens.tolist(), page_table, softmax_scale,
            keys_before(window_size, causal), softcap,
        )  # fmt: skip

    return module("flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)


def flash_attn_4(calls: Calls) -> ModuleType:
    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        qv: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        max_seqlen_q: Any = None,
        max_seqlen_k: Any = None,
        min_seqlen_k: Any = None,
        seqused_q: Any = None,
        seqused_k: Any = None,
        gather_kv_indices: Any = None,
        page_table: Any = None,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: Any = (None, None),
        learnable_sink: Any = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: Any = None,
        deterministic: bool = False,
        score_mod: Any = None,
        score_mod_bwd: Any = None,
        mask_mod: Any = None,
        block_sparse_tensors: Any = None,
        aux_tensors: Any = None,
        aux_scalars: Any = None,
        return_lse: bool = False,
        scheduler_metadata: Any = None,
        seqlen_k_per_split: Any = None,
        disable_scheduler_metadata: bool = False,
        gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: Any = None,
    ) -> Any:
        calls.attends.append(dict(locals()))
        assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        check_tensors(q, k, v, page_table, len(cu_seqlens_q) - 1)
        check_lengths(cu_seqlens_q, seqused_k)
        assert seqused_k.shape == (len(cu_seqlens_q) - 1,)
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and int(seqused_k.max()) <= max_seqlen_k
        before = keys_before(window_size, causal)
        out = attend_all(q, k, v, cu_seqlens_q.tolist(), seqused_k.tolist(), page_table, softmax_scale, before, softcap)
        return out, None

    return module("flash_attn.cute", flash_attn_varlen_func=flash_attn_varlen_func)


# ---------------------------------------------------------------- FlashInfer


class Wrapper:
    """What both wrappers do alike. A plan is held by its wrapper, and the next one takes its place."""

    calls: Calls

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> None:
        assert kv_layout == "NHD"
        assert float_workspace_buffer.data_ptr() % 16 == 0 and float_workspace_buffer.dtype == torch.uint8
        self.device = float_workspace_buffer.device
        self.planned: dict[str, Any] = {}
        self.calls.wrappers += 1

    def keep(self, plan: dict[str, Any], starts: list[int], pages: list[int], indices: Any, last: Any) -> None:
        self.calls.plans.append(plan)
        plan["kv_data_type"] = plan["kv_data_type"] or plan["q_data_type"]
        assert plan["q_data_type"] in HALVES and plan["kv_data_type"] in HALVES
        assert plan["head_dim"] in (64, 128, 256), "Unsupported head_dim"
        assert plan["num_qo_heads"] % plan["num_kv_heads"] == 0
        assert indices.dtype == last.dtype == torch.int32 and indices.device == self.device
        assert len(pages) == len(starts) == len(last) + 1 and pages[-1] == len(indices)
        assert all(1 <= int(n) <= plan["page_size"] for n in last), "1 <= kv_last_page_len <= page_size"
        lengths = [(end - begin - 1) * plan["page_size"] for begin, end in pairwise(pages)]
        plan["lengths"] = [length + int(n) for length, n in zip(lengths, last, strict=True)]
        plan["tables"] = [indices[begin:end].clone() for begin, end in pairwise(pages)]
        plan["starts"] = starts
        self.planned = plan

    def attend(self, q: torch.Tensor, paged_kv_cache: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        plan = self.planned
        k, v = paged_kv_cache.unbind(dim=1)
        self.calls.attends.append({"q": q, "k": k, "v": v, **plan})
        assert q.dtype == plan["q_data_type"] and k.dtype == plan["kv_data_type"], "not the planned dtype"
        assert q.shape == (plan["starts"][-1], plan["num_qo_heads"], plan["head_dim"]), "not the planned shape"
        assert k.shape[1:] == (plan["page_size"], plan["num_kv_heads"], plan["head_dim"]), "not the planned cache"
        assert k.stride() == v.stride(), "K and V must have same strides"
        before = None if plan["window_left"] < 0 else plan["window_left"]
        rest = plan["sm_scale"], before, plan["logits_soft_cap"] or 0.0
        seen = attend_all(q, k, v, plan["starts"], plan["lengths"], plan["tables"], *rest)
        if out is None:
            return seen
        assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
        return out.copy_(seen)


def flashinfer(calls: Calls) -> ModuleType:
    class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
        def __init__(
            self,
            float_workspace_buffer: torch.Tensor,
            kv_layout: str = "NHD",
            use_cuda_graph: bool = False,
            use_tensor_cores: bool = False,
            paged_kv_indptr_buffer: Any = None,
            paged_kv_indices_buffer: Any = None,
            paged_kv_last_page_len_buffer: Any = None,
            backend: str = "auto",
            jit_args: Any = None,
        ) -> None:
            assert not use_cuda_graph
            super().__init__(float_workspace_buffer, kv_layout)

        def plan(
            self,
            indptr: torch.Tensor,
            indices: torch.Tensor,
            last_page_len: torch.Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim: int,
            page_size: int,
            *,
            pos_encoding_mode: str = "NONE",
            window_left: int = -1,
            window_right: int = 0,
            logits_soft_cap: float | None = None,
            q_data_type: Any = torch.float16,
            kv_data_type: Any = None,
            o_data_type: Any = None,
            data_type: Any = None,
            sm_scale: float | None = None,
            rope_scale: Any = None,
            rope_theta: Any = None,
            non_blocking: bool = True,
            block_tables: Any = None,
            seq_lens: Any = None,
            fixed_split_size: Any = None,
            disable_split_kv: bool = False,
            q_len_per_req: int = 1,
            is_causal: Any = None,
        ) -> None:
            plan = {name: value for name, value in locals().items() if name != "self"}
            assert indptr.device.type == last_page_len.device.type == "cpu", "planning would wait for the device"
            assert indptr.dtype == torch.int32
            self.keep(plan, list(range(len(indptr))), indptr.tolist(), indices, last_page_len)

        def run(
            self,
            q: torch.Tensor,
            paged_kv_cache: torch.Tensor,
            *args: Any,
            q_scale: Any = None,
            k_scale: Any = None,
            v_scale: Any = None,
            out: Any = None,
            lse: Any = None,
            return_lse: bool = False,
            enable_pdl: Any = None,
            window_left: Any = None,
            sinks: Any = None,
        ) -> Any:
            return self.attend(q, paged_kv_cache, out)

    class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
        def __init__(
            self,
            float_workspace_buffer: torch.Tensor,
            kv_layout: str = "NHD",
            use_cuda_graph: bool = False,
            qo_indptr_buf: Any = None,
            paged_kv_indptr_buf: Any = None,
            paged_kv_indices_buf: Any = None,
            paged_kv_last_page_len_buf: Any = None,
            custom_mask_buf: Any = None,
            mask_indptr_buf: Any = None,
            backend: str = "auto",
            jit_args: Any = None,
            jit_kwargs: Any = None,
        ) -> None:
            assert not use_cuda_graph
            super().__init__(float_workspace_buffer, kv_layout)

        def plan(
            self,
            qo_indptr: torch.Tensor,
            paged_kv_indptr: torch.Tensor,
            paged_kv_indices: torch.Tensor,
            paged_kv_last_page_len: torch.Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            page_size: int,
            head_dim_vo: Any = None,
            custom_mask: Any = None,
            packed_custom_mask: Any = None,
            causal: bool = False,
            pos_encoding_mode: str = "NONE",
            use_fp16_qk_reduction: bool = False,
            sm_scale: float | None = None,
            window_left: int = -1,
            logits_soft_cap: float | None = None,
            rope_scale: Any = None,
            rope_theta: Any = None,
            q_data_type: Any = torch.float16,
            kv_data_type: Any = None,
            o_data_type: Any = None,
            non_blocking: bool = True,
        ) -> None:
            plan = {name: value for name, value in locals().items() if name != "self"}
            plan["head_dim"] = head_dim_qk
            on_host = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
            assert all(t.device.type == "cpu" for t in on_host), "planning would wait for the device"
            assert all(t.dtype == torch.int32 for t in on_host) and causal, "the fakes are causal"
            self.keep(plan, qo_indptr.tolist(), paged_kv_indptr.tolist(), paged_kv_indices, paged_kv_last_page_len)

        def run(
            self,
            q: torch.Tensor,
            paged_kv_cache: torch.Tensor,
            *args: Any,
            q_scale: Any = None,
            k_scale: Any = None,
            v_scale: Any = None,
            out: Any = None,
            lse: Any = None,
            return_lse: bool = False,
            enable_pdl: Any = None,
            window_left: Any = None,
            sinks: Any = None,
        ) -> Any:
            return self.attend(q, paged_kv_cache, out)

    BatchDecodeWithPagedKVCacheWrapper.calls = BatchPrefillWithPagedKVCacheWrapper.calls = calls
    return module(
        "flashinfer",
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
    )


# ---------------------------------------------------------------- installing them


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None, origin="a fake")
    made.__dict__.update(contents)
    return made


FAKES: dict[str, Callable[[Calls], ModuleType]] = {
    "FlashAttention 2": flash_attn_2,
    "FlashAttention 3": flash_attn_3,
    "FlashAttention 4": flash_attn_4,
    "FlashInfer": flashinfer,
}


def install(monkeypatch: pytest.MonkeyPatch, *titles: str) -> Calls:
    """These fakes and none of the real packages."""
    calls = Calls()
    made = {fake.__name__: fake for fake in (FAKES[title](calls) for title in titles)}
    found = {name: None for name in ("flash_attn", "flash_attn_interface", "flash_attn.cute", "flashinfer")}
    for name in found:
        monkeypatch.setitem(sys.modules, name, made.get(name))
    if "flash_attn.cute" in made and "flash_attn" not in made:
        package = module("flash_attn")
        package.__spec__ = ModuleSpec("flash_attn", None, is_package=True)  # a folder without an __init__.py
        monkeypatch.setitem(sys.modules, "flash_attn", package)
    real = metadata.version

    def version(distribution: str) -> str:
        if distribution == "flash-attn-4":
            if "flash_attn.cute" not in made:
                raise metadata.PackageNotFoundError(distribution)
            return "4.0.0"
        return real(distribution)

    monkeypatch.setattr(metadata, "version", version)
    return calls


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """The CPU says that it is an NVIDIA GPU, so that whole engines run on the fakes."""
    monkeypatch.setattr(CpuPlatform, "compute_capability", capability)


def allow_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that two ways of computing the same give the same tokens: in 16 bits a near-tie falls either way."""
    monkeypatch.setattr(sys.modules[__name__], "HALVES", (*HALVES, torch.float32))
    monkeypatch.setattr(attention_packages, "DTYPES", (*attention_packages.DTYPES, "float32"))


def uses(calls: Calls, cache: torch.Tensor) -> Iterator[bool]:
    """Of every call, whether it was given the cache itself, not a copy."""
    for call in calls.attends:
        keys = call["k_cache"] if call.get("k_cache") is not None else call["k"]
        yield keys.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
