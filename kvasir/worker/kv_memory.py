"""The KV cache's memory: one byte pool, cut into equal pages, seen by each layer in its own shape.

Layer i of every group sees pool[i]; a block belongs to one group and is the same page of each of its layers.
"""

from __future__ import annotations

import numpy as np
import torch

from kvasir import kernels
from kvasir.messages import KVSpec


class KVMemory:
    def __init__(self, spec: KVSpec, num_blocks: int, device: torch.device) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        shape = spec.num_layers, num_blocks, spec.page_bytes
        # Zeroed, because gathers may read slots that were never written and 0 * NaN is NaN. On the CPU numpy's
        # zeros are calloc: pages take memory when they are first used.
        if device.type == "cpu":
            self.pool = torch.from_numpy(np.zeros(shape, np.uint8))
        else:
            self.pool = torch.zeros(shape, dtype=torch.uint8, device=device)

    def views(self, page_shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        """Each layer's pages as [num_blocks, *page_shape]."""
        return [layer.view(dtype).view(self.num_blocks, *page_shape) for layer in self.pool]

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copy blocks (from, to) in all layers. No block is both."""
        kernels.copy_blocks(self.pool, self.pool, pairs[:, 0], pairs[:, 1])
