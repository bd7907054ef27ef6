"""Within a rehearsal nothing new is launched, and everything is compiled afterwards."""

from __future__ import annotations

import threading

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402

from kvasir import kernels  # noqa: E402

pytestmark = pytest.mark.gpu


@triton.jit
def _fill_kernel(x_ptr, VALUE: tl.constexpr):
    tl.store(x_ptr + tl.program_id(0), VALUE)


@triton.jit
def _broken_kernel(x_ptr, VALUE: tl.constexpr):
    tl.static_assert(VALUE == 0, "no such value")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were compiled or read from disk."""
    names: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda *, fn, **_: names.append(fn.name))
    return names


def test_launches_wait_for_the_premiere(compiled: list[str]) -> None:
    x = torch.zeros(4, device="cuda")
    with kernels.rehearsal():
        _fill_kernel[(4,)](x, VALUE=1)
        _fill_kernel[(4,)](x, VALUE=2)
        _fill_kernel[(4,)](x, VALUE=1)
        assert torch.empty(3, device="cuda", dtype=torch.int32).tolist() == [0, 0, 0]
        assert torch.empty_like(x).tolist() == [0] * 4
    assert x.tolist() == [0] * 4 and len(compiled) == 2
    _fill_kernel[(4,)](x, VALUE=2)
    assert x.tolist() == [2] * 4 and len(compiled) == 2, "it was compiled again"


def test_other_threads_launch_what_they_like() -> None:
    x = torch.zeros(4, device="cuda")

    def launch() -> None:
        _fill_kernel[(4,)](x, VALUE=3)

    with kernels.rehearsal():
        other = threading.Thread(target=launch)
        other.start()
        other.join()
    assert x.tolist() == [3] * 4


def test_what_the_compiler_says_is_raised() -> None:
    x = torch.zeros(4, device="cuda")
    with pytest.raises(triton.CompilationError, match="no such value"), kernels.rehearsal():
        _broken_kernel[(4,)](x, VALUE=1)
    assert knobs.runtime.jit_cache_hook is None
