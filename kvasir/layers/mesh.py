"""This process's rank among those that share the model, and its share of each weight.

Worker process. Every layer takes a mesh; with one rank every shard is the whole and collectives do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from kvasir.errors import ConfigError


class Role(Enum):
    """How a linear layer is split over ranks."""

    COLUMN = "column"  # each rank has some of the outputs
    ROW = "row"  # each rank has some of the inputs; outputs are summed over ranks
    REPLICATED = "replicated"


@dataclass(frozen=True)
class Mesh:
    """Tensor-parallel ranks. `group` is their torch.distributed process group, None for the default one."""

    rank: int = 0
    size: int = 1
    group: Any = None
    whole_experts: bool = False  # a rank has some experts whole, not a part of each

    def shard(self, length: int, what: str) -> slice:
        """This rank's part of a dimension; `what` names the dimension in the error if it cannot be divided."""
        if length % self.size:
            raise ConfigError(
                f"{what} ({length}) cannot be split over {self.size} ranks; "
                f"choose a tensor_parallel_size that divides {length}."
            )
        part = length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def shard_heads(self, heads: int, what: str) -> slice:
        """This rank's part of the heads. With fewer heads than ranks, several ranks hold the same head."""
        if self.size <= heads:
            return self.shard(heads, what)
        if self.size % heads:
            raise ConfigError(f"{what} ({heads}) cannot be split over {self.size} ranks; choose a multiple of {heads}.")
        head = self.rank * heads // self.size
        return slice(head, head + 1)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' parts of the last dimension, side by side."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        torch.distributed.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)


def join(device: str, rank: int, size: int, meeting: str) -> Mesh:
    """Connect to the other ranks; `meeting` is a file on this machine that all of them can write."""
    backend = "gloo" if device == "cpu" else "nccl"
    torch.distributed.init_process_group(backend, f"file://{meeting}", rank=rank, world_size=size)
    return Mesh(rank, size)
