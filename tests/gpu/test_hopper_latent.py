"""The kernel for latent caches on Hopper GPUs, against float64, with NaN in every slot that is nobody's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kvasir.kernels.triton import latent as latent_module
from kvasir.kernels.triton.paged_decode import Workspace
from tests.kernel_builders import DEVICE, close, paged, randn

pytestmark = pytest.mark.gpu
LATENT, ROTARY, SCALE = 512, 64, 0.1


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for GPUs of compute capability 9.0")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each launch of the kernel."""
    from kvasir.kernels.triton import hopper_latent

    made, launch = [], hopper_latent.hopper_latent

    def counted(*args: Any) -> None:
        made.append(1)
        launch(*args)

    monkeypatch.setattr(hopper_latent, "hopper_latent", counted)
    return made


def check(lengths: list[int], heads: int, block_size: int = 64, dtype: torch.dtype = torch.bfloat16) -> None:
    pages, tables, rows, lens = paged([max(1, n) for n in lengths], 1, LATENT + ROTARY, block_size, dtype)
    cache = pages[:, 0, :, 0].contiguous()
    lens.copy_(torch.tensor(lengths, dtype=torch.int32))
    dirty = torch.full_like(cache, torch.nan)
    for row, length in zip(rows.tolist(), lengths, strict=True):
        for first in range(0, length, block_size):
            block, count = int(tables[row, first // block_size]), min(block_size, length - first)
            dirty[block, :count] = cache[block, :count]
    query = randn(heads, len(lengths), LATENT, dtype=dtype).transpose(0, 1)
    rotated = randn(len(lengths), heads, 128 + ROTARY, dtype=dtype)[..., 128:]
    out = torch.full((len(lengths), heads, LATENT), 7.0, dtype=dtype, device=DEVICE)
    latent_module.latent_decode(
        query, rotated, dirty, tables, rows, lens, out, Workspace(), SCALE, longest=max(lengths)
    )
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        seen = cache[tables[row].long()].flatten(0, 1)[:length].double()
        scores = torch.cat((query[i], rotated[i]), -1).double() @ seen.T * SCALE
        wanted = scores.softmax(-1) @ seen[:, :LATENT] if length else torch.full_like(out[i], 7.0)
        close(out[i], wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [8, 16, 20, 32, 40, 64, 128])
@pytest.mark.parametrize("block_size", [64, 128])
def test_heads(heads: int, block_size: int, dtype: torch.dtype, calls: list[int]) -> None:
    check([1, 63, 0, 64, 65, 700, 3000, 128, 0], heads, block_size, dtype)
    assert calls


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    "lengths", [[1], [256, 0, 17], [5000], [9000], [5000, 1, 8191], [30] * 511 + [200, 0, 500]], ids=sum
)
def test_lengths(lengths: list[int], heads: int, calls: list[int]) -> None:
    check(lengths, heads)
    assert calls
