"""The kernel for chunks on Hopper GPUs, against plain attention, with NaN in every slot that is nobody's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvasir.kernels.triton import paged_prefill as prefill
from tests.cpu.test_stale_slots import spoiled
from tests.kernel_builders import DEVICE, attend, close, paged, randn

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for GPUs of compute capability 9.0")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each launch of the kernel."""
    from kvasir.kernels.triton import hopper_prefill

    made, launch = [], hopper_prefill.hopper_prefill

    def counted(*args: Any) -> None:
        made.append(1)
        launch(*args)

    monkeypatch.setattr(hopper_prefill, "hopper_prefill", counted)
    return made


def check(
    chunks: list[int], before: list[int], heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype,
    window: int | None = None,
) -> None:  # fmt: skip
    """Every slot that is no sequence's is NaN or infinite."""
    lengths = [chunk + cached for chunk, cached in zip(chunks, before, strict=True)]
    cache, tables, rows, lens = paged(lengths, kv_heads, dim, block_size, dtype)
    dirty = spoiled(cache, tables, [(row, 0, n) for row, n in zip(rows.tolist(), lengths, strict=True)])
    starts = np.concatenate([[0], np.cumsum(chunks)])
    query = randn(int(starts[-1]), heads, dim, dtype=dtype)
    out = torch.full_like(query, 7.0)
    on_device = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    prefill.paged_prefill(query, dirty, tables, rows, on_device, lens, max(chunks), out, dim**-0.5, window)
    for i, n in enumerate(lengths):
        part = slice(starts[i], starts[i + 1])
        close(out[part], attend(query[part], cache, tables[rows[i]], n, window), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_size"), [(4, 4, 64), (16, 8, 64), (32, 8, 64), (16, 2, 128), (16, 1, 256), (64, 1, 64)]
)
def test_shapes(heads: int, kv_heads: int, block_size: int, dim: int, dtype: torch.dtype, calls: list[int]) -> None:
    check([2, 63, 64, 65, 200, 33, 500], [0, 1, 64, 100, 0, 700, 12], heads, kv_heads, dim, block_size, dtype)
    assert calls


@pytest.mark.parametrize("seed", range(12))
def test_random_chunks(seed: int, calls: list[int]) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 40))
    chunks = rng.integers(1, rng.choice([20, 300, 1500]), count).tolist()
    before = (rng.integers(0, 2000, count) * (rng.random(count) < 0.5)).tolist()
    kv_heads = int(rng.choice([1, 2, 8]))
    check(chunks, before, kv_heads * int(rng.choice([1, 2, 4, 8])), kv_heads, 128, 64, torch.bfloat16)
    assert calls


def test_more_tiles_than_multiprocessors_and_fewer(calls: list[int]) -> None:
    check([4096], [0], 32, 8, 128, 64, torch.bfloat16)
    check([3], [2000], 2, 1, 128, 64, torch.bfloat16)
    assert len(calls) == 2


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window"), [(6, 2, 128, None), (4, 2, 80, None), (4, 2, 128, 50)])
def test_others_take_the_other_kernel(
    heads: int, kv_heads: int, dim: int, window: int | None, calls: list[int]
) -> None:
    lengths = [70, 130]
    cache, tables, rows, lens = paged(lengths, kv_heads, dim, 64, torch.bfloat16)
    query = randn(200, heads, dim, dtype=torch.bfloat16)
    starts = torch.tensor([0, 70, 200], dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(query)
    prefill.paged_prefill(query, cache, tables, rows, starts, lens, 130, out, dim**-0.5, window)
    close(out[70:], attend(query[70:], cache, tables[rows[1]], 130, window), torch.bfloat16)
    assert not calls
