"""What tests of kernels are made of: where they run, random tensors, a paged cache, and attention written out.

Modules that use this are marked `kernel`: where there is a GPU their tests run on it and `-m gpu` selects them;
elsewhere Triton's interpreter runs them.
"""

from __future__ import annotations

import numpy as np
import torch

from kvasir.kernels.layout import SharedPrefixes
from kvasir.kernels.triton import paged_mixed
from tests import triton_interpreter  # noqa: F401  # it makes the interpreter quicker

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# The interpreter's bfloat16 products are wrong, so bfloat16 is checked on the GPU.
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32]
if not GPU:
    paged_mixed.PROGRAMS = 3  # the interpreter takes one after another, and most would find nothing to do
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    error = (got.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < TOLERANCE[dtype], f"relative error {error:.1e}"


def paged(lengths: list[int], kv_heads: int, dim: int, block_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """A cache with scattered pages, tables with some unused rows, and the rows of the sequences."""
    need = [-(-n // block_size) for n in lengths]
    pages = np.random.default_rng(0).permutation(sum(need)) + 1
    tables = torch.zeros(len(lengths) + 3, max(need), dtype=torch.int32)
    rows = torch.randperm(len(lengths) + 3)[: len(lengths)]
    at = 0
    for row, count in zip(rows.tolist(), need, strict=True):
        tables[row, :count] = torch.from_numpy(pages[at : at + count].astype(np.int32))
        at += count
    cache = randn(sum(need) + 1, 2, block_size, kv_heads, dim, dtype=dtype)
    return cache, tables.to(DEVICE), rows.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def share(
    tables: torch.Tensor, rows: torch.Tensor, block_size: int, groups: list[tuple[int, list[int]]]
) -> SharedPrefixes:
    """Give the sequences of each group (tokens, members) the first blocks of its first one."""
    tokens = torch.zeros(len(rows), dtype=torch.int32)
    members: list[int] = []
    starts = [0]
    for count, group in groups:
        blocks = count // block_size
        tables[rows[group], :blocks] = tables[rows[group[0]], :blocks].clone()
        tokens[group] = count
        members += group
        starts.append(len(members))
    starts += [len(members)] * (17 - len(starts))
    members += [0] * (len(rows) - len(members))
    return SharedPrefixes(
        tokens.to(DEVICE), *(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (members, starts))
    )


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    length: int,
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain attention of the last len(query) tokens of one sequence, in float64."""
    count, heads, dim = query.shape
    kv_heads = cache.shape[3]
    k, v = (cache[table.long(), i].reshape(-1, kv_heads, dim)[:length].double() for i in (0, 1))
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = torch.einsum("mhd,nhd->hmn", query.double(), k) * dim**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(length - count, length, device=query.device)[:, None]
    key = torch.arange(length, device=query.device)[None]
    seen = (key <= at) & (key > at - (window or length + 1))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, count, 1)), dim=-1)
    return torch.einsum("hmn,nhd->mhd", scores.softmax(-1)[..., :length], v)
