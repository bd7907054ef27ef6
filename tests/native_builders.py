"""The CPU library in tests: built if it is not there or older than its sources."""

from __future__ import annotations

import os
from pathlib import Path

from kvasir.kernels.cpu import build, library
from tests.conftest import absent

OTHER = os.environ.get("KVASIR_TEST_CPU_LIBRARY")  # to be tested in place of the one that would be built


def _instruction_sets() -> list[str]:
    if OTHER:
        library.PATH = Path(OTHER)
    elif not build.is_current():
        try:
            build.build()
        except build.NoCompiler:
            return []
    return library.instruction_sets() if library.library() is not None else []


SETS = _instruction_sets()


def require_library() -> None:
    """Skip where there is no compiler. One that fails on the sources is a failure, and on CI so is having none."""
    if not SETS:
        absent("there is no CPU library and no compiler to build it")
