"""The memory of a drafter for keys and values, in the blocks of the model's first group of layers: block tables, cached
prefixes and preemption are shared. Worker process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvasir import kernels
from kvasir.errors import ConfigError
from kvasir.worker.speculative.drafter import DrafterSettings


class DraftPool:
    def __init__(self, model: Any, settings: DrafterSettings) -> None:
        """`model`: what drafts, with the methods of a model that concern its cache."""
        self.model, self.dtype = model, settings.kv_dtype
        self.spec = model.kv_spec(settings.block_size, settings.kv_dtype)
        if len(self.spec.windows) > 1 or settings.windows[0] is not None:
            whose = "the draft model's" if len(self.spec.windows) > 1 else "the model's"
            raise ConfigError(
                f"speculative_config: method={settings.config.method!r} does not support sliding windows, which "
                f"{whose} layers have; use method='suffix', or a model without them."
            )
        self.page_shape = model.page_shape(settings.block_size, settings.kv_dtype)
        self.block_bytes: int = self.spec.block_bytes

    def allocate(self, num_blocks: int, device: torch.device) -> None:
        shape = (self.spec.num_layers, num_blocks, self.spec.page_bytes)
        if device.type == "cpu":
            self.pages = torch.from_numpy(np.zeros(shape, np.uint8))  # takes memory when it is first used
        else:
            self.pages = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.model.bind_kv([layer.view(self.dtype).view(num_blocks, *self.page_shape) for layer in self.pages])

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        kernels.copy_blocks(self.pages, self.pages, pairs[:, 0], pairs[:, 1])
