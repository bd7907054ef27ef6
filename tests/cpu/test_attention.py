"""The torch attention backend against attention written out, query by query, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvasir import kernels
from kvasir.attention import torch as backend
from kvasir.attention.base import AttentionBatch, select
from kvasir.errors import ConfigError

KV_HEADS, SHARED, HEAD_DIM, BLOCK_SIZE = 2, 3, 8, 4
SCALE = 0.3


@dataclass
class Case:
    """A step over random contexts: what the backend is given, and each row's whole keys and values."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor
    batch: AttentionBatch
    rows: list[tuple[torch.Tensor, torch.Tensor]]


def make_case(
    work: list[tuple[int, int]],  # (context, queries) per row, decodes first
    *,
    slack: int = 0,
    causal: bool = True,
    dtype: torch.dtype = torch.float32,
    strided: bool = True,
) -> Case:
    torch.manual_seed(len(work))
    lengths = np.array([context + queries for context, queries in work], np.int32)
    query_lens = np.array([queries for _, queries in work], np.int32)
    bounds = lengths + np.where(query_lens == 1, slack, 0).astype(np.int32)
    width = -(-int(bounds.max()) // BLOCK_SIZE)
    num_blocks = len(work) * width + 1
    tables = torch.randperm(num_blocks)[: len(work) * width].view(len(work), width)
    layers = torch.full((num_blocks, 3 if strided else 1, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM), torch.nan)
    layers[::2] = torch.inf  # others' leavings
    kv_cache = layers.to(dtype)[:, 0]
    rows, new, slots = [], [], []
    for row, (context, _queries) in enumerate(work):
        keys, values = torch.randn(2, int(lengths[row]), KV_HEADS, HEAD_DIM).to(dtype)
        place = (tables[row][:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[: len(keys)]
        for position in range(context):
            block, offset = divmod(int(place[position]), BLOCK_SIZE)
            kv_cache[block, 0, offset], kv_cache[block, 1, offset] = keys[position], values[position]
        rows.append((keys, values))
        new.append((keys[context:], values[context:]))
        slots.append(place[context:])
    batch = AttentionBatch(
        slots=torch.cat(slots),
        query_start=torch.from_numpy(np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)),
        seq_lens=torch.from_numpy(lengths),
        tables=tables.int(),
        rows=torch.arange(len(work)),
        num_decodes=int((query_lens == 1).sum()),
        query_lens=query_lens,
        seq_bounds=bounds,
        block_size=BLOCK_SIZE,
        causal=causal,
    )
    query = torch.randn(int(query_lens.sum()), KV_HEADS * SHARED, HEAD_DIM).to(dtype)
    key, value = (torch.cat(parts) for parts in zip(*new, strict=True))
    return Case(query, key, value, kv_cache, batch, rows)


def expected(case: Case, window: int | None, softcap: float | None = None) -> torch.Tensor:
    out, start = torch.empty(case.query.shape, dtype=torch.float64), 0
    for (keys, values), queries in zip(case.rows, case.batch.query_lens, strict=True):
        for index in range(queries):
            at = len(keys) - int(queries) + index
            last = at + 1 if case.batch.causal else len(keys)
            first = 0 if window is None else max(0, at + 1 - window)
            for head in range(KV_HEADS * SHARED):
                k, v = (x[first:last, head // SHARED].double() for x in (keys, values))
                scores = k @ case.query[start + index, head].double() * SCALE
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[start + index, head] = scores.softmax(0) @ v
        start += int(queries)
    return out


def check(case: Case, window: int | None = None, tolerance: float = 1e-5, softcap: float | None = None) -> None:
    attention = select("torch", torch.device("cpu"))
    kernels.store_kv(case.key, case.value, case.kv_cache, case.batch.slots)
    for _ in range(2):  # a second layer finds what the first one cached
        options = {"scale": SCALE, "window": window, "softcap": softcap}
        out = attention.forward(case.query, case.kv_cache, case.batch, **options)  # type: ignore[arg-type]
        torch.testing.assert_close(out.double(), expected(case, window, softcap), atol=tolerance, rtol=tolerance)


MIXED = [(9, 1), (0, 1), (31, 1), (8, 1), (3, 1), (0, 7), (0, 2), (5, 3), (12, 12), (1, 2)]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("slack", [0, 1, 6])
def test_mixed_batch(window: int | None, slack: int) -> None:
    check(make_case(MIXED, slack=slack), window)


@pytest.mark.parametrize("window", [None, 3])
def test_soft_cap(window: int | None) -> None:
    check(make_case(MIXED, slack=2), window, softcap=0.4)


@pytest.mark.parametrize("work", [[(0, 1)], [(6, 1)] * 5, [(0, 9)], [(4, 4), (11, 2)]], ids=str)
def test_only_decodes_or_only_chunks(work: list[tuple[int, int]]) -> None:
    check(make_case(work, strided=False))


@pytest.mark.parametrize("window", [None, 4])
def test_decodes_are_grouped_by_length(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """However the groups fall, also one row at a time."""
    for limit in (1, 2000, 1 << 20):
        monkeypatch.setitem(backend._GROUP_BYTES, "cpu", limit)
        case = make_case([(length, 1) for length in (3, 40, 41, 7, 0, 39, 12, 13)], slack=2)
        check(case, window)
        (groups,) = (note for key, note in case.batch.step_cache.items() if key[0] == "torch decodes")
        assert (len(groups) == 8) == (limit == 1)
        assert len(groups) > 1


@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.parametrize("causal", [True, False])
def test_chunks_are_cut_where_a_mask_would_be_large(
    monkeypatch: pytest.MonkeyPatch, window: int | None, causal: bool
) -> None:
    monkeypatch.setitem(backend._GROUP_BYTES, "cpu", 1)
    check(make_case([(17, 40), (0, 50), (3, 2)], causal=causal), window)


def test_bfloat16() -> None:
    check(make_case(MIXED, dtype=torch.bfloat16), window=6, tolerance=2e-2)


def test_keys_and_values_are_stored() -> None:
    case = make_case(MIXED)
    check(case)
    for row, (keys, values) in enumerate(case.rows):
        stored = case.kv_cache[case.batch.tables[row]].transpose(0, 1).flatten(1, 2)[:, : len(keys)]
        assert torch.equal(stored, torch.stack([keys, values]))


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attention_backend='flash' is not known; there is torch, triton"):
        select("flash", torch.device("cpu"))
