"""How kernels are launched: compiled ahead, all at once, and overlapping with the kernel before.

Compiled one after the other, kernels take half a second each, and the first steps need some thirty of them.
`precompile` gathers the variants that a step launches and compiles them on all cores before the step runs for real.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvasir.platforms.limits import usable_cpus

THREADS = "compile"  # prefix of the threads' names
_ONE_AT_A_TIME = threading.Lock()  # the hook is one for the whole process
_THIS_THREAD = threading.local()  # `precompiles`: whether it is in `precompile`
_EMPTY: dict[Any, Callable[..., Any]] = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like}


class _Zeros(TorchFunctionMode):
    """Replaces empty tensors by zeros: a number that a skipped kernel did not write may be used as an index."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _EMPTY.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def precompile() -> Iterator[None]:
    """Within this context, this thread skips launches of kernels that are not compiled yet, so that its results mean
    nothing. On leaving, all kernels that it skipped are compiled, in parallel.
    """
    assert not getattr(_THIS_THREAD, "precompiles", False), "precompile within precompile would wait for itself"
    here = threading.get_ident()
    missing: dict[tuple[Any, str], str] = {}  # kernel and variant -> how to compile it

    def skip(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton calls this before it compiles. True: it neither compiles nor launches."""
        if threading.get_ident() != here:
            return False
        missing[fn.jit_function, compile["key"]] = compile["specialization_data"]
        return True

    with _ONE_AT_A_TIME:
        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = skip
        _THIS_THREAD.precompiles = True
        try:
            with _Zeros():
                yield
        finally:
            knobs.runtime.jit_cache_hook = before
            _THIS_THREAD.precompiles = False
    if not missing:
        return
    with ThreadPoolExecutor(usable_cpus(), THREADS, torch.cuda.set_device, (torch.cuda.current_device(),)) as pool:
        for _compiled in pool.map(_compile, [kernel for kernel, _ in missing], missing.values()):
            pass  # raises what the compiler did


def _compile(kernel: Any, specialization: str) -> Any:
    """Compile a kernel and its launcher."""
    return kernel.preload(specialization).run


# ------------------------------------------------------------ programmatic dependent launch

# Between two kernels of a graph the device idles for about a microsecond. A kernel launched with `early` is already in
# place when its predecessor ends. Until `await_previous` it must not touch anything that the predecessor writes, and
# each of its programs must reach `await_previous`: the next kernel relies on all earlier ones being done once this one
# is. It may read earlier what was there before the predecessor began: weights, and a step's inputs (lengths, tables).
# Those inputs must be read past the processor's own cache, which may hold the values of an earlier step.


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Wait until everything that earlier kernels wrote is visible, and let the next kernel be placed."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def early(x: torch.Tensor) -> dict[str, bool]:
    """How to launch a kernel that calls `await_previous` on x's device."""
    return {"PDL": True, "launch_pdl": True} if x.is_cuda and _is_known_to(x.device.index) else {"PDL": False}


@cache
def _is_known_to(index: int | None) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(index) >= (9, 0)
