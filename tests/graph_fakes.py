"""Stand-ins for CUDA graphs, for tests of whole steps without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kvasir.kernels.triton import paged_mixed
from kvasir.worker.graphs.pool import Captured, GraphMemory
from tests import triton_interpreter  # noqa: F401  # it makes the interpreter quicker

if not torch.cuda.is_available():
    paged_mixed.PROGRAMS = 3  # the interpreter takes one after another, and most would find nothing to do


class Repeats:
    """In place of a pool of graphs. A replay writes where the capture wrote, as a graph does."""

    def __init__(self, device: torch.device) -> None:
        self.memory = GraphMemory()

    def capture(self, run: Callable[[], Any]) -> Captured[Any]:
        run()
        outputs = run()
        self.memory.taken += 1 << 20
        graph: Any = SimpleNamespace(replay=lambda: overwrite(outputs, run()))
        return Captured(graph, outputs)

    def drop(self, graphs: list[Captured[Any]]) -> None:
        for each in graphs:
            each.graph.replay = None


def overwrite(old: Any, new: Any) -> None:
    if isinstance(old, torch.Tensor):
        old.copy_(new)
    elif is_dataclass(old):
        for field in fields(old):
            overwrite(getattr(old, field.name), getattr(new, field.name))
    elif isinstance(old, tuple):
        for each, other in zip(old, new, strict=True):
            overwrite(each, other)
