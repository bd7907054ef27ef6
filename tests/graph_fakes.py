"""Stand-ins for CUDA graphs, for tests of whole steps without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from kvasir.kernels.triton import paged_mixed
from kvasir.worker.graph_memory import Captured
from tests import triton_interpreter  # noqa: F401  # it makes the interpreter quicker

if not torch.cuda.is_available():
    paged_mixed.PROGRAMS = 3  # the interpreter takes one after another, and most would find nothing to do


class Repeats:
    """In place of a pool of graphs. A replay runs what was to be captured. Nothing runs before: there are many graphs,
    and the interpreter is slow."""

    def __init__(self, device: torch.device) -> None:
        self.kept_free = self.taken = 0

    def capture(self, run: Callable[[], Any]) -> Captured[Any]:
        self.taken += 1 << 20
        captured: Captured[Any] = Captured(Any, None)

        def replay() -> None:
            captured.outputs = run()

        captured.graph = SimpleNamespace(replay=replay)  # type: ignore[assignment]
        return captured
