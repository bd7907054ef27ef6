"""The KV cache's memory: one byte pool, cut into equal pages, seen by each layer in its own shape.

Layer i of every group sees pool[i]; a block belongs to one group and is the same page of each of its layers.
"""

from __future__ import annotations

import numpy as np
import torch

from kvasir import kernels
from kvasir.errors import ConfigError
from kvasir.messages import KVSpec


class KVMemory:
    def __init__(self, spec: KVSpec, num_blocks: int, device: torch.device) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        try:
            self.pool = _zeros((spec.num_layers, num_blocks, spec.page_bytes), device)
        except (MemoryError, RuntimeError) as error:  # numpy's and torch's
            raise _no_room(spec, num_blocks, device) from error

    def views(self, page_shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        """Each layer's pages as [num_blocks, *page_shape]."""
        return [layer.view(dtype).view(self.num_blocks, *page_shape) for layer in self.pool]

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copy blocks (from, to) in all layers. No block is both."""
        kernels.copy_blocks(self.pool, self.pool, pairs[:, 0], pairs[:, 1])


def _zeros(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Zeroed, because gathers may read slots that were never written and 0 * NaN is NaN. On the CPU numpy's zeros are
    calloc: pages take memory when they are first used."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.uint8))
    return torch.zeros(shape, dtype=torch.uint8, device=device)


def _no_room(spec: KVSpec, num_blocks: int, device: torch.device) -> ConfigError:
    gib = num_blocks * spec.block_bytes / 2**30
    return ConfigError(
        f"The KV cache of {num_blocks} blocks needs {gib:.1f} GiB, which {device} does not have; lower "
        f"kv_cache_memory_bytes (or num_gpu_blocks_override), max_num_seqs or max_model_len."
    )
