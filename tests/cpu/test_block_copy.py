"""The copy of KV blocks: the Triton kernel, in its interpreter or on a GPU, against plain torch in every layout."""

from __future__ import annotations

import pytest
import torch

from kvasir.kernels import reference

pytest.importorskip("triton")

from kvasir.kernels.triton.cache_update import copy_blocks
from tests.kernel_builders import DEVICE

pytestmark = pytest.mark.kernel


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize("page_bytes", [8 * 1024 + 8, 64, 12, 6, 5])  # 5: copied byte by byte
@pytest.mark.parametrize("layout", ["pool to pool", "within a pool", "pool to staging", "staging to pool"])
def test_blocks_are_copied_in_all_layers(page_bytes: int, layout: str) -> None:
    pool = noise(3, 9, page_bytes)
    other = noise(6, 3, page_bytes).transpose(0, 1) if "staging" in layout else noise(3, 6, page_bytes)
    source, target = {"staging to pool": (other, pool), "within a pool": (pool, pool)}.get(layout, (pool, other))
    pairs = torch.tensor([[5, 0], [1, 4], [3, 2]], dtype=torch.int32, device=DEVICE)  # indices with a stride
    wanted = target.clone()
    reference.copy_blocks(source.clone(), wanted, pairs[:, 0], pairs[:, 1])
    copy_blocks(source, target, pairs[:, 0], pairs[:, 1])
    assert torch.equal(target, wanted)
    assert torch.equal(target[:, 4], source[:, 1])
