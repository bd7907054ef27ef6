"""The CPU library in tests: built if it is not there or older than its sources."""

from __future__ import annotations

import pytest

from kvasir.kernels.cpu import build
from kvasir.platforms import cpu_library


def _instruction_sets() -> list[str]:
    if not build.is_current():
        try:
            build.build()
        except build.NoCompiler:
            return []
    return cpu_library.instruction_sets() if cpu_library.library() is not None else []


SETS = _instruction_sets()


def require_library() -> None:
    if not SETS:
        pytest.skip("there is no CPU library and no compiler to build it")
